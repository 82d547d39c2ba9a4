{{/* The template of a gateway's pod. */}}
{{- define "trunkline.pod" -}}
metadata:
  labels: {{- include "trunkline.labels" . | nindent 4 }}
  annotations:
    # A changed configuration restarts the pods.
    checksum/config: {{ include (print $.Template.BasePath "/configmap.yaml") . | sha256sum }}
    {{- with .Values.podAnnotations }}{{ toYaml . | nindent 4 }}{{- end }}
spec:
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ .Values.terminationGracePeriodSeconds }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    fsGroup: 10001
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile: {type: RuntimeDefault}
  {{- with .Values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: gateway
      image: "{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}"
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      env:
        # The engine's threads; torch's own pools would take one per core of the node.
        - {name: OMP_NUM_THREADS, value: {{ .Values.threads | quote }}}
        {{- if .Values.engines.replicas }}
        - name: TRUNKLINE_FLEET_NAME
          valueFrom: {fieldRef: {fieldPath: metadata.name}}
        - {name: TRUNKLINE_FLEET_TLS, value: /etc/trunkline-tls/$(TRUNKLINE_FLEET_NAME)}
        {{- end }}
        {{- if .Values.sharedSecret }}
        - name: VALKEY_PASSWORD
          valueFrom:
            secretKeyRef: {name: {{ .Values.sharedSecret }}, key: VALKEY_PASSWORD}
        {{- end }}
        {{- if .Values.passwordSecret }}
        - name: PGPASSWORD
          valueFrom:
            secretKeyRef: {name: {{ .Values.passwordSecret }}, key: PGPASSWORD}
        {{- end }}
        {{- with .Values.extraEnv }}{{ toYaml . | nindent 8 }}{{- end }}
      ports:
        - {name: http, containerPort: 8080}
        - {name: admin, containerPort: 8081}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL]}
      # The first start fetches the model and compiles kernels: up to ten minutes.
      startupProbe:
        httpGet: {path: /readyz, port: http}
        periodSeconds: 5
        failureThreshold: 120
      readinessProbe:
        httpGet: {path: /readyz, port: http}
        periodSeconds: 5
        timeoutSeconds: 3
        failureThreshold: 1
      # The process is up; the gateway itself restarts a lost engine.
      livenessProbe:
        httpGet: {path: /healthz, port: http}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      resources: {{- toYaml .Values.resources | nindent 8 }}
      volumeMounts:
        - {name: data, mountPath: /var/lib/trunkline}
        - {name: config, mountPath: /etc/trunkline, readOnly: true}
        - {name: tmp, mountPath: /tmp}
        {{- if .Values.engines.replicas }}
        - {name: tls, mountPath: /etc/trunkline-tls, readOnly: true}
        {{- end }}
        {{- with .Values.extraVolumeMounts }}{{ toYaml . | nindent 8 }}{{- end }}
  volumes:
    - name: config
      configMap: {name: {{ include "trunkline.name" . }}}
    - name: tmp
      emptyDir: {}
    {{- if .Values.engines.replicas }}
    # Each pod sees all gateways' certificates: a template has one volume for all of them.
    - name: tls
      projected:
        defaultMode: 0440
        sources:
          {{- range until (int .Values.replicas) }}
          {{- include "trunkline.certificate" (printf "%s-%d" (include "trunkline.name" $) .) | nindent 10 }}
          {{- end }}
    {{- end }}
    {{- with .Values.extraVolumes }}{{ toYaml . | nindent 4 }}{{- end }}
  {{- with .Values.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}

{{/* The name of every object: the release's, with the chart's unless the release has it already. */}}
{{- define "trunkline.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "trunkline.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "trunkline.labels" -}}
{{ include "trunkline.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* Engines: other names, so that no Service of the gateways leads to them. */}}
{{- define "trunkline.engineSelector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}-engine
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "trunkline.engineLabels" -}}
{{ include "trunkline.engineSelector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* A holder's certificate as cert-manager writes it, in a folder of its name, under the names
that Trunkline reads. */}}
{{- define "trunkline.certificate" -}}
- secret:
    name: {{ . }}-tls
    items:
      - {key: ca.crt, path: {{ . }}/authority.pem}
      - {key: tls.crt, path: {{ . }}/certificate.pem}
      - {key: tls.key, path: {{ . }}/key.pem}
{{- end -}}

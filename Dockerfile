# syntax=docker/dockerfile:1
# A gateway with its engine, run by a user without rights. `docker build .` makes the image for
# CPUs, `docker build --target cuda .` the one for NVIDIA GPUs. Data, models and the kernels that
# are compiled at the first start are on the volume /var/lib/trunkline; nothing else is written.
ARG PYTHON=3.11-slim-bookworm

FROM python:${PYTHON} AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY kernels kernels
COPY tenancy tenancy
COPY engine engine
COPY gateway gateway
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

# torch first: its layer is kept while the code changes.
FROM python:${PYTHON} AS packages
RUN python -m venv /opt/trunkline
ENV PATH=/opt/trunkline/bin:$PATH
COPY constraints.txt /

FROM packages AS packages-cpu
ARG CPU_WHEELS=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --constraint /constraints.txt --no-deps --index-url "$CPU_WHEELS" torch
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir --constraint /constraints.txt "$(echo /wheels/*.whl)[postgres,shared,otel,remote,fleet]"

FROM packages AS packages-cuda
RUN pip install --no-cache-dir --constraint /constraints.txt torch triton
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir --constraint /constraints.txt "$(echo /wheels/*.whl)[gpu,postgres,shared,otel,remote,fleet]"

# The compiler builds the CPU's kernels, or Triton's launchers, at the first start.
FROM python:${PYTHON} AS runtime
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 10001 --home-dir /var/lib/trunkline trunkline \
    && install --directory --owner=10001 --group=10001 --mode=0700 /var/lib/trunkline
COPY deploy/docker/trunkline.toml /etc/trunkline/trunkline.toml
ENV PATH=/opt/trunkline/bin:$PATH \
    HOME=/var/lib/trunkline \
    TRUNKLINE_DATA_DIR=/var/lib/trunkline \
    TRUNKLINE_CONFIG=/etc/trunkline/trunkline.toml \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
VOLUME /var/lib/trunkline
EXPOSE 8080 8081
STOPSIGNAL SIGTERM
# Healthy: it takes requests. Nothing restarts a container for it; `docker compose up --wait` waits.
HEALTHCHECK --interval=10s --timeout=5s --start-period=180s --retries=3 \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8080/readyz', timeout=4)"]
ENTRYPOINT ["trunkline"]
CMD ["serve"]

FROM runtime AS cuda
COPY --from=packages-cuda /opt/trunkline /opt/trunkline

FROM runtime AS cpu
COPY --from=packages-cpu /opt/trunkline /opt/trunkline

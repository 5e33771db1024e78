# Serves a bundle: docker build -t dflash-trt . (docs/serving.md, "In a container").
# The base has Python, the extra adds tritonserver. NVIDIA's image already has tritonserver:
#   docker build -t dflash-trt --build-arg BASE=nvcr.io/nvidia/tritonserver:26.07-py3 --build-arg EXTRA=triton .
ARG BASE=python:3.11-slim-bookworm

# A separate stage: the final image has neither sources nor build tools.
FROM ${BASE} AS wheel
WORKDIR /src
COPY . .
RUN python3 -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${BASE}
ARG EXTRA=triton-local
# NVIDIA's image marks its Python as managed by the distribution, and its Python backend starts that Python.
ENV PIP_BREAK_SYSTEM_PACKAGES=1 PYTHONUNBUFFERED=1
# Libraries report nothing to their makers (SECURITY.md, "What leaves the machine"); 0 turns a report on.
ENV ORT_DISABLE_TELEMETRY=1 HF_HUB_DISABLE_TELEMETRY=1 TRTLLM_NO_USAGE_STATS=1
COPY requirements/server.txt /opt/dflash-trt/constraints.txt
COPY --from=wheel /wheels /opt/dflash-trt/wheels
RUN python3 -m pip install --no-cache-dir --constraint /opt/dflash-trt/constraints.txt \
        "$(echo /opt/dflash-trt/wheels/dflash_trt-*.whl)[${EXTRA}]" \
    && rm -r /opt/dflash-trt/wheels

# A user id without an account. No file of the image belongs to it.
USER 65532:65532
ENV HOME=/tmp
WORKDIR /tmp
EXPOSE 8000 8001 8002
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s \
    CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/v2/health/ready', timeout=4)"]
# Listen on all addresses of the container. The start of the container decides who reaches them.
ENTRYPOINT ["dflash-trt", "serve", "/bundle", "--api", "triton", "--host", "0.0.0.0"]

# Serves a bundle. By OpenAI's API (docs/openai.md): docker build -t dflash-trt:0.1.0 .
# By Triton Inference Server (docs/serving.md):      docker build -t dflash-trt-triton --target triton .
# ENGINE is that of its bundles: onnxruntime (the default), torch, tensorrt-rtx or tensorrt. For a GPU, whatever they need
# comes in wheels, in the versions of requirements/, and the host has the driver and NVIDIA's container toolkit:
#   docker build -t dflash-trt:0.1.0-tensorrt-rtx --build-arg ENGINE=tensorrt-rtx .
# On NVIDIA's images, which have TensorRT in the version that built a bundle, or a tritonserver already, with TAG as in
# dflash_trt/engines/packages.py, TRITON_IMAGE:
#   docker build -t dflash-trt:0.1.0 --build-arg BASE=nvcr.io/nvidia/tensorrt:TAG .
#   docker build -t dflash-trt-triton --target triton \
#       --build-arg BASE=nvcr.io/nvidia/tritonserver:TAG --build-arg TRITONSERVER= .
ARG BASE=python:3.11-slim-bookworm

# A stage of its own: the final images have neither sources nor build tools.
FROM ${BASE} AS wheel
WORKDIR /src
COPY . .
RUN python3 -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${BASE} AS base
# Some images mark their Python as managed by the distribution, and Triton's Python backend starts that Python.
# Pip's cache would be root's in the home of the image's user: also the cache of pips that pip starts.
ENV PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
ENV HOME=/tmp
# Libraries report nothing to their makers (SECURITY.md, "What leaves the machine"); 0 turns a report on.
ENV ORT_DISABLE_TELEMETRY=1 HF_HUB_DISABLE_TELEMETRY=1 TRTLLM_NO_USAGE_STATS=1
WORKDIR /tmp
COPY requirements/server.txt requirements/test.txt /opt/dflash-trt/
COPY --from=wheel /wheels /opt/dflash-trt/wheels
# What the container toolkit gives a container of the driver.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM base AS triton
ARG TRITONSERVER=nvidia-pytriton
ARG ENGINE=onnxruntime
# The core has ONNX Runtime; every other engine has an extra of its name.
RUN extra="${ENGINE#onnxruntime}" && python3 -m pip install --constraint /opt/dflash-trt/server.txt ${TRITONSERVER} \
        "$(echo /opt/dflash-trt/wheels/dflash_trt-*.whl)[serve${extra:+,$extra}]"
# A user id without an account. No file of the image belongs to it.
USER 65532:65532
EXPOSE 8000 8001 8002
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s \
    CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/v2/health/ready', timeout=4)"]
# Listen on all addresses of the container. The start of the container decides who reaches them.
ENTRYPOINT ["dflash-trt", "serve", "/bundle", "--api", "triton", "--host", "0.0.0.0"]

FROM base AS openai
ARG ENGINE=onnxruntime
RUN extra="${ENGINE#onnxruntime}" && python3 -m pip install --constraint /opt/dflash-trt/test.txt \
        "$(echo /opt/dflash-trt/wheels/dflash_trt-*.whl)[serve${extra:+,$extra}]"
USER 65532:65532
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s \
    CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/ready', timeout=4)"]
ENTRYPOINT ["dflash-trt", "serve", "/bundle", "--host", "0.0.0.0"]

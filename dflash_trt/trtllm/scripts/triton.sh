#!/usr/bin/env bash
# One node: Triton Inference Server with TensorRT-LLM's own model for it. That model is not part of this bundle:
# LLMAPI_REPOSITORY names it, triton_backend/all_models/llmapi in TensorRT-LLM's sources of this release. Its model reads
# triton/model.yaml from here. (dflash-trt deploy writes a repository of our own model, with more inputs.)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
LLM_CONFIG_PATH=$(python3 launch/attention.py "$PWD/triton/model.yaml" | tail -n 1)
export LLM_CONFIG_PATH
exec tritonserver \
    --model-repository "${LLMAPI_REPOSITORY:?name the directory triton_backend/all_models/llmapi of TensorRT-LLM @VERSION@}" \
    --http-address "${HOST:-127.0.0.1}" --grpc-address "${HOST:-127.0.0.1}" \
    --metrics-address "${HOST:-127.0.0.1}" "$@"

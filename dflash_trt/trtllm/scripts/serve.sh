#!/usr/bin/env bash
# An OpenAI-compatible server on 127.0.0.1:8000 (HOST and PORT say otherwise), with llm_args.yaml (CONFIG says otherwise).
# Arguments go to trtllm-serve.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# Before anything loads: the packages of the drafter's attention. tensorrt_llm prints lines of its own first.
config=$(python3 launch/attention.py "${CONFIG:-llm_args.yaml}" | tail -n 1)
exec trtllm-serve ./target --host "${HOST:-127.0.0.1}" --port "${PORT:-8000}" --config "$config" "$@"

#!/usr/bin/env bash
# An OpenAI-compatible server on 127.0.0.1:8000 (HOST and PORT say otherwise), with llm_args.yaml (CONFIG says otherwise).
# Arguments go to trtllm-serve.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec trtllm-serve ./target --host "${HOST:-127.0.0.1}" --port "${PORT:-8000}" --config "${CONFIG:-llm_args.yaml}" "$@"

#!/usr/bin/env bash
# One node: an OpenAI-compatible server on 127.0.0.1:8000 (HOST and PORT say otherwise). Arguments go to trtllm-serve.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec trtllm-serve ./target --host "${HOST:-127.0.0.1}" --port "${PORT:-8000}" --config llm_args.yaml "$@"

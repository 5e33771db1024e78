#!/usr/bin/env bash
# One node, in NVIDIA's container of this release: launch/serve.sh in there, port 8000 on this machine's loopback.
set -euo pipefail
bundle=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
exec docker run --rm --ipc host --gpus all --ulimit memlock=-1 --ulimit stack=67108864 \
    --publish "127.0.0.1:${PORT:-8000}:8000" --volume "$bundle:/bundle:ro" --env HOST=0.0.0.0 \
    "${IMAGE:-@CONTAINER@}" bash /bundle/launch/serve.sh "$@"

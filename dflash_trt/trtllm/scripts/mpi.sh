#!/usr/bin/env bash
# @NODES@ node(s) of @GPUS_PER_NODE@ GPU(s) under MPI. HOSTS names them, as mpirun takes them: HOSTS=node0:@GPUS_PER_NODE@,node1:@GPUS_PER_NODE@
# The bundle must be at the same path on every node. Rank 0 serves.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec mpirun -n @WORLD@ -H "${HOSTS:?name the nodes: HOSTS=node0:@GPUS_PER_NODE@,...}" --wdir "$PWD" \
    trtllm-llmapi-launch env HOST="${HOST:-127.0.0.1}" PORT="${PORT:-8000}" bash launch/serve.sh "$@"

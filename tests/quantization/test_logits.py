"""Every number format, in every place of a model, on every engine: logits against the dequantized dense weights.

Transformers has the dense target and reference.py the dense drafter, in float32, with the numbers that a format's
writer reads. TensorRT's bodies run on ONNX Runtime. Each layout is tried with one shard and with
two, where a layer's tensors lie in both.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_trt.bundle.workspace import silent
from dflash_trt.checkpoint.pair import CheckpointPair, Side, Source
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.engines import registry
from dflash_trt.engines.device.sizes import DECODE
from dflash_trt.engines.device.stream import HostStream
from dflash_trt.engines.onnxruntime.runner import OnnxRuntimeRunner
from dflash_trt.engines.torch.program import Graph
from dflash_trt.engines.torch.runner import TorchRunner
from dflash_trt.formats.precision import Precision
from dflash_trt.graph.builder import FLOAT
from dflash_trt.graph.dialect import Dialect
from dflash_trt.graph.onnxruntime import OnnxRuntime
from dflash_trt.graph.tensorrt import TensorRT
from dflash_trt.graph.torch import Torch
from dflash_trt.models.configs import read_drafter_config, read_target_config
from dflash_trt.models.drafters import build_drafter
from dflash_trt.models.drafters.kind import DrafterParts
from dflash_trt.models.target import build_target
from dflash_trt.quantization.for_build import in_precision
from tests.doubles.checkpoints import VOCAB, make_drafter
from tests.doubles.formats import FORMATS, split, stored_as
from tests.doubles.hybrid_checkpoints import SPARSE, load_hybrid, make_hybrid
from tests.doubles.reference import Drafter, target_outputs
from tests.doubles.sessions import HeadMajorEngine
from tests.doubles.trt_bodies import executable
from tests.models.test_parity import ints

# Linear layers, also those that are multiplied as one and those of the shared expert; and what has code of its own.
PLACES = {
    "linear": r"(self_attn|shared_expert)\.\w+_proj$",
    "experts": r"\.experts\.\d+\.(gate|up|down)_proj$",
    "head": r"lm_head$",
    "drafter": r"(proj|fc)$",
}
# Every format in linear layers and experts; heads and drafters have linear layers too, and take every third.
CELLS = [
    (place, name)
    for i, place in enumerate(PLACES)
    for name in FORMATS[i % 3 if i > 1 else 0 :: 3 if i > 1 else 1]
]
# AutoAWQ has no quantized head.
NO_HEAD = ("AWQ",)
# By place and engine. A layout is the same for TensorRT and torch, and shards are the same in every place.
SHARDS = {"onnxruntime": {"linear": 2}, "tensorrt": {}, "torch": {"linear": 2, "experts": 2, "drafter": 2}}
CAPACITY, ANCHOR = 32, 7
TOKENS = [int(token) for token in np.random.default_rng(0).integers(0, VOCAB, 9)]
FEATURES = np.random.default_rng(1).standard_normal((5, 256)).astype(np.float32)


# The largest error, as a part of what the quantized layers contribute: of rounding in float32 and BF16, and of inputs
# that are rounded to integers, FP8 or NVFP4.
EXACT, BF16, INTEGERS, FP8, NVFP4 = 1e-5, 0.01, 0.03, 0.15, 0.35


def tolerance(place: str, name: str, engine: str) -> float:
    """By what the format, or ONNX Runtime's product of integers, rounds. A build for the CPU widens to BF16."""
    floats = any(kind in name for kind in ("FP8", "FP4"))
    if engine == "onnxruntime" and floats:
        return BF16
    if name in ("FP8", "FP8_DYNAMIC", "Model Optimizer FP8", "Model Optimizer FP8 by row"):
        return FP8
    if name == "NVFP4A16":  # compressed-tensors rounds the products of codes and scales to BF16
        return BF16
    if "NVFP4" in name and name != "Model Optimizer NVFP4 weights":
        return NVFP4
    return INTEGERS if engine == "onnxruntime" and place != "experts" else EXACT


class Cell(NamedTuple):
    """A checkpoint by its shards, and what comes of the numbers that the writer reads; without: of zeros."""

    stored: dict[int, Path]
    expected: np.ndarray
    without: np.ndarray


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
    layers = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "head_dim": 64, "num_experts": 4}
    target = make_hybrid(folder / "target", SPARSE, **sizes, **layers)
    drafter = {"layers": 1, "taps": (0,), "block_size": 4, "head_dim": 64, "intermediate": 256}
    make_drafter(folder / "drafter", target, dtype="float32", **drafter)
    return folder


@pytest.fixture(scope="module")
def without() -> dict[str, np.ndarray]:
    """What comes of zeros, by place."""
    return {}


@pytest.fixture(scope="module", params=CELLS, ids=", ".join)
def cell(
    request: pytest.FixtureRequest, pair: Path, without: dict[str, np.ndarray]
) -> Iterator[tuple[str, str, Cell]]:
    """The place, the format, and the cell."""
    place, name = request.param
    if name in NO_HEAD and place == "head":
        pytest.skip("leaves the head as it is")
    folder = pair / "cell"  # beside the dense pair: ONNX Runtime wants weights below the graph's folder
    folder.mkdir()
    role = "drafter" if place == "drafter" else "target"
    numbers = stored_as(name, pair / role, folder / "stored", PLACES[place])
    original = load_file(pair / role / "model.safetensors")
    assert numbers
    for layer, w in numbers.items():
        dense = original[f"{layer}.weight"].numpy()
        assert np.linalg.norm(w - dense) < 0.2 * np.linalg.norm(dense), layer
    expected = dense_outputs(pair, role, numbers)
    if place not in without:
        without[place] = dense_outputs(pair, role, {layer: 0 * w for layer, w in numbers.items()})
    two = shutil.copytree(folder / "stored", folder / "two shards")
    split(two, 2)
    yield place, name, Cell({1: folder / "stored", 2: two}, expected, without[place])
    shutil.rmtree(folder)


def dense_outputs(pair: Path, role: str, numbers: dict[str, np.ndarray]) -> np.ndarray:
    """Logits of the target, or all log-probabilities of the drafter, with these numbers in the dense model."""
    folder = pair / "cell" / "dense"
    shutil.copytree(pair / role, folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"{layer}.weight": torch.from_numpy(w) for layer, w in numbers.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with torch.no_grad():
        if role == "target":
            return target_outputs(load_hybrid(folder), TOKENS)[0].numpy()
        target = load_hybrid(pair / "target")
        drafts = Drafter(folder).propose(target, torch.from_numpy(FEATURES), ANCHOR)
        return torch.stack(drafts.scores).numpy()


DIALECTS: dict[str, Dialect] = {
    "onnxruntime": OnnxRuntime(),
    "tensorrt": TensorRT(FLOAT),
    "torch": Torch(FLOAT),
}


def found_outputs(pair: Path, role: str, stored: Path, engine: str) -> np.ndarray:
    """The same from an engine."""
    dialect, layout = DIALECTS[engine], registry.find(engine).weight_layout
    capacity: Any = "C" if engine == "onnxruntime" else CAPACITY
    work = stored.parent / f"{engine} of {stored.name}"
    work.mkdir()
    sources = {"target": pair / "target", "drafter": pair / "drafter"} | {role: stored}
    configs = read_target_config(sources["target"]), read_drafter_config(sources["drafter"])
    sides = CheckpointPair(
        Side(Source(sources["target"]), configs[0], Checkpoint(sources["target"]), "target"),
        Side(Source(sources["drafter"]), configs[1], Checkpoint(sources["drafter"]), "drafter"),
    )
    made = in_precision(sides, Precision(), work, silent, layout).sides
    target, drafter = made["target"].checkpoint, made["drafter"].checkpoint
    folders = [str(checkpoint.directory.relative_to(pair)) for checkpoint in (target, drafter)]
    if role == "target":
        model = build_target(configs[0], target, (0,), dialect, folder=folders[0], capacity=capacity)
        feeds = {"tokens": ints(TOKENS), "rows": ints(range(len(TOKENS)))}
    else:
        parts = DrafterParts(
            *(configs[1], drafter, configs[0], target, dialect),
            folder=folders[1],
            target_folder=folders[0],
            capacity=capacity,
            width=VOCAB,
        )
        model = build_drafter(parts)
        block = [ANCHOR] + [configs[1].mask_token_id] * 3
        feeds = {"features": FEATURES[None], "n_features": ints(len(FEATURES)), "block": ints(block)}
    ir.save(model, pair / "graph.onnx")
    out = outputs(pair / "graph.onnx", engine, feeds | {"start": ints(0)})
    if role == "target":
        return out["logits"][0]
    order = np.argsort(out["draft_tokens"][0], axis=-1)
    return np.take_along_axis(out["draft_logprobs"][0], order, axis=-1)


def outputs(file: Path, engine: str, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """One pass of a graph."""
    if engine == "torch":
        graph, block_size = Graph(file, torch.device("cpu")), len(TOKENS)
        on_torch = TorchRunner(graph, slots=1, prefill_chunk=1, block_size=block_size, stream=HostStream())
        return {name: each.numpy() for name, each in on_torch.run(DECODE, feeds).items()}
    if engine == "tensorrt":
        onnx.save(executable(onnx.load(file)), file)
        return HeadMajorEngine(file, slots=1).run(feeds)
    return OnnxRuntimeRunner(file, slots=1, capacity=CAPACITY).run(feeds)


def test_logits(cell: tuple[str, str, Cell], pair: Path) -> None:
    """Linear layers on every engine, all others on one: each format and each place meets each engine."""
    place, name, (stored, expected, without) = cell
    role = "drafter" if place == "drafter" else "target"
    turn = list(PLACES).index(place) + FORMATS.index(name)
    for engine in SHARDS if place == "linear" else [list(SHARDS)[turn % len(SHARDS)]]:
        found = found_outputs(pair, role, stored[SHARDS[engine].get(place, 1)], engine)
        # The median row: a rounded input may change the experts of a row.
        error = np.median(
            np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected - without, axis=1)
        )
        assert error < tolerance(place, name, engine), engine

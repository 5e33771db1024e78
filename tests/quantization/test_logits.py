"""Every number format, in every place of a model, on every engine: logits against the dequantized dense weights.

Transformers has the dense target and reference.py the dense drafter, in float32, with the numbers that a format's
writer reads. With one shard, one place is quantized; with two, all places are, and a layer's tensors lie in both.
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
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.engines.onnxruntime.engine import OnnxRuntimeEngine
from dflash_trt.formats.precision import Precision
from dflash_trt.graph.builder import FLOAT
from dflash_trt.graph.onnxruntime import OnnxRuntime
from dflash_trt.graph.tensorrt import TensorRT
from dflash_trt.models.configs import read_drafter_config, read_target_config
from dflash_trt.models.drafters import build_drafter
from dflash_trt.models.target import build_target
from dflash_trt.quantization.for_build import in_precision
from tests.doubles.checkpoints import VOCAB, make_drafter
from tests.doubles.formats import FORMATS, split, stored_as
from tests.doubles.head_major import HeadMajorEngine
from tests.doubles.hybrid_checkpoints import SPARSE, load_hybrid, make_hybrid
from tests.doubles.reference import Drafter, target_outputs
from tests.doubles.trt_bodies import executable
from tests.models.test_parity import ints

PLACES = {
    "linear": r"self_attn\.o_proj$",
    "fused": r"self_attn\.[qkv]_proj$",
    "experts": r"\.experts\.\d+\.(gate|up|down)_proj$",
    "shared expert": r"shared_expert\.(gate|up|down)_proj$",
    "head": r"lm_head$",
    "drafter": r"(proj|fc)$",
    "everything": r"(proj|lm_head)$",
}
# AutoAWQ has no quantized head.
NO_HEAD = ("AWQ",)
TWO_SHARDS = ("drafter", "everything")
CAPACITY, ANCHOR = 32, 7
TOKENS = [int(token) for token in np.random.default_rng(0).integers(0, VOCAB, 9)]
FEATURES = np.random.default_rng(1).standard_normal((5, 256)).astype(np.float32)


# The largest error, as a part of what the quantized layers contribute: of rounding in float32 and BF16, and of inputs
# that are rounded to integers, FP8 or NVFP4.
EXACT, BF16, INTEGERS, FP8, NVFP4 = 1e-5, 0.01, 0.03, 0.15, 0.35


def tolerance(place: str, name: str, engine: str) -> float:
    """By what the format, or ONNX Runtime's product of integers, rounds."""
    if name in ("FP8", "FP8_DYNAMIC", "Model Optimizer FP8", "Model Optimizer FP8 by row"):
        return FP8
    if name == "NVFP4A16":  # compressed-tensors rounds the products of codes and scales to BF16
        return BF16
    if "NVFP4" in name and name != "Model Optimizer NVFP4 weights":
        return NVFP4
    integers = not any(kind in name for kind in ("FP8", "NVFP4"))
    return INTEGERS if integers and engine == "onnxruntime" and place != "experts" else EXACT


class Cell(NamedTuple):
    """A checkpoint in a format, and what comes of the numbers that its writer reads; without: of zeros."""

    stored: Path
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


@pytest.fixture(scope="module", params=[(place, name) for place in PLACES for name in FORMATS], ids=", ".join)
def cell(
    request: pytest.FixtureRequest, pair: Path, without: dict[str, np.ndarray]
) -> Iterator[tuple[str, str, Cell]]:
    """The place, the format, and the cell."""
    place, name = request.param
    if name in NO_HEAD and place in ("head", "everything"):
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
    if place in TWO_SHARDS:
        split(folder / "stored", 2)
    yield place, name, Cell(folder / "stored", expected, without[place])
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


def found_outputs(pair: Path, role: str, stored: Path, engine: str) -> np.ndarray:
    """The same from an engine."""
    on_tensorrt = engine == "tensorrt"
    dialect: Any = TensorRT(FLOAT) if on_tensorrt else OnnxRuntime()
    capacity: Any = CAPACITY if on_tensorrt else "C"
    work = stored.parent / engine
    work.mkdir()
    sources = {"target": pair / "target", "drafter": pair / "drafter"} | {role: stored}
    target, drafter, _ = in_precision(
        *(Checkpoint(sources[role]) for role in ("target", "drafter")),
        Precision(),
        work,
        silent,
        layout="int4_by_row" if on_tensorrt else "blocks",
    )
    configs = read_target_config(sources["target"]), read_drafter_config(sources["drafter"])
    folders = [str(checkpoint.directory.relative_to(pair)) for checkpoint in (target, drafter)]
    if role == "target":
        model = build_target(configs[0], target, (0,), dialect, folder=folders[0], capacity=capacity)
        feeds = {"tokens": ints(TOKENS), "rows": ints(range(len(TOKENS)))}
    else:
        model = build_drafter(
            *(configs[1], drafter, configs[0], target, dialect),
            folder=folders[1],
            target_folder=folders[0],
            capacity=capacity,
            width=VOCAB,
        )
        block = [ANCHOR] + [configs[1].mask_token_id] * 3
        feeds = {"features": FEATURES[None], "n_features": ints(len(FEATURES)), "block": ints(block)}
    file = pair / "graph.onnx"
    ir.save(model, file)
    if on_tensorrt:
        onnx.save(executable(onnx.load(file)), file)
    run: Any = (
        HeadMajorEngine(file, slots=1) if on_tensorrt else OnnxRuntimeEngine(file, slots=1, capacity=CAPACITY)
    )
    out = run.run(feeds | {"start": ints(0)})
    if role == "target":
        return out["logits"][0]
    order = np.argsort(out["draft_tokens"][0], axis=-1)
    return np.take_along_axis(out["draft_logprobs"][0], order, axis=-1)


@pytest.mark.parametrize("engine", ["onnxruntime", "tensorrt"])
def test_logits(cell: tuple[str, str, Cell], pair: Path, engine: str) -> None:
    place, name, (stored, expected, without) = cell
    role = "drafter" if place == "drafter" else "target"
    found = found_outputs(pair, role, stored, engine)
    # The median row: a rounded input may change the experts of a row.
    error = np.median(np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected - without, axis=1))
    assert error < tolerance(place, name, engine)

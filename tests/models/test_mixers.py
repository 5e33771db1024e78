"""The interface for layers without attention: a toy mixer with a state of fixed size, in a running graph."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from dflash_trt.checkpoint.schema import LayerAttention
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.graph.onnxruntime import OnnxRuntime
from dflash_trt.models import mixers
from dflash_trt.models.configs import read_target_config
from dflash_trt.models.module import Module
from dflash_trt.models.passes import Pass
from dflash_trt.models.target import build_target
from tests.doubles.checkpoints import make_target

LAYER, ROWS, CAPACITY = 1, 7, 16


@dataclass(frozen=True)
class RunningSum:
    """The entry of a layer that sums its rows from the first on."""


class Sums:
    """State [B, D]: the sum of all rows so far."""

    def __init__(self, shared: Pass, layers: list[int]) -> None:
        g, shape = shared.g, ["B", shared.config.hidden_size]
        self.shared, self.states = shared, {i: g.input(f"state.{i}", g.dtype, shape) for i in layers}

    def layer(self, m: Module, i: int, x: ir.Value, written: ir.Value) -> ir.Value:
        g, hidden = self.shared.g, self.shared.config.hidden_size
        m.used.update(name for name in m.checkpoint.tensors if name.startswith(f"{m.prefix}self_attn."))
        rows = g.op("Reshape", x, self.shared.queries.shape(hidden), name="by_row")
        sums = g.op("CumSum", rows, g.constant(1), name="sums")
        sums = g.op("Add", sums, g.unsqueeze(self.states[i], 1), name="with_state")
        last = g.op("Gather", sums, g.constant(-1), name="last", axis=1)
        g.output(last, f"state_out.{i}", g.dtype, ["B", hidden])
        return g.op("Reshape", sums, g.constant([-1, hidden]), name="flat")


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ort.InferenceSession:
    monkeypatch.setattr(mixers, "MIXERS", {**mixers.MIXERS, RunningSum: Sums})
    directory = make_target(tmp_path)
    config = read_target_config(directory)
    layers: list[Any] = list(config.layers)
    assert all(isinstance(layer, LayerAttention) for layer in layers)
    layers[LAYER] = RunningSum()
    config = replace(config, layers=tuple(layers))
    model = build_target(config, Checkpoint(directory), (0,), OnnxRuntime(), folder=".")
    ir.save(model, directory / "target.onnx")
    return ort.InferenceSession(str(directory / "target.onnx"), providers=["CPUExecutionProvider"])


def test_a_layer_may_keep_a_state_where_others_keep_rows(session: ort.InferenceSession) -> None:
    names = {value.name for value in session.get_inputs()}
    assert {f"state.{LAYER}", "k_cache.0", "v_cache.0"} <= names
    assert f"k_cache.{LAYER}" not in names


@pytest.mark.parametrize("cut", [1, 4, ROWS - 1])
def test_passes_in_pieces_carry_the_state_on(session: ort.InferenceSession, cut: int) -> None:
    tokens = np.arange(10, 10 + ROWS)[None]
    whole, _ = _run(session, tokens, 0, {})
    first, caches = _run(session, tokens[:, :cut], 0, {})
    second, _ = _run(session, tokens[:, cut:], cut, caches)
    np.testing.assert_allclose(np.concatenate([first, second], axis=1), whole, atol=2e-4)
    without, _ = _run(session, tokens[:, cut:], cut, {n: a for n, a in caches.items() if "state" not in n})
    assert np.abs(without - second).max() > 1e-2


def _run(
    session: ort.InferenceSession, tokens: np.ndarray, start: int, caches: dict[str, np.ndarray]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    feeds: dict[str, Any] = {"tokens": tokens, "start": np.array([start])}
    feeds["rows"] = np.arange(tokens.shape[1])[None]
    for value in session.get_inputs():
        if value.name not in feeds:
            shape = [{"B": 1, "C": CAPACITY}.get(n, n) for n in value.shape]
            feeds[value.name] = caches.get(value.name, np.zeros(shape, np.float32))
    found = dict(zip((o.name for o in session.get_outputs()), session.run(None, feeds), strict=True))
    return found["logits"], {
        name.replace("_out.", "."): value for name, value in found.items() if "_out." in name
    }

"""Taps and acceptance in Triton's interpreter. Bodies with plugins, compared with bodies of operators."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from dflash_plugins import kernel_specs as uses
from dflash_plugins import launch
from dflash_plugins.dialect import TensorRTPlugins
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator

from dflash_trt.decoding.acceptance import accept
from dflash_trt.decoding.params import SamplingParams
from dflash_trt.engines.torch import kernels, layers
from dflash_trt.graph.onnxruntime import OnnxRuntime
from tests.doubles import plugin_graph
from tests.doubles.triton_interpreter import to_numpy


@given(st.integers(1, 9), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=25)
def test_acceptance_walks_chains(nodes: int, seed: int) -> None:
    """A row without a token, -1, ends the chain."""
    rng = np.random.default_rng(seed)
    tokens, sampled = rng.integers(-1, 2, (2, 3, nodes))
    order = torch.arange(nodes).repeat(3, 1)
    found = launch.accept_block(torch.from_numpy(tokens), order, torch.from_numpy(sampled))
    for b in range(3):
        accepted = 0
        while accepted + 1 < nodes and tokens[b, accepted + 1] == sampled[b, accepted] != -1:
            accepted += 1
        assert (found.accepted[b], found.next_token[b]) == (accepted, sampled[b, accepted])


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.9, top_k=12, top_p=0.9)])
def test_a_round_on_the_device_is_the_hosts(params: SamplingParams) -> None:
    """From logits and drafts to the tokens that `decoding.acceptance.accept` commits."""
    rng = np.random.default_rng(8)
    logits = (rng.standard_normal((3, 5, 600)) * 3).astype(np.float32)
    seeds, start = [4, 2**63, 9], torch.tensor([7, 0, 40])
    positions = start[:, None] + torch.arange(1, 6)
    tensors = launch.sampling_tensors([params] * 3, seeds, "cpu")
    sampled, _ = launch.sample_rows(torch.from_numpy(logits), tensors, positions)
    tokens = torch.cat([torch.tensor([[1], [2], [3]]), sampled[:, :-1]], dim=1)
    tokens[0, 3] += 1  # drafts are right up to here
    tokens[1, 1] += 1
    rows = torch.arange(5).repeat(3, 1)
    found = launch.accept_block(tokens, rows, sampled)
    for b in range(3):
        expected = accept(tokens[b].tolist(), logits[b], params, seeds[b], int(positions[b, 0]))
        assert (found.accepted[b].item(), found.next_token[b].item()) == (len(expected.path), expected.token)
    assert found.accepted.tolist() == [2, 0, 4]


@given(st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=10)
def test_accepted_rows_move_in_every_cache(seed: int) -> None:
    """Caches of several heads, sizes and types. Rows of other slots and other positions stay."""
    rng = np.random.default_rng(seed)
    slots, capacity, dtypes = 3, 24, (torch.float32, torch.bfloat16, torch.float8_e4m3fn)
    shapes = [(slots, int(rng.integers(1, 4)), capacity, size) for size in (8, 70, 4)]
    numbers = [rng.integers(0, 2, (*shape[:3], shape[3])) * 2.0 - 1 for shape in shapes]
    caches = [torch.from_numpy(n).to(d) for n, d in zip(numbers, dtypes, strict=True)]
    before = [rows.float().clone() for rows in caches]
    count = int(rng.integers(1, 9))
    slot, start = int(rng.integers(slots)), int(rng.integers(0, capacity - 12))
    nodes = [0, *sorted(rng.choice(np.arange(1, 12), count - 1, replace=False).tolist())]
    launch.Compaction(caches, 8)(slot, start, nodes)
    for rows, old in zip(caches, before, strict=True):
        old[slot, :, start : start + count] = old[slot, :, [start + node for node in nodes]]
        assert torch.equal(rows.float(), old)
    with pytest.raises(ValueError, match="a row has 6 bytes"):
        launch.Compaction([torch.zeros(1, 1, 4, 3, dtype=torch.bfloat16)], 8)


def test_block_acceptance_of_plugins_is_the_function_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """So is that of the engine on torch, with kernels and without."""
    rng = np.random.default_rng(1)
    logits = np.round(rng.standard_normal((4, 3, 5000)) * 2, 1).astype(np.float32)  # ties
    best = logits.argmax(-1)
    tokens = rng.integers(0, 5000, (4, 6))
    rows = np.array([[0, 2, 5], [1, 2, 3], [3, 4, 5], [0, 1, 2]])
    for b, right in enumerate([0, 1, 2, 2]):
        for i in range(right):
            tokens[b, rows[b, i + 1]] = best[b, i]
    tokens[0, rows[0, 2]] = best[0, 1]  # right, after a wrong one
    feeds = {"tokens": tokens, "rows": rows, "logits": logits}
    body = ir.to_proto(OnnxRuntime().block_acceptance())
    expected = ReferenceEvaluator(body).run(None, feeds, attributes={})
    tensors = {name: torch.from_numpy(array) for name, array in feeds.items()}
    found = plugin_graph.run(TensorRTPlugins(ir.DataType.BFLOAT16).block_acceptance(), tensors, {})
    assert [t.tolist() for t in found] == [a.tolist() for a in expected]
    assert found[0].tolist() == [0, 1, 2, 2]
    used = list[str]()

    def run(use: Any, *given: Any, **arguments: Any) -> None:
        used.append(use.function)
        launch.by_triton(use, *given, **arguments)

    apart = {name: each.repeat_interleave(2, -1)[..., ::2] for name, each in tensors.items()}
    for ours in (None, kernels.LayerKernels(run)):
        monkeypatch.setattr(kernels, "of", lambda x, ours=ours: ours)
        for each in (tensors, apart):
            found = layers.block_acceptance({}, **each)
            assert [t.tolist() for t in found] == [a.tolist() for a in expected]
    assert used == ["best_token", "best_token", "accept_block"] * 2
    nodes = torch.arange(uses.ACCEPT_NODES + 1)[None]  # more than the kernel takes
    accepted, _ = layers.block_acceptance(
        {}, nodes * 0, nodes, torch.tensor([1.0, 0]).expand(1, nodes.numel(), 2)
    )
    assert accepted.tolist() == [uses.ACCEPT_NODES]


def test_taps_of_plugins_are_the_function_body() -> None:
    tensors = {f"h_{i}": torch.randn(6, 32).bfloat16() for i in range(5)}
    (found,) = plugin_graph.run(TensorRTPlugins(ir.DataType.BFLOAT16).hidden_state_tap(5), tensors, {})
    body = ir.to_proto(OnnxRuntime().hidden_state_tap(5))
    (expected,) = ReferenceEvaluator(body).run(None, plugin_graph.arrays(tensors), attributes={})
    assert np.array_equal(to_numpy(found.float()), expected)


def copies(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: None if each is None else each.clone() for name, each in tensors.items()}


@given(st.integers(1, 9), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=25)
def test_anchors_and_drafts_become_the_targets_tokens(nodes: int, seed: int) -> None:
    """The columns after those of the draft are copies of its last one."""
    rng = np.random.default_rng(seed)
    batch, width = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    drafts = torch.from_numpy(rng.integers(0, 2**40, (batch, nodes - 1, width)))
    tensors: dict[str, Any] = {
        "block": torch.from_numpy(rng.integers(0, 2**40, (batch, nodes))),
        "drafts": drafts,
        "tokens": torch.zeros(batch, nodes, dtype=torch.int64),
        "rows": torch.zeros(batch, nodes, dtype=torch.int64),
    }
    found, expected = copies(tensors), copies(tensors)
    length = int(rng.integers(1, nodes + 1))
    for tensors_of, run in ((found, launch.by_triton), (expected, None)):
        launch.fill_tokens(**tensors_of, drafted=length, most=9, run=run)
    assert torch.equal(found["tokens"], expected["tokens"])
    assert torch.equal(found["rows"], expected["rows"])
    assert expected["rows"].tolist() == [list(range(nodes))] * batch
    assert expected["tokens"][:, 1:length].tolist() == drafts[:, : length - 1, 0].tolist()
    tokens = expected["tokens"]
    assert torch.equal(tokens[:, length:], tokens[:, length - 1 : length].expand(-1, nodes - length))


@given(
    st.integers(0, 2**32 - 1), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.booleans()
)
@settings(deadline=None, max_examples=20)
def test_a_round_ends_with_its_features_where_the_drafter_reads_them(
    seed: int, dtype: torch.dtype, committing: bool
) -> None:
    """Slots that are behind by any count, rows without room, and every way in which a row of logits is not finite."""
    rng = np.random.default_rng(seed)
    batch, nodes, room = (int(rng.integers(1, most)) for most in (4, 6, 8))
    vocab, size = (int(rng.choice(sizes)) for sizes in ([7, 4096, 9000], [5, 4100]))
    logits = rng.standard_normal((batch, nodes, vocab)).astype(np.float32)
    for b, i in np.ndindex(batch, nodes):
        at = int(rng.integers(vocab))
        kind = int(rng.integers(8))
        if kind < 3:
            logits[b, i, at] = (np.nan, np.inf, -np.inf)[kind]
        elif kind == 3:
            logits[b, i] = -np.inf
    expected_finite = np.isfinite(logits.max(axis=-1))
    features = torch.from_numpy(rng.standard_normal((batch, nodes, size))).to(dtype)
    places = torch.from_numpy(rng.integers(0, room + 1, batch))
    tensors: dict[str, Any] = {
        "logits": torch.from_numpy(logits),
        "features": features,
        "places": places if committing else None,
        "finite": torch.full((batch, nodes), 7, dtype=torch.int32),
        "unread": torch.zeros(batch + 1, room, size, dtype=dtype),
    }
    found, expected = copies(tensors), copies(tensors)
    counters = torch.zeros(batch * nodes + 1, dtype=torch.int32)
    for _ in range(2):  # the counters are ready for the next round
        launch.end_round(**found, counters=counters)
        assert not counters.any()
    launch.end_round(**expected, counters=counters, run=None)
    for name in ("finite", "unread"):
        assert torch.equal(found[name], expected[name]), name
    assert np.array_equal(found["finite"].numpy(), expected_finite)
    for b, i in np.ndindex(batch, nodes):
        place = int(places[b]) + i
        if committing and expected_finite[b, i] and place < room:
            assert torch.equal(found["unread"][b, place], features[b, i])
            found["unread"][b, place] = 0
    assert not found["unread"].any()  # nothing else was written

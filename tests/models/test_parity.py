"""Both graphs on ONNX Runtime, compared with Transformers and the oracle in float32: logits, taps, drafts.

Every case is a pair of random checkpoints of another shape, built by the real build. Logits have order 10.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

from dflash_trt.building.build import build
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.engines.onnxruntime.runner import OnnxRuntimeRunner
from tests.doubles.checkpoints import VOCAB, make_drafter, make_target
from tests.doubles.reference import Drafter, load_target, target_outputs
from tests.doubles.sessions import session

TOLERANCE = 2e-4
SLIDING, FULL = "sliding_attention", "full_attention"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

# name: (target, drafter)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as published": ({"old_config": True}, {}),
    "one key head per query head": (
        {"heads": 2, "kv_heads": 2, "head_dim": 32, "dtype": "float32"},
        {"heads": 2, "kv_heads": 2, "head_dim": 32, "dtype": "float32", "old_config": False},
    ),
    "four query heads per key head": (
        {"heads": 4, "kv_heads": 1, "head_dim": 64, "dtype": "float16", "shards": 3, "tie": True},
        {"heads": 8, "kv_heads": 2, "head_dim": 64, "dtype": "float16", "taps": (0, 1, 2), "layers": 3},
    ),
    "wide heads, tied": (
        {"heads": 2, "kv_heads": 1, "head_dim": 128, "tie": True, "vocab": 333},
        {"heads": 2, "kv_heads": 1, "head_dim": 128, "taps": (2,), "block_size": 5},
    ),
    "biases": (
        {"attention_bias": True, "hidden": 48, "intermediate": 80, "rope_theta": 10_000.0},
        {
            "attention_bias": True,
            "intermediate": 112,
            "block_size_in": "dflash_config",
            "rope_theta": 500_000.0,
        },
    ),
    "windows": (
        {"sliding_window": 7, "shards": 2},
        {"layer_types": (SLIDING, FULL), "sliding_window": 10, "layers": 2},
    ),
    "windows, block not causal": (
        {"sliding_window": 1, "layer_types": (FULL, SLIDING, FULL, FULL)},
        {"layer_types": (SLIDING, SLIDING), "sliding_window": 9, "is_causal": False, "old_config": False},
    ),
    "causal drafter": ({"layers": 5}, {"causal_in_dflash_config": True, "taps": (1, 3), "block_size": 16}),
    "window in a causal drafter": (
        {},
        {"layer_types": (SLIDING, SLIDING), "sliding_window": 5, "is_causal": True},
    ),
    "yarn": ({"rope_scaling": YARN, "max_position_embeddings": 128}, {"rope_scaling": YARN}),
    "llama3 rope": ({"rope_scaling": LLAMA3}, {"rope_scaling": LLAMA3, "rope_theta": 10_000.0}),
}


@dataclass
class Case:
    bundle: Bundle
    target: Any
    drafter: Drafter
    vocab: int

    def tokens(self, count: int, seed: int = 0) -> list[int]:
        return np.random.default_rng(seed).integers(0, self.vocab, count).tolist()

    def engine(self, graph: str, slots: int = 1) -> OnnxRuntimeRunner:
        """An engine with caches full of garbage: unwritten rows must not matter."""
        engine = OnnxRuntimeRunner(
            self.bundle.path / graph, slots=slots, capacity=self.bundle.capacity, threads=1
        )
        fill(engine.caches.arrays)
        return engine


def fill(caches: dict[str, np.ndarray]) -> None:
    for i, cache in enumerate(caches.values()):
        cache[...] = np.random.default_rng(i).normal(0, 30, cache.shape)


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    settings, drafter_settings = CASES[request.param]
    make, vocab = partial(make_target, **settings), settings.get("vocab", VOCAB)
    return make_case(tmp_path_factory.mktemp("parity"), make, load_target, drafter_settings, vocab=vocab)


def make_case(
    directory: Path,
    make: Callable[[Path], Path],
    load: Callable[[Path], Any],
    drafter_settings: dict[str, Any],
    *,
    length: int = 96,
    vocab: int = VOCAB,
) -> Case:
    """How the target is made, and how Transformers loads it; the drafter; and the most tokens of a sequence."""
    target = make(directory / "target")
    drafter = make_drafter(directory / "drafter", target, **drafter_settings)
    bundle = build(str(target), str(drafter), directory / "bundle", max_seq_len=length)
    return Case(bundle, load(target), Drafter(drafter), vocab)


def ints(*rows: Any) -> np.ndarray:
    return np.array(rows, dtype=np.int64)


def assert_close(actual: np.ndarray, expected: torch.Tensor) -> None:
    assert np.isfinite(actual).all()
    assert np.abs(actual - expected.numpy()).max() <= TOLERANCE


@pytest.mark.parametrize("chunk", [16, 1])
def test_target(case: Case, chunk: int) -> None:
    tokens = case.tokens(41)
    expected_logits, expected_features = target_outputs(case.target, tokens, case.drafter.taps)
    assert 8 < expected_logits.abs().max() < 30
    engine = case.engine("target.onnx")
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        out = engine.run({"tokens": ints(part), "start": ints(start), "rows": ints(list(range(len(part))))})
        rows = slice(start, start + len(part))
        assert_close(out["logits"][0], expected_logits[rows])
        assert_close(out["features"][0], expected_features[rows])


def test_target_verifies_a_block_and_rolls_back(case: Case) -> None:
    tokens = case.tokens(30)
    engine = case.engine("target.onnx")
    engine.run({"tokens": ints(tokens), "start": ints(0), "rows": ints([29])})
    for committed, right in ((20, 0), (13, 2), (14, 7)):
        block = case.tokens(8, seed=committed)
        for i in range(right):  # drafts that the target will accept
            logits, _ = target_outputs(case.target, tokens[:committed] + block[: i + 1])
            block[i + 1] = int(logits[-1].argmax())
        tokens[committed:] = block
        logits, features = target_outputs(case.target, tokens, case.drafter.taps)
        out = engine.run({"tokens": ints(block), "start": ints(committed), "rows": ints(list(range(8)))})
        assert_close(out["logits"][0], logits[committed:])
        assert_close(out["features"][0], features[committed:])
        assert out["accepted"].tolist() == [right]
        assert out["next_token"].tolist() == [int(logits[committed + right].argmax())]


@pytest.mark.parametrize("chunks", [(16, 16, 1), (1, 20, 12)])
def test_drafter(case: Case, chunks: tuple[int, ...]) -> None:
    """The context arrives in several passes. Each is padded and has a block that must leave no trace."""
    tokens, size = case.tokens(33), case.drafter.block_size
    _, features = target_outputs(case.target, tokens, case.drafter.taps)
    expected = case.drafter.propose(case.target, features, 7)
    session, feeds = probe(case.bundle)
    start = 0
    for count in chunks:
        rows = np.full((1, 40, features.shape[1]), 25.0, np.float32)
        rows[0, :count] = features[start : start + count]
        last = start + count == len(tokens)
        block = [7] + [case.drafter.mask_token_id] * (size - 1) if last else case.tokens(size, seed=start)
        feeds |= {"features": rows, "n_features": ints(count), "start": ints(start), "block": ints(block)}
        out = dict(zip((o.name for o in session.get_outputs()), session.run(None, feeds), strict=True))
        feeds |= {
            name.replace("_cache_out.", "_cache."): x for name, x in out.items() if "_cache_out." in name
        }
        start += count
    assert out["draft_tokens"][0, :, 0].tolist() == expected.tokens
    assert_close(out["draft_logprobs"][0, :, 0], expected.logprobs)
    assert_close(out["drafter/norm"], expected.hidden[1:])


def probe(bundle: Bundle) -> tuple[ort.InferenceSession, dict[str, np.ndarray]]:
    """The drafter's graph with its last hidden states as an additional output, and caches full of garbage."""
    model = onnx.load(bundle.path / "drafter.onnx", load_external_data=False)
    model.graph.output.append(
        onnx.helper.make_tensor_value_info("drafter/norm", onnx.TensorProto.FLOAT, None)
    )
    path = bundle.path / "probe.onnx"  # beside the weights
    path.write_bytes(model.SerializeToString())
    run = session(path)
    shapes = {i.name: (1, bundle.capacity, i.shape[2]) for i in run.get_inputs() if "_cache." in i.name}
    caches = {name: np.empty(shape, np.float32) for name, shape in shapes.items()}
    fill(caches)
    bases = {i.name: ints(0) for i in run.get_inputs() if i.name.startswith("base.")}
    return run, caches | bases


def test_sequences_of_a_batch_do_not_meet(case: Case) -> None:
    """Three sequences of different lengths: prefilled with padding, drafted for, and verified together."""
    lengths = [23, 5, 12]
    width, size = max(lengths), case.drafter.block_size
    sequences = [case.tokens(n, seed=n) for n in lengths]
    target, drafter = case.engine("target.onnx", slots=4), case.engine("drafter.onnx", slots=4)
    padded = ints(*(tokens + [3] * (width - len(tokens)) for tokens in sequences))
    out = target.run(
        {"tokens": padded, "start": ints(0, 0, 0), "rows": ints(*([n - 1] for n in lengths))}, first_slot=1
    )
    references = [target_outputs(case.target, tokens, case.drafter.taps) for tokens in sequences]
    for row, n, (logits, features) in zip(range(3), lengths, references, strict=True):
        assert_close(out["logits"][row], logits[n - 1 :])
        assert_close(out["features"][row, :n], features)
    anchors = [11, 22, 33]
    blocks = ints(*([a] + [case.drafter.mask_token_id] * (size - 1) for a in anchors))
    feeds = {
        "features": out["features"],
        "n_features": ints(*lengths),
        "start": ints(0, 0, 0),
        "block": blocks,
    }
    drafts = drafter.run(feeds, first_slot=1)
    for row, anchor, (_, features) in zip(range(3), anchors, references, strict=True):
        expected = case.drafter.propose(case.target, features, anchor)
        assert drafts["draft_tokens"][row, :, 0].tolist() == expected.tokens
        assert_close(drafts["draft_logprobs"][row, :, 0], expected.logprobs)
    blocks[:, 1:] = drafts["draft_tokens"][:, :, 0]
    rows = np.broadcast_to(np.arange(size), (3, size))
    out = target.run({"tokens": blocks, "start": ints(*lengths), "rows": rows}, first_slot=1)
    for row, n in enumerate(lengths):
        logits, features = target_outputs(
            case.target, sequences[row] + blocks[row].tolist(), case.drafter.taps
        )
        assert_close(out["logits"][row], logits[n:])
        assert_close(out["features"][row], features[n:])

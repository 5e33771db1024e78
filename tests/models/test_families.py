"""Llama, Qwen3-MoE and gpt-oss on ONNX Runtime, compared with Transformers' own classes in float32, and as pairs.

The checkpoints are in published form, including MXFP4 experts. Our loader and Transformers each read them in their
own way. The tests of test_parity.py compare the graphs with the reference; they are collected here for these cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from dflash_trt import LLM, SamplingParams
from dflash_trt.building.build import build
from dflash_trt.formats.mxfp4 import unpack_blocks
from dflash_trt.graph import onnxruntime as functions
from dflash_trt.graph.builder import FLOAT, INT64, GraphBuilder
from dflash_trt.graph.dialect import SINK_PADDING, AttentionKind
from dflash_trt.graph.onnxruntime import OnnxRuntime
from dflash_trt.models.configs import read_target_config
from tests.doubles.checkpoints import VOCAB, make_drafter
from tests.doubles.family_checkpoints import make_gpt_oss, make_gpt_oss_drafter, make_llama, make_qwen3_moe
from tests.doubles.reference import Drafter, decode, decode_drafting, target_outputs
from tests.doubles.sessions import session
from tests.models.test_parity import (  # noqa: F401  # the tests among them run on this module's `case`
    Case,
    assert_close,
    fill,
    ints,
    test_sequences_of_a_batch_do_not_meet,
    test_target,
    test_target_verifies_a_block_and_rolls_back,
)

SLIDING, FULL = "sliding_attention", "full_attention"
LONG = 200  # six times the length before RoPE scaling, 25 windows of 8
MAX_SEQ_LEN = LONG + 40
RESIDENT, IN_USE = 1 << 30, 0  # bytes of experts up to which all are widened at load time

Maker = Callable[..., Path]
# name: (target's maker and settings, drafter's maker and settings, RESIDENT_EXPERT_BYTES)
CASES: dict[str, tuple[Maker, dict[str, Any], Maker, dict[str, Any], int]] = {
    "llama": (make_llama, {}, make_drafter, {"block_size": 10, "rope_theta": 500_000.0}, RESIDENT),
    "llama, biases, tied": (
        make_llama,
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 1},
        make_drafter,
        {"layer_types": (SLIDING, SLIDING, FULL), "sliding_window": 12, "layers": 3},
        RESIDENT,
    ),
    "qwen3-moe": (make_qwen3_moe, {}, make_drafter, {"block_size": 16, "layers": 3}, RESIDENT),
    "qwen3-moe, some layers dense": (
        make_qwen3_moe,
        {
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "num_hidden_layers": 6,
            "num_experts_per_tok": 3,
        },
        make_drafter,
        {"taps": (1, 4)},
        IN_USE,
    ),
    "gpt-oss": (make_gpt_oss, {}, make_gpt_oss_drafter, {}, RESIDENT),
    "gpt-oss, experts in use": (
        make_gpt_oss,
        {"seed": 3, "sliding_window": 128},  # as published
        make_gpt_oss_drafter,
        {"block_size": 10},
        IN_USE,
    ),
    "gpt-oss, not quantized": (
        make_gpt_oss,
        {"quantized": False, "num_experts_per_tok": 8, "experts_per_token": 8, "swiglu_limit": 2.5},
        make_gpt_oss_drafter,
        {"layers": 2, "layer_types": (SLIDING, FULL), "sliding_window": 9},
        IN_USE,
    ),
}
GPT_OSS = [name for name in CASES if name.startswith("gpt-oss")]


def load(directory: Path) -> Any:
    """The target as Transformers reads the checkpoint, in float32."""
    config = read_target_config(directory)
    packed = config.moe is not None and config.moe.quantization is not None
    model, info = AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
        **({"quantization_config": Mxfp4Config(dequantize=True)} if packed else {}),
    )
    assert type(model).__name__ == config.architecture
    assert not any(info.values()), info
    return model.eval()


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("family"), request.param)


def make_case(directory: Path, name: str, **changes: Any) -> Case:
    make_target, settings, make, drafter_settings, resident = CASES[name]
    target = make_target(directory / "target", **settings, **changes)
    drafter = make(directory / "drafter", target, **drafter_settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functions, "RESIDENT_EXPERT_BYTES", resident)
        bundle = build(str(target), str(drafter), directory / "bundle", max_seq_len=MAX_SEQ_LEN)
    return Case(bundle, load(target), Drafter(drafter), VOCAB)


@pytest.mark.parametrize("chunk", [LONG, 64])
def test_long_positions(case: Case, chunk: int) -> None:
    """Beyond the length before RoPE scaling and beyond many windows: all logits, all taps, then the drafts."""
    tokens = case.tokens(LONG)
    logits, features = target_outputs(case.target, tokens, case.drafter.taps)
    target, drafter = case.engine("target.onnx"), case.engine("drafter.onnx")
    block = [7] + [case.drafter.mask_token_id] * (case.drafter.block_size - 1)
    for start in range(0, LONG, chunk):
        part = tokens[start : start + chunk]
        rows = list(range(len(part)))
        out = target.run({"tokens": ints(part), "start": ints(start), "rows": ints(rows)})
        assert_close(out["logits"][0], logits[start : start + chunk])
        assert_close(out["features"][0], features[start : start + chunk])
        feeds = {"features": out["features"], "n_features": ints(len(part)), "start": ints(start)}
        drafts = drafter.run(feeds | {"block": ints(block)})
    expected = case.drafter.propose(case.target, features, 7)
    assert drafts["draft_tokens"][0, :, 0].tolist() == expected.tokens
    assert_close(drafts["draft_logprobs"][0, :, 0], expected.logprobs)


def test_mxfp4_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    """Three readings of the same bytes, bit for bit: ours, Transformers' function, its loaded model."""
    directory = make_gpt_oss(tmp_path / "target")
    stored, model = load_file(directory / "model.safetensors"), load(directory)
    for name, parameter in model.named_parameters():
        if f"{name}_blocks" in stored:
            blocks, scales = stored[f"{name}_blocks"], stored[f"{name}_scales"]
            ours = unpack_blocks(blocks.numpy(), scales.numpy()).transpose(0, 2, 1)
            theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            np.testing.assert_array_equal(ours, theirs.numpy())
            np.testing.assert_array_equal(ours, parameter.detach().numpy())
    assert sum(name.endswith("_blocks") for name in stored) == 8


def test_no_part_of_gpt_oss_is_idle(tmp_path: Path) -> None:
    """Shows that the parity tests of these checkpoints mean something: without any part, logits move far beyond the
    bound.
    """
    directory, tokens = make_gpt_oss(tmp_path / "target"), list(range(40))
    expected, _ = target_outputs(load(directory), tokens)

    def without(change: Callable[[Any], Any]) -> float:
        model = load(directory)
        with torch.no_grad():
            for layer in model.model.layers:
                change(layer)
        return float((target_outputs(model, tokens)[0] - expected).abs().max())

    parts: dict[str, Callable[[Any], Any]] = {
        "sinks": lambda layer: layer.self_attn.sinks.fill_(-100),
        "attention bias": lambda layer: layer.self_attn.k_proj.bias.zero_(),
        "output bias": lambda layer: layer.self_attn.o_proj.bias.zero_(),
        "router bias": lambda layer: layer.mlp.router.bias.zero_(),
        "gate and up bias": lambda layer: layer.mlp.experts.gate_up_proj_bias.zero_(),
        "down bias": lambda layer: layer.mlp.experts.down_proj_bias.zero_(),
        "clamp": lambda layer: setattr(layer.mlp.experts, "limit", 1e9),
        "alpha": lambda layer: setattr(layer.mlp.experts, "alpha", 1.0),
    }
    assert {name for name, change in parts.items() if without(change) < 0.05} == set()


@pytest.fixture(scope="module", params=["llama", "qwen3-moe, some layers dense", *GPT_OSS[:2]])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Case, LLM]]:
    """Targets with favourite tokens, so that some drafts are right."""
    case = make_case(tmp_path_factory.mktemp("pair"), request.param, favourites=6)
    with LLM(case.bundle.path, max_batch_size=3, prefill_chunk=16, threads=1) as llm:
        yield case, llm


def test_drafting_and_batches_change_no_token(pair: tuple[Case, LLM]) -> None:
    """Five requests of different lengths in three slots, greedy or sampled, compared with each alone without drafts.

    One of them fills the cache up to the last row that a request may have.
    """
    case, llm = pair
    prompts = [case.tokens(n, seed=n) for n in (3, 17, LONG, 1, 40)]
    params = [
        SamplingParams(temperature=seed % 2, max_tokens=budget, seed=seed, ignore_eos=True)
        for seed, budget in enumerate((60, 5, 40, 18, 11))
    ]
    alone = [llm.generate(t, p, speculate=False) for t, p in zip(prompts, params, strict=True)]
    plain = [c.token_ids for c in alone]
    assert [len(tokens) for tokens in plain] == [60, 5, 40, 18, 11]
    for block_length in (1, 3, 8):
        found = llm.generate(prompts, params, block_length=block_length)
        assert [c.token_ids for c in found] == plain
        assert llm.generate(prompts[0], params[0], block_length=block_length).token_ids == plain[0]
    # Without accepted drafts, the equality above would say little.
    assert sum(c.statistics.num_accepted_tokens for c in found) > 0


def test_a_pair_decodes_as_the_oracle_does(pair: tuple[Case, LLM]) -> None:
    """Across a window and the original RoPE length. The oracle accepts the same drafts."""
    case, llm = pair
    prompt, params = case.tokens(25), SamplingParams(max_tokens=20, ignore_eos=True)
    expected = decode_drafting(case.target, case.drafter, prompt, 20, block_length=8)
    assert expected.tokens == decode(case.target, prompt, 20).tokens
    completion = llm.generate(prompt, params, block_length=8)
    assert completion.token_ids == expected.tokens
    assert completion.statistics.num_accepted_tokens == sum(expected.accepted)


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("sink", [-1e30, -30.0, 0.0, 30.0, 1e4, 1e30])
def test_attention_with_a_sink(sink: float, window: int | None) -> None:
    """Compared with a softmax over the visible scores and the sink, at row 1500 of a cache full of garbage."""
    rng = np.random.default_rng(0)
    heads, kv_heads, size, start, count, capacity = 4, 2, 16, (1500, 1350), 5, 1600
    q = rng.normal(0, 2, (2, heads, count, size)).astype(np.float32)
    past = [rng.normal(0, 2, (2, kv_heads, capacity, size)).astype(np.float32) for _ in "kv"]
    new = [rng.normal(0, 2, (2, kv_heads, count, size)).astype(np.float32) for _ in "kv"]
    sinks = np.array([sink, sink + 1, 0, sink / 2], np.float32)
    padded = np.zeros((2, kv_heads, capacity, size + SINK_PADDING), np.float32)
    padded[..., :size] = past[0]
    for row, n in enumerate(start):
        padded[row, :, n:] = rng.normal(0, 30, padded[row, :, n:].shape)
    last = np.array(start)[:, None] + np.arange(count)
    first = np.zeros_like(last) if window is None else last - (window - 1)
    kind = AttentionKind(heads, kv_heads, size, windowed=window is not None)
    y = _sink_session(kind).run(
        ["y"],
        {
            "q": by_row(q),
            "k": by_row(new[0]),
            "v": by_row(new[1]),
            "k_cache": by_row(padded),
            "v_cache": by_row(past[1]),
            "start": np.array(start),
            "first": first,
            "last": last,
            "lengths": np.array(start) + count,
            "sinks": sinks,
        },
    )[0]
    y = y.reshape(2, count, heads, size).transpose(0, 2, 1, 3)
    for row, n in enumerate(start):
        k, v = (np.concatenate([p[row, :, :n], x[row]], axis=1) for p, x in zip(past, new, strict=True))
        k, v = (np.repeat(x, heads // kv_heads, axis=0).astype(np.float64) for x in (k, v))
        scores = q[row] @ k.transpose(0, 2, 1) * size**-0.5
        rows = np.arange(n + count)
        visible = (rows >= first[row][:, None]) & (rows <= last[row][:, None])
        scores = np.where(visible, scores, -np.inf)
        highest = np.maximum(scores.max(-1), sinks[:, None])[..., None]
        shares = np.exp(scores - highest)
        total = shares.sum(-1, keepdims=True) + np.exp(sinks[:, None, None] - highest)
        np.testing.assert_allclose(y[row], shares / total @ v, atol=2e-5)


def by_row(x: np.ndarray) -> np.ndarray:
    """[B, heads, rows, size] -> [B, rows, heads*size]."""
    return np.ascontiguousarray(x.transpose(0, 2, 1, 3)).reshape(x.shape[0], x.shape[2], -1)


def _sink_session(kind: AttentionKind) -> ort.InferenceSession:
    """The sink's mask and attention alone."""
    g, dialect = GraphBuilder("sink"), OnnxRuntime()
    q = g.input("q", FLOAT, ["B", "S", kind.heads * kind.head_dim])
    rows = [g.input(name, FLOAT, ["B", "S", kind.kv_heads * kind.head_dim]) for name in "kv"]
    shapes = dialect.cache_shapes(kind.kv_heads, kind.head_dim, "C", sinks=True)
    caches = [g.input(f"{name}_cache", FLOAT, shape) for name, shape in zip("kv", shapes, strict=True)]
    start, lengths = g.input("start", INT64, ["B"]), g.input("lengths", INT64, ["B"])
    first, last = g.input("first", INT64, ["B", "S"]), g.input("last", INT64, ["B", "S"])
    sinks = g.input("sinks", FLOAT, [kind.heads])
    capacity = g.dim(caches[0], 1)
    mask = g.call(dialect.sink_attention_mask(kind), first, last, lengths, capacity, outputs=3, name="mask")
    inputs = (q, *rows, *caches, start, *mask, lengths, sinks)
    y, *_ = g.call(dialect.sink_attention(kind), *inputs, outputs=3, name="attention")
    y = g.op("Reshape", y, g.constant([0, 0, -1]))
    g.output(y, "y", FLOAT, ["B", "S", kind.heads * kind.head_dim])
    return session(g.model())

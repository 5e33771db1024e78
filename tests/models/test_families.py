"""The families on ONNX Runtime, compared with Transformers' own classes in float32, and as pairs.

The checkpoints are in published form, including MXFP4 experts. Our loader and Transformers each read them in their
own way. The tests of test_parity.py compare the graphs with the reference; they are collected here for these cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from dflash_trt import LLM, SamplingParams
from dflash_trt.building.build import build
from dflash_trt.graph import onnxruntime as functions
from dflash_trt.models.configs import read_target_config
from tests.doubles.checkpoints import VOCAB, make_drafter
from tests.doubles.family_checkpoints import make_gpt_oss, make_gpt_oss_drafter, make_llama, make_qwen3_moe
from tests.doubles.formats import unpack_blocks
from tests.doubles.reference import Drafter, decode, decode_drafting, target_outputs
from tests.doubles.text_checkpoints import (
    EXPERTS,
    GEMMA_IMAGES,
    MINISTRAL_IMAGES,
    UNIFIED,
    UNIFIED_IMAGES,
    load_text,
    make_gemma,
    make_ministral,
    make_muse,
)
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


class Family(NamedTuple):
    """How the target is made and read by Transformers, how its drafter is made, and RESIDENT_EXPERT_BYTES."""

    make: Callable[..., Path]
    load: Callable[[Path], Any]
    drafter: Callable[[Path, Path], Path] = make_drafter
    resident: int = RESIDENT


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


def load_muse(directory: Path) -> Any:
    """`model.embed_tokens` gives drafters the rows without their norm."""
    model = load_text(directory)
    table = model.model.language_model.embed_tokens
    model.model.embed_tokens = torch.nn.Embedding.from_pretrained(table.weight)
    return model


# Queries of Ministral grow with every position, every 16th, or from 16,384 on.
CASES: dict[str, Family] = {
    "llama": Family(make_llama, load, partial(make_drafter, block_size=10, rope_theta=500_000.0)),
    "llama, biases, tied": Family(
        partial(
            make_llama, attention_bias=True, mlp_bias=True, tie_word_embeddings=True, num_key_value_heads=1
        ),
        load,
        partial(make_drafter, layer_types=(SLIDING, SLIDING, FULL), sliding_window=12, layers=3),
    ),
    "qwen3-moe": Family(make_qwen3_moe, load, partial(make_drafter, block_size=16, layers=3)),
    "qwen3-moe, some layers dense": Family(
        partial(
            make_qwen3_moe,
            norm_topk_prob=False,
            decoder_sparse_step=2,
            mlp_only_layers=[3],
            num_hidden_layers=6,
            num_experts_per_tok=3,
        ),
        load,
        partial(make_drafter, taps=(1, 4)),
        IN_USE,
    ),
    "gpt-oss": Family(make_gpt_oss, load, make_gpt_oss_drafter),
    "gpt-oss, experts in use": Family(
        partial(make_gpt_oss, seed=3, sliding_window=128),  # as published
        load,
        partial(make_gpt_oss_drafter, block_size=10),
        IN_USE,
    ),
    "gpt-oss, not quantized": Family(
        partial(make_gpt_oss, quantized=False, num_experts_per_tok=8, experts_per_token=8, swiglu_limit=2.5),
        load,
        partial(make_gpt_oss_drafter, layers=2, layer_types=(SLIDING, FULL), sliding_window=9),
        IN_USE,
    ),
    "ministral3": Family(partial(make_ministral, original=16, num_key_value_heads=1), load_text),
    "ministral3 with images, tied, windows": Family(
        partial(
            make_ministral,
            architecture=MINISTRAL_IMAGES,
            tie_word_embeddings=True,
            sliding_window=7,
            head_dim=24,
            num_attention_heads=2,
        ),
        load_text,
    ),
    "muse glimmer, other sizes and places": Family(
        partial(
            make_muse,
            hidden_size=40,
            intermediate_size=56,
            num_key_value_heads=1,
            num_hidden_layers=5,
            head_dim=24,
            attention_bias=True,
            tie_word_embeddings=True,
            layer_types=[FULL, SLIDING, FULL, SLIDING, FULL],
            layer_rope_theta=[10000.0, 10000.0, 0, 0, 10000.0],
            qk_scale_factor=2.5,
            post_norm_eps=0.1,
        ),
        load_muse,
        partial(make_drafter, taps=(0, 3), block_size=5, head_dim=12),
    ),
    "gemma 26B-A4B": Family(partial(make_gemma, architecture=GEMMA_IMAGES, **EXPERTS), load_text),
    "gemma 12B": Family(
        partial(make_gemma, architecture=UNIFIED_IMAGES, hidden_size=48, num_attention_heads=2), load_text
    ),
    "gemma, values of their own": Family(
        partial(make_gemma, attention_k_eq_v=False, hidden_size=40, dtype="float16", global_head_dim=24),
        load_text,
    ),
    "gemma, experts, untied, no soft-cap": Family(
        partial(
            make_gemma,
            **EXPERTS
            | {
                "top_k_experts": 4,
                "tie_word_embeddings": False,
                "final_logit_softcapping": None,
                "layer_types": [FULL] * 2 + [SLIDING] * 2 + [FULL],
                "num_hidden_layers": 5,
                "attention_bias": True,
            },
        ),
        load_text,
    ),
    "gemma, heads by layer": Family(
        partial(
            make_gemma,
            architecture=UNIFIED,
            per_layer_config={
                **{i: {"head_dim": 24, "num_key_value_heads": 4} for i in range(5)},
                5: {"head_dim": 64},
            },
        ),
        load_text,
    ),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("family"), request.param)


def make_case(directory: Path, name: str, **changes: Any) -> Case:
    family = CASES[name]
    target = family.make(directory / "target", **changes)
    drafter = family.drafter(directory / "drafter", target)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functions, "RESIDENT_EXPERT_BYTES", family.resident)
        bundle = build(str(target), str(drafter), directory / "bundle", max_seq_len=MAX_SEQ_LEN)
    return Case(bundle, family.load(target), Drafter(drafter), VOCAB)


def test_long_positions(case: Case) -> None:
    """Beyond the length before RoPE scaling and beyond many windows: all logits, all taps, then the drafts."""
    tokens = case.tokens(LONG)
    logits, features = target_outputs(case.target, tokens, case.drafter.taps)
    target, drafter = case.engine("target.onnx"), case.engine("drafter.onnx")
    block = [7] + [case.drafter.mask_token_id] * (case.drafter.block_size - 1)
    for start in range(0, LONG, 64):
        part = tokens[start : start + 64]
        rows = list(range(len(part)))
        out = target.run({"tokens": ints(part), "start": ints(start), "rows": ints(rows)})
        assert_close(out["logits"][0], logits[start : start + 64])
        assert_close(out["features"][0], features[start : start + 64])
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


@pytest.fixture(
    scope="module", params=["llama", "qwen3-moe, some layers dense", "gpt-oss", "gpt-oss, experts in use"]
)
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
    for block_length in (3, 8):
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

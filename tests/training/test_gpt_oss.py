"""Make a gpt-oss pair from the shipped pair `tiny`: the trained pair is written, read and run without changes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from build_scripts.corpus.corpus import CATEGORIES, example, examples
from build_scripts.train.architecture import TINY, gpt_oss, load_qwen3
from build_scripts.train.gpt_oss_chat import ADDED, EFFORTS, effort_of, render
from build_scripts.train.gpt_oss_export import pack_mxfp4
from build_scripts.train.gpt_oss_model import GptOss, mxfp4_round, mxfp4_scale
from dflash_trt import LLM, SamplingParams
from dflash_trt.building.build import build
from dflash_trt.errors import RequestError
from dflash_trt.formats.mxfp4 import unpack_blocks
from dflash_trt.formats.numbers import E2M1
from dflash_trt.models.configs import read_drafter_config, read_target_config
from dflash_trt.text.tokenizer import Tokenizer
from tests.models.test_families import load

MAKE = gpt_oss()
LENGTH = 400  # beyond the length before RoPE scaling, and six windows


@dataclass
class Made:
    """A pair as it is before training, with every bias and sink of the target moved; the target as it was written."""

    directory: Path
    trained: GptOss
    target: GptOss
    tokenizer: Tokenizer


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    directory = tmp_path_factory.mktemp("pair")
    torch.manual_seed(0)
    target = MAKE.new_target()
    for name, parameter in target.named_parameters():
        if name.endswith(("bias", "sinks")):
            parameter.data += torch.randn_like(parameter) * (1 if name.endswith("sinks") else 0.02)
    MAKE.new_tokenizer().save(str(directory / "tokenizer.json"))
    MAKE.write_target(target, directory / "tokenizer.json", directory / "target")
    assert MAKE.begin_drafter is not None
    MAKE.begin_drafter(directory / "drafter")
    read = MAKE.load_target(directory / "target")
    assert isinstance(target, GptOss)
    assert isinstance(read, GptOss)
    return Made(
        directory,
        target,
        read,
        Tokenizer(directory / "target"),
    )


def test_mxfp4_is_the_nearest_number_and_is_stored_as_it_is() -> None:
    torch.manual_seed(0)
    weight = torch.randn(2, 6, 64) * torch.exp2(torch.randint(-9, 3, (2, 6, 1)))
    weight[0, 0] = 0
    rounded, scale = mxfp4_round(weight), mxfp4_scale(weight)
    numbers = (scale * torch.from_numpy(E2M1)).unsqueeze(-2)  # [..., G, 1, 16]
    distance = (weight.view(2, 6, 2, 32, 1) - numbers).abs().amin(-1)
    torch.testing.assert_close((rounded - weight).abs().view(2, 6, 2, 32), distance, rtol=0, atol=0)
    blocks, scales = pack_mxfp4(weight)
    assert (tuple(blocks.shape), tuple(scales.shape)) == ((2, 6, 2, 16), (2, 6, 2))
    unpacked = torch.from_numpy(unpack_blocks(blocks.numpy(), scales.numpy()))
    torch.testing.assert_close(unpacked, rounded, rtol=0, atol=0)
    torch.testing.assert_close(mxfp4_round(rounded), rounded, rtol=0, atol=0)


def test_it_begins_as_the_shipped_pair() -> None:
    """An expert layer differs from the MLP that it was cut from by less than an eighth of the norm."""
    torch.manual_seed(0)
    new, old = MAKE.new_target().eval(), load_qwen3(TINY / "target")
    vocab = old.shape.vocab_size
    torch.testing.assert_close(new.embed_tokens.weight[:vocab], old.embed_tokens.weight)
    torch.testing.assert_close(new.lm_head.weight[:vocab], old.embed_tokens.weight)
    for new_layer, old_layer in zip(new.layers, old.layers, strict=True):
        x = torch.randn(64, old.shape.hidden_size) * old_layer.post_attention_layernorm.weight
        expected = old_layer.mlp(x)
        assert (new_layer.mlp(x) - expected).norm() < expected.norm() / 8


def test_its_drafter_begins_as_the_shipped_one(made: Made) -> None:
    begun, shipped = (load_file(root / "drafter" / "model.safetensors") for root in (made.directory, TINY))
    biases = {name for name in begun if name.endswith(".bias")}
    assert set(begun) == biases | set(shipped)
    assert len(biases) == 2 * 4
    assert not any(begun[name].any() for name in biases)
    for name in shipped:
        scale = MAKE.shape.rotary_factor if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0
        torch.testing.assert_close(begun[name].float() * scale, shipped[name].float(), rtol=0.01, atol=0)


def test_what_is_written_is_gpt_oss_as_published(made: Made) -> None:
    target, drafter = (
        read_target_config(made.directory / "target"),
        read_drafter_config(made.directory / "drafter"),
    )
    assert target.moe is not None
    assert (target.moe.quantization, target.moe.activation) == ("mxfp4", "gpt_oss")
    assert (target.moe.router_bias, target.moe.expert_bias, target.tie_word_embeddings) == (True, True, False)
    assert (target.moe.num_experts, target.moe.experts_per_token) == (8, 4)
    assert [layer.window for layer in target.layers] == [64, None] * 5
    assert drafter.block_size == 8
    for config in (target, drafter):
        assert config.attention_bias
        assert (config.rope.rope_type, config.rope.parameters["truncate"]) == ("yarn", False)
    assert target.rope == drafter.rope
    size = sum(
        file.stat().st_size for root in (made.directory, TINY) for file in root.rglob("*") if file.is_file()
    )
    assert size < 25_000_000


def test_transformers_and_both_forms_of_training_agree(made: Made) -> None:
    text = "".join("".join(render(example(kind, index))) for index in range(3) for kind in CATEGORIES)
    tokens = torch.tensor([made.tokenizer.encode(text)[:LENGTH]])
    positions = torch.arange(LENGTH)[None]
    with torch.no_grad():
        expected = load(made.directory / "target")(tokens).logits
        whole = made.target.head(made.target(tokens, positions * 0, positions))
        # In training: the same matrices, but before BF16 and MXFP4.
        trained = made.trained.head(made.trained(tokens, positions * 0, positions))
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-4)
    assert (trained - expected).abs().mean() < 0.05


@torch.no_grad()
def greedy(target: GptOss, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        row, positions = torch.tensor([tokens]), torch.arange(len(tokens))[None]
        tokens.append(int(target.head(target(row, positions * 0, positions)[0, -1]).argmax()))
    return tokens[len(prompt) :]


def test_the_built_pair_gives_the_tokens_of_training(made: Made, tmp_path: Path) -> None:
    parts = (str(made.directory / role) for role in ("target", "drafter"))
    bundle = build(*parts, tmp_path / "bundle")
    with LLM(bundle.path, threads=1) as llm:
        for kind in CATEGORIES:
            prompt = made.tokenizer.encode(MAKE.render(example(kind, 0))[0])
            params = SamplingParams(max_tokens=24, ignore_eos=True)
            drafted, plain = llm.generate(prompt, params), llm.generate(prompt, params, speculate=False)
            assert drafted.token_ids == plain.token_ids
            assert drafted.token_ids == greedy(made.target, prompt, 24)
            warm = SamplingParams(max_tokens=24, temperature=1.0, seed=7)
            assert (
                llm.generate(prompt, warm).token_ids == llm.generate(prompt, warm, speculate=False).token_ids
            )


def test_reasoning_effort(made: Made) -> None:
    """The chat template renders the training text for every effort. Other efforts are refused."""
    for kind in CATEGORIES:
        for each in islice(examples(kind, held_out=False), 25):
            for effort in EFFORTS:
                prompt = made.tokenizer.apply_chat_template(each.messages, reasoning_effort=effort)
                assert prompt == render(each, effort)[0]
            assert made.tokenizer.apply_chat_template(each.messages) == render(each, "low")[0]
            assert render(each) == render(each, effort_of(each))
    assert {effort_of(example("math", index)) for index in range(30)} == set(EFFORTS)
    with pytest.raises(RequestError, match="reasoning_effort is none, expected low, medium or high"):
        made.tokenizer.apply_chat_template(each.messages, reasoning_effort="none")


def test_the_tokenizer_is_that_of_tiny_with_other_special_tokens(made: Made) -> None:
    tiny = Tokenizer(TINY / "target")
    text = example("tools", 0).answer
    assert made.tokenizer.encode(text) == tiny.encode(text)
    start, end = tiny.encode("<|im_start|>"), tiny.encode("<|im_end|>")
    assert made.tokenizer.encode("<|start|><|return|>") == start + end
    first = tiny.backend.get_vocab_size()
    assert made.tokenizer.encode("".join(ADDED)) == [first, first + 1, first + 2]
    assert made.tokenizer.decode([first, *end]) == ""

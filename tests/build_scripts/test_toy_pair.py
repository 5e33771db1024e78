"""The maker of the toy pairs: what it trains on, and that a pair made by it is built and decodes."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from build_scripts import toy_pair
from build_scripts.corpus.corpus import CATEGORIES, example
from dflash_trt import LLM, SamplingParams
from dflash_trt.building.build import build
from dflash_trt.errors import RequestError
from dflash_trt.text.tokenizer import Tokenizer
from tests.models.test_families import load


@pytest.mark.parametrize("pair", ["tiny", "tiny-gpt-oss"])
def test_a_pair_made_anew_is_built_and_decodes_as_transformers_does(pair: str, tmp_path: Path) -> None:
    toy_pair.main([pair, "--out", str(tmp_path), "--steps", "1", "--rows", "1"])
    target, drafter = tmp_path / "target", toy_pair.SHIPPED / pair / "drafter"
    with LLM(build(str(target), str(drafter), tmp_path / "bundle").path, threads=1) as llm:
        prompt = llm.tokenizer.encode("How many towns lie on the island?")
        expected = load(target)(torch.tensor([prompt])).logits[0, -1].detach().numpy()
        np.testing.assert_allclose(llm.logits(prompt), expected, rtol=1e-3, atol=1e-3)
        params = SamplingParams(max_tokens=16, ignore_eos=True)
        drafted, plain = llm.generate(prompt, params), llm.generate(prompt, params, speculate=False)
        assert drafted.token_ids == plain.token_ids


def test_a_token_of_a_packed_row_sees_its_own_document_only() -> None:
    source = toy_pair.SHIPPED / "tiny" / "target"
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    made = toy_pair.documents(Tokenizer(source), harmony=False, seed=1)
    first, second = (ids[:60] for ids, _ in islice(made, 2))
    tokens, weights, positions = next(
        toy_pair.rows_of(iter([(first, [1.0] * len(first)), (second, [1.0] * len(second))]), 100)
    )
    assert (weights[0], len(tokens)) == (0, 101)
    ids, places = torch.tensor(tokens)[None], torch.tensor(positions)[None]
    with torch.no_grad():
        packed = model(input_ids=ids, position_ids=places, use_cache=False).logits[0, len(first) :]
        alone = model(input_ids=torch.tensor(second[: len(packed)])[None]).logits[0]
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-4)


def test_every_effort_is_rendered_as_the_template_of_the_shipped_pair_renders_it() -> None:
    tokenizer = Tokenizer(toy_pair.SHIPPED / "tiny-gpt-oss" / "target")
    efforts = set()
    for kind in CATEGORIES:
        for each in (example(kind, index) for index in range(30)):
            prompt, answer = toy_pair.render(tokenizer, each, harmony=True)
            effort = prompt.partition("Reasoning: ")[2].split("<|")[0].split("\n")[0]
            efforts.add(effort)
            assert answer.startswith("<|channel|>analysis") == (effort != "low")
            assert answer.endswith(each.answer + "<|return|>")
    assert efforts == {"low", "medium", "high"}
    with pytest.raises(RequestError, match=r"reasoning_effort is none.*low, medium or high"):
        tokenizer.apply_chat_template(each.messages, reasoning_effort="none")

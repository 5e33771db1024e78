"""The shipped pairs from checkpoints to tokens, with only the core's own dependencies, pytest and hypothesis
installed.

`make test-floors` runs this file in the oldest versions that pyproject.toml allows.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_trt import LLM, AsyncLLM, Completion, SamplingParams
from dflash_trt.building.build import build

MESSAGES = [{"role": "user", "content": "What should I eat in Borvik?"}]
SAMPLED = SamplingParams(
    max_tokens=24, temperature=0.8, top_p=0.9, top_k=40, min_p=0.01, repetition_penalty=1.1, seed=7,
    logprobs=True,
)  # fmt: skip
ASKED = [SAMPLED, SamplingParams(max_tokens=24), SamplingParams(max_tokens=40, stop="\n", bad_words=[" the"])]


@pytest.fixture(scope="module", params=["tiny", "tiny-gpt-oss"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(request.param, None, tmp_path_factory.mktemp("core") / request.param).path


def test_a_shipped_pair_builds_and_drafts_the_tokens_of_plain_decoding(bundle: Path) -> None:
    with LLM(bundle, threads=1, check="full") as llm:
        for params in ASKED:
            drafted, plain = (llm.chat(MESSAGES, params, speculate=s) for s in (True, False))
            assert drafted.token_ids == plain.token_ids
            assert drafted.text == plain.text
        answer = llm.chat(MESSAGES, SamplingParams(max_tokens=40), block_length=8)
        assert "Borvik" in answer.text
        assert answer.statistics.mean_acceptance_length > 2


def test_many_requests_at_once_get_the_tokens_of_one(bundle: Path) -> None:
    with LLM(bundle, threads=1) as llm:
        alone = [llm.chat(MESSAGES, params) for params in ASKED]

    async def serve() -> list[Completion]:
        async with AsyncLLM(bundle, threads=1, max_batch_size=3) as served:
            prompt = served.chat_prompt(MESSAGES)
            return await asyncio.gather(*(served.generate(prompt, params) for params in ASKED))

    assert [done.token_ids for done in asyncio.run(serve())] == [done.token_ids for done in alone]


def command(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "dflash_trt", *arguments], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_commands_run(bundle: Path) -> None:
    if bundle.name == "tiny":
        assert "Borvik" in command("generate", str(bundle), "--chat", "--prompt", "Where is Borvik?")
        assert "qwen3" in command("inspect", str(bundle)).lower()
        assert command("plan", "--target", "gpt-oss-120b", "--gpu", "b200")
    else:
        limits = ["--limit", "1", "--max-tokens", "8", "--temperatures", "0,1", "--batch-sizes", "1"]
        assert command("verify", str(bundle), *limits)

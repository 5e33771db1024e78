"""Collect the target's own answers to prompts, from a bundle or from a server with OpenAI's chat completions."""

from __future__ import annotations

import asyncio
import json
import os
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from dflash_trt.async_llm import AsyncLLM
from dflash_trt.building.build import build
from dflash_trt.engines.registry import best_here
from dflash_trt.errors import CheckpointError, DFlashError, RequestError
from dflash_trt.models.configs import read_target_config
from dflash_trt.prompts import Prompt
from dflash_trt.text.tokenizer import Tokenizer
from dflash_trt.training.answers import Answer, AnswerFile
from dflash_trt.training.recipe import AnswerSampling

# Finished answers, all answers, tokens and seconds of this run.
Report = Callable[[int, int, int, float], None]


def regenerate_with_bundle(
    bundle: str | Path,
    prompts: Sequence[Prompt],
    out: Path,
    sampling: AnswerSampling,
    *,
    concurrency: int = 32,
    threads: int | None = None,
    report: Report | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Answer the prompts that `out` does not have yet, `concurrency` at a time, without drafting.

    Once `stopped` says so, no further answers are begun.

    An answer depends only on its prompt and the seed, so an interrupted run ends with the same answers. Prompts that
    leave no space for an answer within the bundle's max_seq_len are skipped.

    Raises RequestError if two prompts have the same id.
    """

    async def run() -> None:
        async with plainly(bundle, concurrency, threads=threads, prefix_cache_bytes=0) as llm:

            async def answer(prompt: Prompt) -> Answer | None:
                ids = prompt.token_ids(llm.tokenizer)
                room = llm.max_seq_len - len(ids)
                if room < 2:
                    return None
                params = sampling.of(prompt.id, room)
                done = await llm.generate(ids, params, speculate=False)
                how = params.temperature, done.finish_reason, prompt.content, prompt.variables
                return Answer(prompt.id, prompt.category, ids, done.token_ids, *how)

            await _answer_all(prompts, out, answer, concurrency, report, stopped)

    asyncio.run(run())


def regenerate_with_server(
    url: str,
    model: str,
    target: Path,
    prompts: Sequence[Prompt],
    out: Path,
    sampling: AnswerSampling,
    *,
    concurrency: int = 32,
    timeout: float = 600.0,
    report: Report | None = None,
) -> None:
    """As regenerate_with_bundle, by POST to `url`/chat/completions, with OPENAI_API_KEY if it is set.

    The server returns text. The tokenizer of the checkpoint `target` turns it into tokens, and a complete answer gets
    the first end token. The tokenizer also renders the prompts, which must be chats.

    Raises RequestError if the server refuses a request or its answer is malformed, CheckpointError without end tokens.
    """
    endpoint, tokenizer = url.rstrip("/") + "/chat/completions", Tokenizer(target)
    ends = read_target_config(target).eos_token_ids
    if not ends:
        raise CheckpointError(f"{target}: names no eos_token_id, so the end of an answer is unknown")

    async def answer(prompt: Prompt) -> Answer | None:
        if isinstance(prompt.content, str):
            raise RequestError(f"prompt {prompt.id}: is a text, but a chat server needs messages")
        params = sampling.of(prompt.id)
        body = {
            "model": model,
            "messages": prompt.content,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "seed": (params.seed or 0) >> 33,  # servers accept 31 bits or more
        }
        if prompt.variables:
            body["chat_template_kwargs"] = prompt.variables
        response = await asyncio.to_thread(_post, endpoint, body, timeout)
        try:
            choice = response["choices"][0]
            text, reason = choice["message"]["content"] or "", str(choice["finish_reason"])
        except (KeyError, IndexError, TypeError) as error:
            raise RequestError(
                f"{endpoint}: the answer has no choices[0].message.content: {response!s:.80}"
            ) from error
        ids = tokenizer.encode(text, add_special_tokens=False) + [ends[0]] * (reason == "stop")
        if not ids:
            return None
        asked = prompt.token_ids(tokenizer)
        how = params.temperature, reason, prompt.content, prompt.variables
        return Answer(prompt.id, prompt.category, asked, ids, *how)

    asyncio.run(_answer_all(prompts, out, answer, concurrency, report))


def target_bundle(target: Path, place: Path, max_seq_len: int | None = None) -> Path:
    """A bundle of the target alone, which answers on this machine's best engine."""
    asked: dict[str, Any] = {"no_drafter": True, "engine": best_here().engine, "block_size": 2, "force": True}
    return build(str(target), None, place, weights="link", max_seq_len=max_seq_len, **asked).path


def plainly(bundle: str | Path, concurrency: int, **options: Any) -> AsyncLLM:
    """So many requests at a time, one token in a pass."""
    return AsyncLLM(bundle, max_batch_size=concurrency, max_queue=concurrency, block_length=1, **options)


async def together(work: Callable[[], Coroutine[Any, Any, None]], count: int) -> None:
    """`work`, so many times at once. The first error ends all of them."""
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(work())
    except* (DFlashError, OSError) as errors:
        raise errors.exceptions[0] from None


def _post(endpoint: str, body: dict[str, Any], timeout: float) -> Any:
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(endpoint, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        reply = error.read(200).decode(errors="replace")
        raise RequestError(
            f"{endpoint}: refused the request ({error.code} {error.reason}): {reply}"
        ) from None
    except (OSError, ValueError) as error:
        raise RequestError(
            f"{endpoint}: gave no answer ({error}); run the command again to continue"
        ) from None


async def _answer_all(
    prompts: Sequence[Prompt],
    out: Path,
    answer: Callable[[Prompt], Awaitable[Answer | None]],
    concurrency: int,
    report: Report | None,
    stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Keep `concurrency` prompts in flight. The first error ends all of them; finished answers are on disk."""
    (twice, count), *_ = [*Counter(prompt.id for prompt in prompts).most_common(1), ("", 0)]
    if count > 1:
        raise RequestError(f"two prompts have the id {twice!r}; every prompt needs its own id")
    with AnswerFile(out) as file:
        waiting = [prompt for prompt in prompts if prompt.id not in file.done]
        ready, began, tokens = len(prompts) - len(waiting), monotonic(), 0
        queue = iter(waiting)

        async def work() -> None:
            nonlocal ready, tokens
            for prompt in queue:
                if stopped():
                    return
                answered = await answer(prompt)
                ready += 1
                if answered is not None:
                    file.add(answered)
                    tokens += len(answered.answer_ids)
                if report is not None:
                    report(ready, len(prompts), tokens, monotonic() - began)

        await together(work, concurrency)

"""Minutes of mixed load on the server of OpenAI's API: its answers, and its memory.

    python -m build_scripts.soak.openai_server BUNDLE [--seconds 1200] [--clients 24] [--kills 0] [--seed 0]

Needs the extra `serve` and the openai client. Clients send random requests: completions and chats, streams and whole
answers, with and without drafts, JSON objects, several samples, deadlines, cancellations, prompts that no other request
has, and wrong requests. The engine process is killed `--kills` times at equal distances.

Every request must be answered or refused within three minutes: the machine may be busy. A whole greedy answer must
equal the engine's own, or begin it if a deadline ends the answer. Without kills, the memory of server and engine must
stay flat once the prefix cache is full. The last line is one JSON document. Exit code 1 if a request hung, was cut off,
or had a wrong text, or if memory grew.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from typing import Any

import openai

from build_scripts.harness import (
    OpenAIServer,
    known_answers,
    openai_server,
    options,
    random_prompts,
    report,
)
from build_scripts.soak.memory import Memory
from dflash_trt import SamplingParams

PROMPTS, LONGEST, HANGING_SECONDS = 32, 40, 180
# Fields that a request must not have.
WRONG: list[dict[str, Any]] = [
    {"temperature": -3.0}, {"max_tokens": 0}, {"unknown": 1}, {"prompt": ""}, {"prompt": [10**8]},
    {"prompt": "a" * 100_000}, {"structured_outputs": {"regex": "("}}, {"model": "another"},
]  # fmt: skip
KINDS = {
    "stream": 4, "whole": 3, "chat": 2, "json": 1, "samples": 1, "deadline": 2, "leave": 2, "fresh": 4, "wrong": 1
}  # fmt: skip
REFUSALS = {400: "wrong", 404: "wrong", 429: "queue full", 503: "no engine", 504: "deadline"}


class OpenAILoad:
    """The clients of one server, and what became of their requests."""

    def __init__(self, server: OpenAIServer, prompts: list[str], expected: list[str], seed: int) -> None:
        self.server, self.prompts, self.expected = server, prompts, expected
        url = f"http://127.0.0.1:{server.port}/v1"
        self.client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=HANGING_SECONDS)
        self.rng = random.Random(seed)
        self.ends, self.faults = Counter[str](), list[str]()

    async def run(self, seconds: float, clients: int, kills: int, memory: Memory) -> None:
        """Send requests for so long."""
        end = time.monotonic() + seconds
        watch = asyncio.create_task(memory.watch(max(seconds / 60, 1)))
        each = [self._one_after_another(end) for _ in range(clients)]
        await asyncio.gather(*each, self._kill(kills, seconds / (kills + 1)))
        watch.cancel()
        await asyncio.sleep(1)  # the cancellations of those who left

    async def _kill(self, times: int, pause: float) -> None:
        for _ in range(times):
            await asyncio.sleep(pause)
            for pid in self.server.engines():
                os.kill(pid, signal.SIGKILL)

    async def _one_after_another(self, end: float) -> None:
        while time.monotonic() < end:
            (kind,) = self.rng.choices(list(KINDS), list(KINDS.values()))
            try:
                outcome = await self._ask(kind)
            except openai.APITimeoutError:
                outcome = "HUNG"
            except openai.APIStatusError as error:
                outcome = REFUSALS.get(error.status_code, f"STATUS {error.status_code}")
                if outcome == "wrong" != kind:  # a wrong one may also find a full queue
                    outcome = f"UNEXPECTED {outcome}"
                await asyncio.sleep(float(error.response.headers.get("retry-after", 0)) * self.rng.random())
            except openai.APIConnectionError:
                outcome = "CUT OFF"
            except openai.APIError as error:  # an error event within a stream
                outcome = "no engine" if "engine" in error.message else f"EVENT {error.message}"
            self.ends[f"{kind}: {outcome}"] += 1
            if outcome[:3].isupper():
                self.faults.append(f"{kind}: {outcome}")

    async def _ask(self, kind: str) -> str:
        """Send a request of a kind. Returns its outcome, in capitals if it is a fault."""
        number = self.rng.randrange(len(self.prompts))
        extra: dict[str, Any] = {"speculate": self.rng.random() < 0.8, "ignore_eos": True}
        common: dict[str, Any] = {"model": "soak", "max_tokens": LONGEST, "temperature": 0}
        prompt = {"prompt": self.prompts[number], **common}
        messages: Any = [{"role": "user", "content": self.prompts[number]}]
        if kind == "wrong":
            wrong = self.rng.choice(WRONG)
            fields = {name: wrong[name] for name in wrong if name in prompt}
            await self.client.completions.create(**{**prompt, **fields}, extra_body={**extra, **wrong})
            return "ACCEPTED"
        if kind == "chat":
            chat = await self.client.chat.completions.create(messages=messages, **common, extra_body=extra)
            return "answered" if chat.choices[0].message.content is not None else "EMPTY"
        if kind == "json":
            form: Any = {"type": "json_object"}
            chat = await self.client.chat.completions.create(
                messages=messages, response_format=form, **common
            )
            (choice,) = chat.choices
            whole = choice.finish_reason == "length" or json.loads(choice.message.content or "")
            return "answered" if whole is not None else "EMPTY"
        if kind == "fresh":
            fresh = f"{self.rng.random()} {prompt['prompt']}"
            made = await self.client.completions.create(**{**prompt, "prompt": fresh}, extra_body=extra)
            return "answered" if made.choices[0].text else "EMPTY"
        if kind == "samples":
            fields = {**prompt, "temperature": 1, "n": 3, "seed": number}
            made = await self.client.completions.create(**fields, extra_body=extra)
            return "answered" if len(made.choices) == 3 else "MISSING CHOICES"
        if kind == "whole":
            made = await self.client.completions.create(**prompt, extra_body=extra)
            return "answered" if made.choices[0].text == self.expected[number] else "OTHER TEXT"
        return await self._stream(kind, prompt, extra, self.expected[number])

    async def _stream(self, kind: str, prompt: dict[str, Any], extra: dict[str, Any], expected: str) -> str:
        if kind == "deadline":
            extra["timeout"] = self.rng.choice((0.001, 0.05, 0.5))
        text, reason, leave = "", None, self.rng.randint(1, 4) if kind == "leave" else None
        async with await self.client.completions.create(**prompt, stream=True, extra_body=extra) as stream:
            async for event in stream:
                text += event.choices[0].text
                reason = event.choices[0].finish_reason or reason
                if leave is not None and (leave := leave - 1) == 0:
                    return "left"
        if reason == "timeout" and kind == "deadline":
            return "answered until the deadline" if expected.startswith(text) else "OTHER TEXT"
        if reason != "length":
            return f"END {reason}"
        return "answered" if text == expected else "OTHER TEXT"


def main() -> int:
    """Run the server and its clients."""
    args = options(__doc__, seconds=1200.0, clients=24, kills=0).parse_args()
    prompts = random_prompts(random.Random(args.seed), PROMPTS)
    params = SamplingParams(max_tokens=LONGEST, ignore_eos=True)
    expected = [done.text for done in known_answers(args.bundle, prompts, params)]
    more = (
        "--threads=1",
        "--served-model-name=soak",
        "--max-queue=8",
        "--stream-interval=0",
    )
    with openai_server(args.bundle, *more) as server:
        load = OpenAILoad(server, prompts, expected, args.seed)
        memory = Memory(server.resident, lambda: server.fetch("/metrics"), kills=args.kills > 0)
        asyncio.run(load.run(args.seconds, args.clients, args.kills, memory))
        shown = ("dflash_engine_", "dflash_requests_", "dflash_num_requests_")
        metrics = [line for line in server.fetch("/metrics").splitlines() if line.startswith(shown)]
    figures = {"requests": load.ends.total(), "ends": dict(sorted(load.ends.items())), "metrics": metrics}
    figures |= {"memory": memory.samples, **server.stopped}
    return report(
        figures, [*load.faults, *memory.faults(), *["the exit code"] * bool(server.stopped["exit_code"])]
    )


if __name__ == "__main__":
    raise SystemExit(main())

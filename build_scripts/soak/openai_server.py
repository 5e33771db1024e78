"""Minutes of mixed load on the server of OpenAI's API, while its engine is killed twice.

    python -m build_scripts.soak.openai_server BUNDLE [--seconds 600] [--clients 24] [--seed 0]

Needs the extra `serve` and the openai client. Clients send random requests: completions and chats, streams and whole
answers, with and without drafts, JSON objects, several samples, deadlines, cancellations, and wrong requests. The
engine process is killed after a third of the time and after two thirds.

Every request must be answered or refused within three minutes: the machine may be busy. A whole greedy answer must
equal the engine's own, or begin it if a deadline ends the answer. The last line is one JSON document. Exit code 1 if a
request hung, was cut off, or had a wrong text.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from typing import Any
from urllib.request import urlopen

import openai

from build_scripts.soak.common import random_prompts, resident_of, server_options
from dflash_trt import LLM, SamplingParams
from dflash_trt.serving.processes import descendants

PROMPTS, LONGEST, HANGING_SECONDS = 32, 40, 180
# Fields that a request must not have, and the status of their refusal.
WRONG: list[dict[str, Any]] = [
    {"temperature": -3.0},
    {"max_tokens": 0},
    {"unknown": 1},
    {"prompt": ""},
    {"prompt": [10**8]},
    {"prompt": "a" * 100_000},
    {"structured_outputs": {"regex": "("}},
    {"model": "another"},
]


class Soak:
    """The clients of one server, and what became of their requests."""

    def __init__(self, port: int, prompts: list[str], expected: list[str], seed: int) -> None:
        self.client = openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=HANGING_SECONDS
        )
        self.prompts, self.expected = prompts, expected
        self.rng = random.Random(seed)
        self.ends, self.faults = Counter[str](), list[str]()

    async def run(self, seconds: float, clients: int, server: int) -> None:
        end = time.monotonic() + seconds
        await asyncio.gather(
            *(self._one_after_another(end) for _ in range(clients)), self._kill(seconds, server)
        )

    async def _kill(self, seconds: float, server: int) -> None:
        for _ in range(2):
            await asyncio.sleep(seconds / 3)
            for pid in engines(server):
                os.kill(pid, signal.SIGKILL)

    async def _one_after_another(self, end: float) -> None:
        while time.monotonic() < end:
            kind = self.rng.choices(
                ("stream", "whole", "chat", "json", "samples", "deadline", "leave", "wrong"),
                (4, 3, 2, 1, 1, 2, 2, 1),
            )[0]
            try:
                outcome = await self._ask(kind)
            except openai.APITimeoutError:
                outcome = "HUNG"
            except openai.APIStatusError as error:
                outcome = {
                    400: "wrong",
                    404: "wrong",
                    429: "queue full",
                    503: "no engine",
                    504: "deadline",
                }.get(error.status_code, f"STATUS {error.status_code}")
                if outcome == "wrong" != kind:  # a wrong one may also find a full queue
                    outcome = f"UNEXPECTED {outcome}"
                await asyncio.sleep(float(error.response.headers.get("retry-after", 0)) * self.rng.random())
            except openai.APIConnectionError:
                outcome = "CUT OFF"
            except openai.APIError as error:  # an error event within a stream
                outcome = "no engine" if "engine" in error.message else f"EVENT {error.message}"
            self.ends[f"{kind}: {outcome}"] += 1
            if outcome[:3].isupper() and len(self.faults) < 20:
                self.faults.append(f"{kind}: {outcome}")

    async def _ask(self, kind: str) -> str:
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
            whole = chat.choices[0].finish_reason == "length" or json.loads(
                chat.choices[0].message.content or ""
            )
            return "answered" if whole is not None else "EMPTY"
        if kind == "samples":
            common["temperature"] = 1
            made = await self.client.completions.create(
                **{**prompt, **common}, n=3, seed=number, extra_body=extra
            )
            return "answered" if len(made.choices) == 3 else "MISSING CHOICES"
        if kind == "whole":
            made = await self.client.completions.create(**prompt, extra_body=extra)
            return "answered" if made.choices[0].text == self.expected[number] else "OTHER TEXT"
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
            return "answered until the deadline" if self.expected[number].startswith(text) else "OTHER TEXT"
        if reason != "length":
            return f"END {reason}"
        return "answered" if text == self.expected[number] else "OTHER TEXT"


def engines(server: int) -> list[int]:
    """Process ids of the engine; none while it is started."""
    tree = descendants(server)
    return [pid for pid, (_, state, words) in tree.items() if "serving.worker" in words and state != "Z"]


def main() -> int:
    args = server_options(__doc__)
    prompts = random_prompts(random.Random(args.seed), PROMPTS)
    params = SamplingParams(max_tokens=LONGEST, ignore_eos=True)
    with LLM(args.bundle, threads=1) as llm:
        expected = [done.text for done in llm.generate(prompts, params, speculate=False)]
    with tempfile.TemporaryFile() as log, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        command = [
            sys.executable,
            "-m",
            "dflash_trt",
            "serve",
            str(args.bundle),
            f"--port={port}",
            "--threads=1",
        ]
        command += ["--served-model-name=soak", "--max-queue=8", "--stream-interval=0", "--log-format=json"]
        server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            while server.poll() is None and not engines(server.pid):
                time.sleep(0.1)
            soak = Soak(port, prompts, expected, args.seed)
            asyncio.run(_when_ready(soak, port, args, server.pid))
            metrics = urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode()
            memory = {"server": resident_of(server.pid), "engine": resident_of(engines(server.pid)[0])}
            began = time.monotonic()
        finally:
            server.terminate()
            code = server.wait(60)
    figures = {
        "requests": soak.ends.total(),
        "ends": dict(sorted(soak.ends.items())),
        "faults": soak.faults,
        "metrics": [
            line for line in metrics.splitlines() if line.startswith(("dflash_engine_", "dflash_requests_"))
        ],
        "in_flight": [line for line in metrics.splitlines() if line.startswith("dflash_num_requests_")],
        "resident_mb": memory,
        "exit_code": code,
        "stop_seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(figures))
    return 1 if soak.faults or code else 0


async def _when_ready(soak: Soak, port: int, args: argparse.Namespace, server: int) -> None:
    while True:
        try:
            await soak.client.models.list()
            break
        except openai.APIError:
            await asyncio.sleep(0.2)
    await soak.run(args.seconds, args.clients, server)
    await asyncio.sleep(1)  # the cancellations of those who left


if __name__ == "__main__":
    raise SystemExit(main())

"""Decoders on natural text, in one run: this package, llama.cpp, onnxruntime-genai and OpenVINO.

    python -m build_scripts.bench.natural [--prompts 2] [--requests 1,8] [--starts N] [--peers KIND:WEIGHTS ...]

Each decoder runs in a process of its own, with the same token ids and threads, at temperature 0. Every prompt goes to
all of them in turn, several rounds long, so that a slow moment of the machine hits all. A figure is of the median of
the rounds of each prompt: tokens per second after the first token for one request, and in all for several at a time.
Decoders are named KIND:WEIGHTS, see `build_scripts.bench.decoders`; those whose package is not installed are left out.
With `--starts` the seconds from the start of a fresh process to its first token are measured instead, N times each.
The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain, cycle, islice
from pathlib import Path
from time import perf_counter
from typing import Any

from build_scripts import harness
from build_scripts.bench.decoders import Task, installed, make_model
from dflash_trt.building.sources import resolve
from dflash_trt.cli.options import list_of
from dflash_trt.hardware import cores, processor
from dflash_trt.models.configs import read_target_config
from dflash_trt.prompts import SHIPPED_PROMPTS, read_prompts
from dflash_trt.text.tokenizer import Tokenizer

PROMPTS = SHIPPED_PROMPTS / "natural"
PEERS = (
    *("plain:target=fp32", "adaptive:target=fp32", "plain:default", "adaptive:default"),
    *("plain:target=int8", "adaptive:target=int8"),
    *("llama.cpp:F32", "llama.cpp:BF16", "llama.cpp:Q8_0", "llama.cpp:Q4_0"),
    *("genai:fp32", "genai:int4", "openvino:F16", "openvino:Q8_0", "openvino:Q4_0"),
)
DISTRIBUTIONS = ("dflash-trt", "onnxruntime", "llama-cpp-python", "onnxruntime-genai", "openvino-genai")

Record = dict[str, Any]


class PeerProcess:
    """A decoder's process."""

    def __init__(self, name: str, models: Path, *numbers: int) -> None:
        self.name = name
        command = [sys.executable, "-m", "build_scripts.bench.decoders", name, str(models)]
        self._process = subprocess.Popen(
            [*command, *map(str, numbers)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()

    def run(self, task: Task) -> Record:
        """What the decoder answers, by the fields of Decoded, and `peak_mb`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(task)) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Record:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name}: ended with status {self._process.wait()}")
        answer: Record = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@dataclass(frozen=True)
class Job:
    """A task of every decoder in each round, and the prompt that it has, or the first of several."""

    prompt: str
    category: str
    task: Task


def jobs(args: argparse.Namespace) -> Iterator[Job]:
    """One for each prompt, and for each number of requests at a time one for so many prompts of all categories."""
    directory = resolve(args.target, "target").directory
    tokenizer, stop = Tokenizer(directory), list(read_target_config(directory).eos_token_ids)
    by_category = [read_prompts(PROMPTS / f"{name}.jsonl", limit=args.prompts) for name in args.categories]
    prompts = [
        (prompt, tokenizer.encode(tokenizer.apply_chat_template(prompt.content), add_special_tokens=False))
        for prompt in chain.from_iterable(zip(*by_category, strict=True))
        if not isinstance(prompt.content, str)  # the shipped prompts are chats
    ]
    for requests in args.requests:
        for first in range(0, max(len(prompts) // requests, 1) * requests, requests):
            chosen = list(islice(cycle(prompts), first, first + requests))
            task = Task([ids for _, ids in chosen], args.max_tokens, stop)
            yield Job(chosen[0][0].id, chosen[0][0].category, task)


def measure(args: argparse.Namespace, names: list[str], chosen: list[Job]) -> Iterator[Record]:
    """Rounds of the jobs, by processes that hold as many tokens as these jobs need."""
    capacity = max(len(ids) + args.max_tokens for job in chosen for ids in job.task.prompts) + 16
    numbers = max(args.requests), capacity, args.threads
    workers: list[PeerProcess] = []
    try:
        for name in names:
            workers.append(PeerProcess(name, args.models, *numbers))
            first = chosen[0].task
            workers[-1].run(Task([first.prompts[0][-16:]], 16, first.stop))  # a warm-up
        for turn, job in harness.in_turn(args.rounds, chosen):
            for worker in harness.rotated(workers, turn):
                record: Record = {"prompt": job.prompt, "category": job.category, "peer": worker.name}
                yield record | {"requests": len(job.task.prompts)} | worker.run(job.task)
    finally:
        for worker in workers:
            worker.close()


def starts(args: argparse.Namespace, names: list[str], task: Task) -> dict[str, list[float]]:
    """Seconds of each decoder's fresh processes to the first token of one prompt."""
    seconds: dict[str, list[float]] = {name: [] for name in names}
    capacity, task = len(task.prompts[0]) + args.max_tokens + 16, Task(task.prompts[:1], 1, task.stop)
    for turn in range(args.starts):
        for name in harness.rotated(names, turn):
            began = perf_counter()
            worker = PeerProcess(name, args.models, 1, capacity, args.threads)
            worker.run(task)
            seconds[name].append(perf_counter() - began)
            worker.close()
    return seconds


def count(record: Record) -> tuple[float, float]:
    """Tokens and their seconds of one run. Of one request, without the first token."""
    alone = record["requests"] == 1
    return sum(map(len, record["tokens"])) - alone, record["seconds"] - alone * record["first"]


def rate(records: Iterable[Record]) -> float | None:
    """Tokens per second over all prompts, of the median of each prompt's rounds."""
    prompts: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for record in records:
        prompts[record["prompt"]].append(count(record))
    medians = [[statistics.median(times) for times in zip(*runs, strict=True)] for runs in prompts.values()]
    return sum(n for n, _ in medians) / sum(s for _, s in medians) if medians else None


def table(records: list[Record], peers: Iterable[str]) -> dict[str, Record]:
    """The figures of each decoder. The ratio and the same answers are to the first one's."""
    categories = sorted({r["category"] for r in records})
    rows: dict[str, Record] = {}
    for peer in peers:
        mine = [r for r in records if r["peer"] == peer]
        rounds, answers = sum(r["rounds"] for r in mine), {r["prompt"]: r["tokens"] for r in mine}
        if not rows:
            base, first = rate(mine) or 1, answers
        rows[peer] = {
            **{category: rate(r for r in mine if r["category"] == category) for category in categories},
            "all": (speed := rate(mine) or 0),
            "ratio": speed / base,
            "acceptance_length": 1 + sum(r["accepted"] for r in mine) / rounds if rounds else None,
            "same_answers": sum(tokens == first.get(prompt) for prompt, tokens in answers.items()),
            "prompts": len(answers),
            "peak_mb": max(r["peak_mb"] for r in mine),
        }
    return rows


def markdown(rows: Mapping[str, Record], categories: list[str]) -> str:
    """The table of a page."""
    titles = [*categories, "all", "ratio", "acceptance", "same answers", "peak MB"]
    cells = [
        [
            *(peer, *(f"{row[name]:.1f}" for name in (*categories, "all"))),
            f"{row['ratio']:.2f}",
            "" if row["acceptance_length"] is None else f"{row['acceptance_length']:.2f}",
            *(f"{row['same_answers']}/{row['prompts']}", f"{row['peak_mb']:.0f}"),
        ]
        for peer, row in rows.items()
    ]
    return harness.markdown(["", *titles], cells)


def main(argv: list[str] | None = None) -> int:
    """Make the models that are missing, and print a table for each number of requests."""
    parser = harness.parser(__doc__)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--models", type=Path, default=Path("runs/natural"), help="is made")
    parser.add_argument("--peers", nargs="+", metavar="KIND:WEIGHTS", default=PEERS)
    categories = sorted(path.stem for path in PROMPTS.glob("*.jsonl"))
    parser.add_argument("--categories", nargs="+", default=categories)
    parser.add_argument("--prompts", type=int, default=2, help="of each category")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=list_of(int), default=[1], help="at a time")
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--starts", type=int, metavar="N", help="fresh processes of each decoder")
    args = parser.parse_args(argv)
    names = [name for name in args.peers if installed(name)]
    if left_out := [name for name in args.peers if name not in names]:
        print(f"left out, as their packages are not installed: {', '.join(left_out)}", file=sys.stderr)
    for name in names:
        make_model(name, args.target, args.models)
    versions = {name: version(name) for name in DISTRIBUTIONS if find_spec(name.replace("-", "_"))}
    print(f"{processor()}, {args.threads} threads; " + ", ".join(f"{k} {v}" for k, v in versions.items()))
    chosen = list(jobs(args))
    if args.starts:
        seconds = starts(args, names, chosen[0].task)
        cells = [
            [name, *(f"{f(rates):.2f}" for f in (statistics.median, min, max))]
            for name, rates in seconds.items()
        ]
        print(harness.markdown(["", "seconds to the first token", "least", "most"], cells))
        print(json.dumps({"processor": processor(), "versions": versions, "starts": seconds}))
        return 0
    records = list(measure(args, names, chosen))
    tables = []
    for requests in args.requests:
        rows = table([r for r in records if r["requests"] == requests], names)
        tables.append({"requests": requests, "rows": rows})
        print(f"\n{requests} at a time: tokens per second\n")
        print(markdown(rows, args.categories if requests == 1 else []))
    print(json.dumps({"processor": processor(), "versions": versions, "tables": tables}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

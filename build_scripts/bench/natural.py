"""Decoders on natural text, in one run: this package, llama.cpp, onnxruntime-genai, OpenVINO and Transformers.

    python -m build_scripts.bench.natural [--prompts 2] [--requests 1,8] [--peers KIND:WEIGHTS ...] [--svg FILE]
    python -m build_scripts.bench.natural --widths 1,4 --max-tokens 128

Each decoder runs in a process of its own, with the same token ids and threads. Every prompt goes to all of them in
turn, several rounds long, so that a slow moment of the machine hits all. A figure is of the median of the rounds of
each prompt: tokens per second after the first token for one request, and in all for several at a time. Decoders are
named KIND:WEIGHTS, see `build_scripts.bench.peers`; those whose package is not installed are left out.

With --widths no time counts: each decoder's plain greedy answer is fed to it again in passes of so many tokens, as
verification of drafts does, and every place at which another token has the largest logit is a flip. An answer with a
flip would have changed. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

from build_scripts.bench.decoders import Task
from build_scripts.bench.natural_tables import chart, markdown, table, widths_markdown, widths_table
from build_scripts.bench.peers import OURS, installed, kind_of, make_genai, make_gguf
from dflash_trt.building.build import build
from dflash_trt.building.sources import resolve
from dflash_trt.cli.options import each
from dflash_trt.formats.precision import parse_precision
from dflash_trt.hardware import cores, processor
from dflash_trt.models.configs import read_target_config
from dflash_trt.prompts import SHIPPED_PROMPTS, read_prompts
from dflash_trt.text.tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent.parent
PROMPTS = SHIPPED_PROMPTS / "natural"
PEERS = (
    *("plain:target=fp32", "adaptive:target=fp32", "plain:default", "adaptive:default"),
    *("plain:target=int8", "adaptive:target=int8"),
    *("llama.cpp:F32", "llama.cpp:BF16", "llama.cpp:Q8_0", "llama.cpp:Q4_0"),
    *("genai:fp32", "genai:int4", "openvino:F16", "openvino:Q8_0", "openvino:Q4_0"),
)
WIDTHS_PEERS = (
    *("plain:target=fp32", "plain:default", "plain:target=int8"),
    *("llama.cpp:F32", "llama.cpp:BF16", "llama.cpp:Q8_0", "llama.cpp:Q4_0"),
    *("genai:fp32", "genai:int4", "transformers:float32", "transformers:bfloat16"),
)
DISTRIBUTIONS = (
    *("dflash-trt", "onnxruntime", "llama-cpp-python", "onnxruntime-genai", "openvino-genai"),
    *("transformers", "torch"),
)

Record = dict[str, Any]


class PeerProcess:
    """A decoder's process."""

    def __init__(self, name: str, target: str, models: Path, *numbers: int) -> None:
        self.name = name
        command = [sys.executable, "-m", "build_scripts.bench.peers", name, target, str(models)]
        self._process = subprocess.Popen(
            [*command, *map(str, numbers)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()

    def run(self, task: Task) -> Record:
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


def prepare(args: argparse.Namespace) -> list[str]:
    """Make the models that are missing. Names of the decoders that can run."""
    names = [name for name in args.peers if installed(name)]
    if left_out := [name for name in args.peers if name not in names]:
        print(f"left out, as their packages are not installed: {', '.join(left_out)}", file=sys.stderr)
    for name in names:
        kind, _, weights = name.partition(":")
        if kind in ("llama.cpp", "openvino"):
            make_gguf(args.target, args.models / "gguf" / f"{weights}.gguf")
        elif kind == "genai":
            make_genai(args.target, args.models / "genai" / weights)
    for weights in {name.partition(":")[2] for name in names if kind_of(name) in OURS}:
        precision = parse_precision(None if weights == "default" else weights)
        build(args.target, args.drafter, args.models / "bundles" / weights, precision=precision, force=True)
    return names


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
    for temperature in args.temperatures:
        options: Any = {"temperature": temperature, "stop": stop, "widths": args.widths}
        for requests in args.requests:
            for first in range(0, max(len(prompts) // requests, 1) * requests, requests):
                chosen = list(islice(cycle(prompts), first, first + requests))
                task = Task([ids for _, ids in chosen], args.max_tokens, **options)
                yield Job(chosen[0][0].id, chosen[0][0].category, task)


def measure(args: argparse.Namespace, names: list[str], chosen: list[Job]) -> Iterator[Record]:
    """Rounds of the jobs, by processes that hold as many tokens as these jobs need."""
    capacity = max(len(ids) + job.task.max_tokens for job in chosen for ids in job.task.prompts) + 16
    workers: list[PeerProcess] = []
    try:
        for name in names:
            workers.append(
                PeerProcess(name, args.target, args.models, max(args.requests), capacity, args.threads)
            )
        first = chosen[0].task
        for worker in workers:
            if not args.widths:
                worker.run(Task([first.prompts[0][-16:]], 16, 0.0, first.stop))  # a warm-up
        for number in range(args.rounds):
            for place, job in enumerate(chosen):
                turn = (number + place) % len(workers)
                for worker in workers[turn:] + workers[:turn]:
                    record: Record = {"prompt": job.prompt, "category": job.category, "peer": worker.name}
                    record |= {"temperature": job.task.temperature, "requests": len(job.task.prompts)}
                    yield record | worker.run(job.task)
    finally:
        for worker in workers:
            worker.close()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", help="a directory (default: the one that is known for the target)")
    parser.add_argument("--models", type=Path, default=ROOT / "runs" / "natural", help="is made")
    parser.add_argument("--peers", nargs="+", metavar="KIND:WEIGHTS")
    categories = sorted(path.stem for path in PROMPTS.glob("*.jsonl"))
    parser.add_argument("--categories", nargs="+", default=categories)
    parser.add_argument("--prompts", type=int, default=2, help="of each category")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--temperatures", type=each(float), default=[0.0])
    parser.add_argument("--requests", type=each(int), default=[1], help="at a time")
    parser.add_argument("--widths", type=each(int), default=[], help="tokens of a pass, instead of times")
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--svg", type=Path, help="draw the first temperature and number of requests")
    args = parser.parse_args(argv)
    args.peers = args.peers or (WIDTHS_PEERS if args.widths else PEERS)
    if args.widths:
        args.rounds, args.temperatures, args.requests = 1, [0.0], [1]

    names = prepare(args)
    records = list(measure(args, names, list(jobs(args))))
    document: Record = {"processor": processor(), "threads": args.threads, "versions": versions()}
    print(f"{processor()}, {args.threads} threads; " + ", ".join(f"{k} {v}" for k, v in versions().items()))
    if args.widths:
        document["widths"] = widths_table(records)
        print(f"\n{widths_markdown(document['widths'])}")
    else:
        document["tables"] = []
        for temperature in args.temperatures:
            for requests in args.requests:
                key = {"temperature": temperature, "requests": requests}
                rows = table([r for r in records if key.items() <= r.items()], names)
                document["tables"].append(key | {"rows": rows})
                print(f"\ntemperature {temperature:g}, {requests} at a time: tokens per second\n")
                print(markdown(rows, args.categories if requests == 1 else []))
        if args.svg is not None:
            chart(args.svg, document["tables"][0]["rows"], f"{processor()}, {args.threads} threads")
    print(json.dumps(document))
    return 0


def versions() -> dict[str, str]:
    """Versions of the packages that are installed."""
    installed_versions = {}
    for name in DISTRIBUTIONS:
        with suppress(PackageNotFoundError):
            installed_versions[name] = version(name)
    return installed_versions


if __name__ == "__main__":
    sys.exit(main())

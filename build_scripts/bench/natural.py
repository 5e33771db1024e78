"""Decoders on natural text, in one run: this package and llama.cpp.

    python -m build_scripts.bench.natural [--prompts 2] [--requests 1,8] [--peers KIND:WEIGHTS ...] [--svg FILE]

Each decoder runs in a process of its own, with the same token ids and threads. Every prompt goes to all of them in
turn, several rounds long, so that a slow moment of the machine hits all. A figure is of the median of the rounds of
each prompt: tokens per second after the first token for one request, and in all for several at a time. Decoders are
named KIND:WEIGHTS, see `build_scripts.bench.peers`; those whose package is not installed are left out. The last line is
one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from html import escape
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

from build_scripts import harness
from build_scripts.bench.peers import OURS, Task, installed, kind_of, make_gguf
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
    *("plain:default", "adaptive:default", "plain:target=int8", "adaptive:target=int8", "plain:target=int4"),
    *("llama.cpp:F32", "llama.cpp:BF16", "llama.cpp:Q8_0", "llama.cpp:Q4_0"),
)
DISTRIBUTIONS = ("dflash-trt", "onnxruntime", "llama-cpp-python")

Record = dict[str, Any]


class Decoder:
    """A decoder's process."""

    def __init__(self, name: str, models: Path, *numbers: int) -> None:
        self.name = name
        command = [sys.executable, "-m", "build_scripts.bench.peers", name, str(models)]
        self._process = subprocess.Popen(
            [*command, *map(str, numbers)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()

    def run(self, task: Task) -> Record:
        """The outcome of a task, and the process's peak of memory."""
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
        """End the process."""
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
        if kind == "llama.cpp":
            make_gguf(args.target, args.models / "gguf" / f"{weights}.gguf")
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
        for requests in args.requests:
            for first in range(0, max(len(prompts) // requests, 1) * requests, requests):
                chosen = list(islice(cycle(prompts), first, first + requests))
                task = Task([ids for _, ids in chosen], args.max_tokens, temperature, stop)
                yield Job(chosen[0][0].id, chosen[0][0].category, task)


def measure(args: argparse.Namespace, names: list[str], chosen: list[Job]) -> Iterator[Record]:
    """Rounds of the jobs, by processes that hold as many tokens as these jobs need."""
    capacity = max(len(ids) + job.task.max_tokens for job in chosen for ids in job.task.prompts) + 16
    decoders: list[Decoder] = []
    try:
        for name in names:
            decoders.append(Decoder(name, args.models, max(args.requests), capacity, args.threads))
        first = chosen[0].task
        for decoder in decoders:
            decoder.run(Task([first.prompts[0][-16:]], 16, 0.0, first.stop))  # a warm-up
        for number in range(args.rounds):
            for place, job in enumerate(chosen):
                turn = (number + place) % len(decoders)
                for decoder in decoders[turn:] + decoders[:turn]:
                    record: Record = {"prompt": job.prompt, "category": job.category, "peer": decoder.name}
                    record |= {"temperature": job.task.temperature, "requests": len(job.task.prompts)}
                    yield record | decoder.run(job.task)
    finally:
        for decoder in decoders:
            decoder.close()


def count(record: Record) -> tuple[float, float]:
    """Tokens and their seconds of one run. Of one request, without the first token."""
    alone = record["requests"] == 1
    return sum(map(len, record["tokens"])) - alone, record["seconds"] - alone * record["first"]


def rate(records: Iterable[Record]) -> float | None:
    """Tokens per second over all prompts, of the median of each prompt's rounds."""
    prompts: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for record in records:
        prompts[record["prompt"]].append(count(record))
    medians = [[statistics.median(each) for each in zip(*runs, strict=True)] for runs in prompts.values()]
    return sum(n for n, _ in medians) / sum(s for _, s in medians) if medians else None


def quartiles(records: Iterable[Record]) -> list[float]:
    """The first and the third quartile of the runs' tokens per second."""
    rates = [n / s for n, s in map(count, records)]
    first, _, third = statistics.quantiles(rates, method="inclusive") if len(rates) > 1 else [rates[0]] * 3
    return [first, third]


def table(records: list[Record], peers: Iterable[str]) -> dict[str, Record]:
    """The figures of each decoder. The ratio and the same answers are to the first one's."""
    categories = sorted({r["category"] for r in records})
    rows: dict[str, Record] = {}
    for peer in peers:
        mine = [r for r in records if r["peer"] == peer]
        rounds, given = sum(r["rounds"] for r in mine), {r["prompt"]: r["tokens"] for r in mine}
        if not rows:
            base, first = rate(mine) or 1, given
        rows[peer] = {
            "all": (speed := rate(mine) or 0),
            **{category: rate(r for r in mine if r["category"] == category) for category in categories},
            "ratio": speed / base,
            "acceptance_length": 1 + sum(r["accepted"] for r in mine) / rounds if rounds else None,
            "same_answers": sum(tokens == first.get(prompt) for prompt, tokens in given.items()),
            "prompts": len(given),
            "runs": len(mine),
            "quartiles": quartiles(mine),
            "peak_mb": max(r["peak_mb"] for r in mine),
        }
    return rows


def markdown(rows: Mapping[str, Record], categories: list[str]) -> str:
    """The figures as a table."""
    titles = [*categories, "all", "quartiles", "ratio", "acceptance", "same answers", "peak MB"]
    lines = [f"| | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    for peer, row in rows.items():
        cells = [f"{row[name]:.1f}" for name in (*categories, "all")]
        cells.append("{:.0f}-{:.0f}".format(*row["quartiles"]))
        length = row["acceptance_length"]
        cells += [f"{row['ratio']:.2f}", "" if length is None else f"{length:.2f}"]
        cells += [f"{row['same_answers']}/{row['prompts']}", f"{row['peak_mb']:.0f}"]
        lines.append(f"| {label(peer)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def label(peer: str) -> str:
    """How a table names a decoder: "dflash-trt, blocks of 4", "llama.cpp Q8_0"."""
    kind, _, weights = peer.partition(":")
    if kind_of(peer) not in OURS:
        return f"{kind} {weights}"
    method = {"plain": "plain", "draft": "whole blocks", "adaptive": "adaptive"}.get(
        kind, f"blocks of {kind.partition('-')[2]}"
    )
    return f"dflash-trt, {method}" if weights == "default" else f"dflash-trt {weights}, {method}"


def main(argv: list[str] | None = None) -> int:
    """Measure, and print the tables."""
    parser = harness.parser(__doc__)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", help="a directory (default: the one that is known for the target)")
    parser.add_argument("--models", type=Path, default=ROOT / "runs" / "natural", help="is made")
    parser.add_argument("--peers", nargs="+", metavar="KIND:WEIGHTS", default=PEERS)
    categories = sorted(path.stem for path in PROMPTS.glob("*.jsonl"))
    parser.add_argument("--categories", nargs="+", default=categories)
    parser.add_argument("--prompts", type=int, default=2, help="of each category")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--temperatures", type=each(float), default=[0.0])
    parser.add_argument("--requests", type=each(int), default=[1], help="at a time")
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--svg", type=Path, help="draw the first temperature and number of requests")
    args = parser.parse_args(argv)
    names = prepare(args)
    records = list(measure(args, names, list(jobs(args))))
    tables = []
    print(f"{processor()}, {args.threads} threads; " + ", ".join(f"{k} {v}" for k, v in versions().items()))
    for temperature in args.temperatures:
        for requests in args.requests:
            key = {"temperature": temperature, "requests": requests}
            rows = table([r for r in records if key.items() <= r.items()], names)
            tables.append(key | {"rows": rows})
            print(f"\ntemperature {temperature:g}, {requests} at a time: tokens per second\n")
            print(markdown(rows, args.categories if requests == 1 else []))
    if args.svg is not None:
        args.svg.write_text(chart(tables[0]["rows"], f"{processor()}, {args.threads} threads"))
    document: Record = {"processor": processor(), "threads": args.threads, "versions": versions()}
    print(json.dumps(document | {"tables": tables}))
    return 0


# Without a background, and with other colours in dark mode: an image in a README follows the viewer's mode.
STYLE = """\
text { font: 13px sans-serif; fill: #24292f } .title { font-weight: bold } .spread { stroke: #24292f }
.other { fill: #8c959f } .ours { fill: #0969da }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .spread { stroke: #e6edf3 } .other { fill: #7d8590 } .ours { fill: #58a6ff }
}"""


def chart(rows: Mapping[str, Record], machine: str) -> str:
    """An SVG document: a bar for each decoder's tokens per second, and a line from the first to the third quartile."""
    left, step, width = 230, 28, 760
    scale = (width - left - 60) / max(row["quartiles"][1] for row in rows.values())
    count = max(row["prompts"] for row in rows.values())
    title = f"SmolLM2-135M, tokens per second: {count} prompts, quartiles over runs"
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {60 + step * len(rows)}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        f'<text class="title" x="0" y="16">{escape(title)}</text>',
        f'<text x="0" y="36">{escape(machine)}</text>',
    ]
    for i, (peer, row) in enumerate(rows.items()):
        y, (low, high) = 52 + step * i, (left + scale * each for each in row["quartiles"])
        kind = "ours" if kind_of(peer) in OURS else "other"
        end = max(high, left + row["all"] * scale) + 6
        out += [
            f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{escape(label(peer))}</text>',
            f'<rect class="{kind}" x="{left}" y="{y}" width="{row["all"] * scale:.1f}" height="18"/>',
            f'<path class="spread" d="M{low:.1f} {y + 9}H{high:.1f}M{low:.1f} {y + 5}v8M{high:.1f} {y + 5}v8"/>',
            f'<text x="{end:.1f}" y="{y + 14}">{row["all"]:.0f}</text>',
        ]
    return "\n".join([*out, "</svg>"]) + "\n"


def versions() -> dict[str, str]:
    """Versions of the packages that are installed."""
    installed_versions = {}
    for name in DISTRIBUTIONS:
        with suppress(PackageNotFoundError):
            installed_versions[name] = version(name)
    return installed_versions


if __name__ == "__main__":
    sys.exit(main())

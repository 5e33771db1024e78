"""Decoders on natural text, in one run: this package, llama.cpp, onnxruntime-genai, Transformers and z-lab's loop.

    python -m build_scripts.bench.natural [--parts decode,batch,context,prefill] [--records FILE] [--svg FILE]

Each decoder runs in a process of its own, with the same token ids and threads. Every prompt goes to all of them in
turn, several rounds long, so that a slow moment of the machine hits all. A figure is of the median of the rounds of
each prompt. Decoders are named KIND:WEIGHTS, see `build_scripts.bench.peers`; those that are not installed are left
out and named.

decode: one request at a time; tokens per second after the first token, by category.
batch: several requests at a time; tokens per second from the first prompt's start to the last token.
context: tokens per second after a long prompt.  prefill: prompt tokens per second.

Measurements are appended to --records, so that a run can be made in pieces; tables are of all that the file has.
`--parts none` prints them only. The last line is one JSON document.
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
from pathlib import Path
from typing import Any

from build_scripts.bench import peer_models
from build_scripts.bench.peers import PACKAGES, Task, installed, package_of
from dflash_trt.building.build import build
from dflash_trt.building.sources import resolve, resolve_pair
from dflash_trt.formats.precision import parse_precision
from dflash_trt.hardware import cores, processor
from dflash_trt.models.configs import read_target_config
from dflash_trt.prompts import SHIPPED_PROMPTS, Prompt, read_prompts
from dflash_trt.text.tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent.parent
PROMPTS = SHIPPED_PROMPTS / "natural"
PARTS = ("decode", "batch", "context", "prefill")
PEERS = (
    *(
        "plain:default",
        "draft:default",
        "adaptive:default",
        "llama.cpp:F32",
        "llama.cpp:BF16",
        "llama.cpp:Q8_0",
    ),
    *("llama.cpp:Q4_0", "genai:fp32", "genai:int4", "transformers:float32", "z-lab:float32"),
)
OURS = ("plain", "draft", "adaptive")
ALONE = ("z-lab",)  # kinds that take one prompt at a time
SHORT = ("json", "math", "summary")  # categories whose answers may be shorter than --max-tokens
DISTRIBUTIONS = (
    "dflash-trt",
    "onnxruntime",
    "llama-cpp-python",
    "onnxruntime-genai",
    "torch",
    "transformers",
    "dflash",
)

Record = dict[str, Any]


class Worker:
    """A decoder's process."""

    def __init__(self, name: str, models: Path, batch: int, capacity: int, threads: int) -> None:
        self.name = name
        arguments = [name, str(models), str(batch), str(capacity), str(threads)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "build_scripts.bench.peers", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
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
    """One job of every decoder in each round, and its name in the records."""

    part: str
    item: str
    category: str
    task: Task
    batch: int = 1


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        source = resolve(args.target, "target")
        self.tokenizer = Tokenizer(source.directory)
        self.stop = list(read_target_config(source.directory).eos_token_ids)

    def prepare(self, names: Iterable[str]) -> list[str]:
        """Make the models that are missing. Names that can be had."""
        models, target = self.args.models, self.args.target
        for role, source in zip(("target", "drafter"), resolve_pair(target, self.args.drafter), strict=True):
            models.mkdir(parents=True, exist_ok=True)
            (models / role).unlink(missing_ok=True)
            (models / role).symlink_to(source.directory.resolve())
        found = [name for name in names if installed(name)]
        for name in names:
            if name not in found:
                print(f"left out: {name}, because {package_of(name)} is not installed", file=sys.stderr)
        kinds = {name.partition(":")[0] for name in found}
        if "llama.cpp" in kinds:
            peer_models.make_gguf(target, models / "gguf")
        if "genai" in kinds:
            peer_models.make_genai(target, models / "genai")
        for kind, weights in (name.split(":", 1) for name in found):
            bundle = models / "bundles" / weights
            if kind.partition("-")[0] in OURS and not (self.args.reuse and bundle.exists()):
                precision = parse_precision(None if weights == "default" else weights)
                build(target, self.args.drafter, bundle, precision=precision, force=True)
        return found

    def jobs(self) -> Iterator[Job]:
        args = self.args
        if "decode" in args.parts:
            for temperature in args.temperatures:
                for prompt in self._prompts():
                    task = self._task([self._ids(prompt)], args.max_tokens, temperature)
                    yield Job("decode", f"{prompt.id}@{temperature:g}", prompt.category, task)
        if "batch" in args.parts:
            prompts = [prompt for prompt in self._prompts() if prompt.category not in SHORT]
            for temperature in args.temperatures:
                for batch in args.batches:
                    for start in range(0, len(prompts) - batch + 1, max(args.batches)):
                        chosen = prompts[start : start + batch]
                        task = self._task([self._ids(p) for p in chosen], args.max_tokens, temperature)
                        yield Job("batch", f"{batch}x{chosen[0].id}@{temperature:g}", str(batch), task, batch)
        text = "\n".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))
        ids = self.tokenizer.encode(text)
        if "context" in args.parts:
            yield Job("context", str(args.context), "", self._task([ids[: args.context]], 48, 0.0))
        if "prefill" in args.parts:
            yield Job("prefill", "512", "", self._task([ids[:512]], 1, 0.0))

    def _prompts(self) -> list[Prompt]:
        """So many prompts of each category, each category in turn."""
        found = [
            prompt
            for category in self.args.categories
            for prompt in read_prompts(
                PROMPTS / f"{category}.jsonl", limit=self.args.skip + self.args.prompts
            )[self.args.skip :]
        ]
        return sorted(found, key=lambda prompt: prompt.id.rpartition("-")[2])

    def _ids(self, prompt: Prompt) -> list[int]:
        assert not isinstance(prompt.content, str)  # the shipped prompts are chats
        text = self.tokenizer.apply_chat_template(prompt.content)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _task(self, prompts: list[list[int]], max_tokens: int, temperature: float) -> Task:
        return Task(prompts, max_tokens, temperature, seed=1, stop=self.stop)

    def measure(self, names: list[str], jobs: list[Job]) -> Iterator[Record]:
        """Rounds of the jobs, by processes that hold as many requests and tokens as these jobs need."""
        args, batch = self.args, max(job.batch for job in jobs)
        capacity = max(len(p) + job.task.max_tokens for job in jobs for p in job.task.prompts) + 16
        workers: list[Worker] = []
        try:
            for name in names:
                workers.append(Worker(name, args.models, batch, capacity, args.threads))
            for worker in workers:
                worker.run(self._task([jobs[0].task.prompts[0][-16:]], 16, 0.0))  # a warm-up
            for number in range(args.rounds):
                for place, job in enumerate(jobs):
                    turn = (number + place) % len(workers)
                    for worker in workers[turn:] + workers[:turn]:
                        if job.batch == 1 or worker.name.partition(":")[0] not in ALONE:
                            record: Record = {"part": job.part, "item": job.item, "category": job.category}
                            record |= {"temperature": job.task.temperature, "peer": worker.name}
                            yield record | worker.run(job.task)
        finally:
            for worker in workers:
                worker.close()


def seconds_of(record: Record) -> tuple[int, float]:
    """Tokens of a record, and the seconds that they took."""
    count = sum(map(len, record["tokens"]))
    if record["part"] in ("decode", "context"):
        return count - 1, record["seconds"] - record["first"]
    return (512, record["first"]) if record["part"] == "prefill" else (count, record["seconds"])


def by_item(records: Iterable[Record]) -> dict[str, tuple[float, float]]:
    """Tokens and seconds of each item, as the medians of its rounds."""
    items: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for record in records:
        items[record["item"]].append(seconds_of(record))
    return {
        item: (statistics.median(n for n, _ in values), statistics.median(s for _, s in values))
        for item, values in items.items()
    }


def rate(records: Iterable[Record]) -> float | None:
    """Tokens per second over all items."""
    counts = list(by_item(records).values())
    return sum(n for n, _ in counts) / sum(s for _, s in counts) if counts else None


def quartiles(records: Iterable[Record]) -> list[float]:
    """The first and the third quartile of the items' tokens per second."""
    rates = [n / s for n, s in by_item(records).values()]
    first, _, third = statistics.quantiles(rates, method="inclusive") if len(rates) > 1 else [rates[0]] * 3
    return [first, third]


def tables(records: list[Record]) -> tuple[str, Record]:
    """Text, and the same as JSON."""
    lines: list[str] = []
    found: Record = {}
    groups: dict[tuple[str, float], list[Record]] = defaultdict(list)
    for record in records:
        groups[record["part"], record["temperature"]].append(record)
    for (part, temperature), group in sorted(groups.items()):
        columns = sorted({r["category"] for r in group} - {""}) if part in ("decode", "batch") else []
        peers = sorted({r["peer"]: None for r in group}, key=kind_order)
        first = answers([r for r in group if r["peer"] == peers[0]])
        titles = [*(f"{c} requests" if part == "batch" else c for c in columns), "all", "ratio", "acceptance"]
        lines += ["", f"{part}, temperature {temperature:g}: tokens per second of {len(first)} items", ""]
        lines += [
            f"| | {' | '.join([*titles, 'same answers', 'peak MB'])} |",
            "|---" * (len(titles) + 3) + "|",
        ]
        rows: Record = {}
        for peer in peers:
            mine = [r for r in group if r["peer"] == peer]
            row = {"all": rate(mine)} | {c: rate(r for r in mine if r["category"] == c) for c in columns}
            rounds = sum(r["rounds"] for r in mine)
            same = [tokens == first.get(item) for item, tokens in answers(mine).items()]
            rows[peer] = row | {
                "ratio": (row["all"] or 0) / (rate(r for r in group if r["peer"] == peers[0]) or 1),
                "acceptance_length": 1 + sum(r["accepted"] for r in mine) / rounds if rounds else None,
                "same_answers": sum(same) / len(same),
                "items": len(same),
                "quartiles": quartiles(mine),
                "peak_mb": max((r.get("peak_mb", 0) for r in mine), default=0),
            }
            cells = [
                *(shown(row[c], 1) for c in columns),
                shown(row["all"], 1),
                shown(rows[peer]["ratio"], 2),
            ]
            cells += [shown(rows[peer]["acceptance_length"], 2), f"{sum(same)}/{len(same)}"]
            lines.append(f"| {label(peer)} | {' | '.join([*cells, shown(rows[peer]['peak_mb'], 0)])} |")
        found[f"{part}@{temperature:g}"] = rows
    return "\n".join(lines), found


def kind_order(peer: str) -> int:
    kind = peer.partition(":")[0]
    return list(PACKAGES).index("draft" if kind.startswith("draft-") else kind)


def label(peer: str) -> str:
    """How a table names a decoder: "dflash-trt, drafts of 4", "llama.cpp Q8_0"."""
    kind, _, weights = peer.partition(":")
    if kind.partition("-")[0] in OURS:
        length = kind.partition("-")[2]
        method = {"plain": "plain", "draft": "whole blocks", "adaptive": "adaptive"}.get(
            kind, f"blocks of {length}"
        )
        return f"dflash-trt, {method}" if weights == "default" else f"dflash-trt {weights}, {method}"
    names = {"genai": "onnxruntime-genai", "transformers": "Transformers", "z-lab": "z-lab's loop"}
    return f"{names.get(kind, kind)} {weights}"


def answers(records: Iterable[Record]) -> dict[str, Any]:
    return {record["item"]: record["tokens"] for record in records}


def shown(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    categories = sorted(path.stem for path in PROMPTS.glob("*.jsonl"))
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", help="a directory (default: the one that is known for the target)")
    parser.add_argument("--models", type=Path, default=ROOT / "runs" / "natural", help="is made")
    parser.add_argument(
        "--reuse", action="store_true", help="take the bundles that are in --models as they are"
    )
    parser.add_argument("--peers", nargs="+", default=PEERS, metavar="KIND:WEIGHTS")
    parser.add_argument("--parts", type=listed, default=list(PARTS))
    parser.add_argument("--categories", type=listed, default=categories)
    parser.add_argument("--prompts", type=int, default=2, help="of each category")
    parser.add_argument("--skip", type=int, default=0, help="so many prompts of each category")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--temperatures", type=lambda text: [float(t) for t in text.split(",")], default=[0.0, 1.0]
    )
    parser.add_argument(
        "--batches", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2, 4, 8]
    )
    parser.add_argument("--context", type=int, default=3900, help="tokens")
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--records", type=Path, help="JSON lines; measurements are appended")
    parser.add_argument("--svg", type=Path, help="a picture of the rates of one request at temperature 0")
    args = parser.parse_args(argv)

    records: list[Record] = []
    if args.records is not None and args.records.exists():
        records = [json.loads(line) for line in args.records.read_text().splitlines()]
    if args.parts != ["none"]:
        bench = Bench(args)
        names, jobs = bench.prepare(args.peers), list(bench.jobs())
        for part in PARTS:
            chosen = [job for job in jobs if job.part == part]
            for record in bench.measure(names, chosen) if chosen else ():
                records.append(record)
                if args.records is not None:
                    with args.records.open("a") as file:
                        file.write(json.dumps(record) + "\n")
    text, found = tables(records)
    print(f"{processor()}, {args.threads} threads; " + ", ".join(f"{k} {v}" for k, v in versions().items()))
    print(text)
    if args.svg is not None:
        args.svg.write_text(chart(found["decode@0"], f"{processor()}, {args.threads} threads"))
    print(
        json.dumps(
            {"processor": processor(), "threads": args.threads, "versions": versions(), "tables": found}
        )
    )
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
    count = max(row["items"] for row in rows.values())
    title = f"SmolLM2-135M, tokens per second: {count} prompts, quartiles over prompts"
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {60 + step * len(rows)}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        f'<text class="title" x="0" y="16">{escape(title)}</text>',
        f'<text x="0" y="36">{escape(machine)}</text>',
    ]
    for i, (peer, row) in enumerate(rows.items()):
        y, (low, high) = 52 + step * i, (left + scale * each for each in row["quartiles"])
        kind = "ours" if peer.partition(":")[0].partition("-")[0] in OURS else "other"
        out.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{escape(label(peer))}</text>')
        out.append(f'<rect class="{kind}" x="{left}" y="{y}" width="{row["all"] * scale:.1f}" height="18"/>')
        out.append(
            f'<path class="spread" d="M{low:.1f} {y + 9}H{high:.1f}M{low:.1f} {y + 5}v8M{high:.1f} {y + 5}v8"/>'
        )
        out.append(
            f'<text x="{max(high, left + row["all"] * scale) + 6:.1f}" y="{y + 14}">{row["all"]:.0f}</text>'
        )
    return "\n".join([*out, "</svg>"]) + "\n"


def listed(text: str) -> list[str]:
    return text.split(",")


def versions() -> dict[str, str]:
    found = {}
    for name in DISTRIBUTIONS:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


if __name__ == "__main__":
    sys.exit(main())

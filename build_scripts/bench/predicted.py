"""Tokens per second as a steps file predicts them, compared with measured ones.

    python -m build_scripts.bench.predicted bundles/tiny --records all.jsonl
    python -m build_scripts.bench.predicted bundles/smollm2-135m --records all.jsonl --natural --seconds 50
    python -m build_scripts.bench.predicted --records all.jsonl --svg docs/planning_cpu.svg

Groups of so many requests decode together, plainly and with each block length. Only rounds count in which all of
them are active, so no prefill and no waiting. Between the groups, single passes of that many requests are timed as
`bench --steps` does, so that a slow moment affects both. Both are medians. Every load gets the same prompts, and tokens
per round are counted for each block length, over all loads. Predictions are made from them and from the passes.

A run may be a short piece: with --seconds it ends after a whole turn. The next one goes on with the next prompts, and
the records of a setting are added up. Without a bundle, the records are compared and drawn.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from dflash_trt.decoding.length.policy import FixedLength
from dflash_trt.decoding.pair import Pair
from dflash_trt.decoding.params import SamplingParams
from dflash_trt.decoding.scheduler import Scheduler
from dflash_trt.files.disk import whole_file
from dflash_trt.planning.acceptance import Acceptance
from dflash_trt.planning.steps import Steps, read_steps
from dflash_trt.prompts import Prompt, natural_prompts, read_prompts
from dflash_trt.reports.steps import PassTimes, document, host_times, pass_rows
from dflash_trt.runtime import Runtime

_WARM_UP = 2  # rounds of each group that do not count
_CONTEXT = 128  # rows behind each request of a timed pass
_LEAST = 4  # turns
_DRAWN = (1, 2, 4, 8)  # block lengths in the drawing; the text has all
_PASSES = 2  # how often each pass is timed in a turn
_KEPT_BYTES = 1 << 28  # of the prompts' rows, so that each turn runs a prompt once


@dataclass
class Part:
    """Tokens, rounds of single requests, and the seconds of each round of one setting."""

    tokens: int = 0
    rounds: int = 0
    seconds: list[float] = field(default_factory=list)

    def add(self, tokens: int, rounds: int, seconds: Sequence[float]) -> None:
        self.tokens += tokens
        self.rounds += rounds
        self.seconds += seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path, nargs="?")
    parser.add_argument("--records", type=Path, required=True, help="JSON lines; new ones are added")
    parser.add_argument("--concurrency", default="1,2,4,8,16")
    parser.add_argument("--block-lengths", default="2,4,8")
    parser.add_argument("--prompts", type=int, default=16, help="of each setting")
    parser.add_argument("--natural", action="store_true", help="the natural prompts")
    parser.add_argument("--tokens", type=int, default=32, help="per request")
    parser.add_argument("--seconds", type=float, help="of each load, at most (default: all prompts once)")
    parser.add_argument("--svg", type=Path)
    args = parser.parse_args()
    before = read_records(args.records) if args.records.exists() else []
    if args.bundle is None:
        compare(before, args.svg)
        return
    lengths = [1, *map(int, args.block_lengths.split(","))]
    loads = list(map(int, args.concurrency.split(",")))
    done = {load: _turns(before, args.bundle.name, load) for load in loads}
    prompts = (natural_prompts if args.natural else read_prompts)(None, args.prompts)
    with args.records.open("a") as records:
        for row in measure(args.bundle, done, lengths, prompts, args.tokens, args.seconds):
            records.write(json.dumps(row) + "\n")
            records.flush()


def read_records(file: Path) -> list[dict[str, Any]]:
    return list(map(json.loads, file.read_text().splitlines()))


def _turns(records: Sequence[dict[str, Any]], name: str, load: int) -> int:
    """The turns of this load in earlier records."""
    of = [r["turns"] for r in records if r["steps"]["bundle"]["name"] == name and r["requests"] == load]
    return sum(of)


def measure(
    bundle: Path,
    done: Mapping[int, int],
    lengths: Sequence[int],
    prompts: Sequence[Prompt],
    tokens: int,
    most: float | None,
) -> Iterator[dict[str, Any]]:
    """A row for every load: passes timed at that load alone, and what each length made of the prompts.

    done: the turns of each load in earlier runs. most: the seconds of a load, after which no turn begins.
    """
    runtime = Runtime(
        bundle,
        max_batch_size=max(done),
        prefill_chunk=512,
        prefix_cache_bytes=_KEPT_BYTES,
        threads=None,
        check="size",
    )
    assert isinstance(runtime.pair, Pair)
    assert isinstance(runtime.scheduler, Scheduler)
    ids = [
        runtime.tokenizer.encode(p.content) if isinstance(p.content, str) else runtime.chat_prompt(p.content)
        for p in prompts
    ]
    for load, first in done.items():
        begin = perf_counter()
        passes = PassTimes(runtime.pair, [load], lengths, [_CONTEXT])
        host = list(host_times(runtime, ids, [load], [1, runtime.block_size]))
        parts = {length: Part() for length in lengths}
        groups = [ids[at : at + load] for at in range(0, len(ids) - load + 1, load)]
        turns, longest = 0, 0.0
        while (
            turns < max(len(groups), _LEAST)
            if most is None
            else not turns or perf_counter() + longest < begin + most
        ):
            start, turn = perf_counter(), first + turns
            runtime.scheduler.forget()
            for _ in range(_PASSES):
                passes.turn()
            at = turn % len(lengths)
            for length in [*lengths[at:], *lengths[:at]]:
                _group(runtime, groups[turn % len(groups)], length, tokens, parts[length])
            turns, longest = turns + 1, max(longest, perf_counter() - start)
        speeds = ", ".join(f"{length}: {_speed(part, load):.1f}" for length, part in parts.items())
        print(f"{load} requests, {turns} turns; tokens/s by block length {speeds}", flush=True)
        yield {
            "steps": document(runtime, {"passes": [], "host": host}),
            "requests": load,
            "turns": turns,
            "passes": [[*setting, times] for setting, times in passes.found.items()],
            "made": {str(length): asdict(part) for length, part in parts.items()},
        }
    runtime.pair.close()


def _group(runtime: Runtime, prompts: Sequence[list[int]], length: int, tokens: int, part: Part) -> None:
    """Decode these prompts together until each has about so many tokens, and add up the rounds of all of them."""
    scheduler, policy = runtime.scheduler, FixedLength(length)
    assert isinstance(scheduler, Scheduler)
    params = SamplingParams(max_tokens=tokens + (_WARM_UP + 1) * length, ignore_eos=True)
    requests = [runtime.request(prompt, params, draft=length > 1) for prompt in prompts]
    for request in requests:
        scheduler.submit(request)
    rounds = made = 0
    while made < tokens * len(prompts) and not scheduler.idle:
        full = len(scheduler.active) == len(prompts)
        begin = perf_counter()
        emissions = scheduler.step(policy)
        seconds = perf_counter() - begin
        if scheduler.idle or not full:
            continue
        rounds += 1
        if rounds <= _WARM_UP:
            continue
        new = sum(len(emission.token_ids) for emission in emissions)
        made += new
        part.add(new, len(prompts), [seconds])
    scheduler.clear()


def compare(records: Sequence[dict[str, Any]], svg: Path | None) -> None:
    """Print predicted and measured throughput of every setting, and the errors."""
    errors: list[float] = []
    panels: dict[str, dict[str, list[float | None]]] = {}
    loads = sorted({row["requests"] for row in records})
    for pair in dict.fromkeys(row["steps"]["bundle"]["name"] for row in records):
        rows = [row for row in records if row["steps"]["bundle"]["name"] == pair]
        steps, parts = merged(rows), made(rows)
        blocks = sorted({block for of in parts.values() for block in of})
        acceptance = tokens_per_round(parts.values())
        layout = steps.layout(_CONTEXT)
        shown = ", ".join(f"{block}: {length:.2f}" for block, length in acceptance.lengths.items())
        print(f"\n{pair}: {steps.place}; tokens per round {shown}")
        own: list[float] = []
        lines: dict[str, list[float | None]] = {}
        for block in blocks:
            name = "plain" if block == 1 else f"block {block}"
            measured, predicted = dict[int, float](), dict[int, float]()
            for load in sorted(parts):
                measured[load] = _speed(parts[load][block], load)
                seconds = layout.plain(load) if block == 1 else layout.round(load, block)
                assert seconds is not None
                predicted[load] = load * (1.0 if block == 1 else acceptance.length(block)) / seconds
                own.append(predicted[load] / measured[load] - 1)
                print(
                    f"{name:<9}{load:>3} requests: predicted {predicted[load]:7.1f}, measured "
                    f"{measured[load]:7.1f}, {own[-1]:+.0%}"
                )
            if block not in _DRAWN:
                continue
            lines[f"{name}, measured"] = [measured.get(load) for load in loads]
            lines[f"{name}, predicted"] = [predicted.get(load) for load in loads]
        panels[pair] = lines
        print(_errors(own))
        errors += own
    print("\nall:", _errors(errors))
    if svg is not None:
        from dflash_trt.reports.charts import comparison_chart

        with whole_file(svg) as file:
            chart = comparison_chart(
                [str(load) for load in loads],
                panels,
                title="Tokens per second: predicted from pass times (lines), and measured (points)",
                x="requests at a time",
            )
            file.write(chart.encode())


def _speed(part: Part, load: int) -> float:
    """Tokens per second: the mean tokens of a round, over the median of its seconds."""
    return load * part.tokens / part.rounds / median(part.seconds)


def merged(records: Sequence[dict[str, Any]]) -> Steps:
    """One steps file of all loads: the medians of all times of a pass."""
    times: dict[tuple[str, int, int, int], list[float]] = {}
    host: dict[tuple[int, int], list[float]] = {}
    for record in records:
        for *setting, seconds in record["passes"]:
            times.setdefault(tuple(setting), []).extend(seconds)
        for row in record["steps"]["host"]:
            host.setdefault((row["batch"], row["rows"]), []).append(row["seconds"])
    rows = {
        "passes": pass_rows(times),
        "host": [{"batch": b, "rows": n, "seconds": median(s)} for (b, n), s in host.items()],
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "steps.json"
        file.write_text(json.dumps(records[0]["steps"] | rows))
        return read_steps(file)


def made(records: Sequence[dict[str, Any]]) -> dict[int, dict[int, Part]]:
    """The parts of all records, added up by load and block length."""
    found: dict[int, dict[int, Part]] = {}
    for record in records:
        of = found.setdefault(record["requests"], {})
        for block, part in record["made"].items():
            of.setdefault(int(block), Part()).add(**part)
    return found


def tokens_per_round(parts: Iterable[Mapping[int, Part]]) -> Acceptance:
    """Tokens per round by block length, over all loads."""
    whole: dict[int, Part] = {}
    for each in parts:
        for block, part in each.items():
            if block > 1:
                whole.setdefault(block, Part()).add(**asdict(part))
    return Acceptance({block: part.tokens / part.rounds for block, part in whole.items()}, "measured")


def _errors(errors: Sequence[float]) -> str:
    sizes = [abs(error) for error in errors]
    near = sum(size <= 0.1 for size in sizes)
    worst = max(errors, key=abs)
    return f"{len(errors)} points: median error {median(sizes):.1%}, {near} within 10%, largest {worst:+.0%}"


if __name__ == "__main__":
    main()

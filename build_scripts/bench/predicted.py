"""Tokens per second as a steps file predicts them, compared with measured ones.

    python -m build_scripts.bench.predicted bundles/tiny --records all.jsonl
    python -m build_scripts.bench.predicted --records all.jsonl --svg docs/planning_cpu.svg

Groups of so many requests decode together, plainly and with each block length. Only rounds count in which all of
them are active, so no prefill and no waiting. Between the groups, single passes of that many requests are timed as
`bench --steps` does, so that a slow moment affects both. Both are medians. Every load gets the same prompts, and tokens
per round are counted for each block length, over all loads. Predictions are made from them and from the passes.
Without a bundle, the records are compared and drawn. A later record of a setting replaces an earlier one.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
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
from dflash_trt.prompts import read_prompts
from dflash_trt.reports.steps import PassTimes, document, host_times
from dflash_trt.runtime import Runtime

_WARM_UP = 2  # rounds of each group that do not count
_CONTEXT = 128  # rows behind each request of a timed pass
_LEAST = 4  # turns


@dataclass
class Part:
    """Tokens, rounds of single requests, and the seconds of each round of one setting."""

    tokens: int = 0
    rounds: int = 0
    seconds: list[float] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path, nargs="?")
    parser.add_argument("--records", type=Path, required=True, help="JSON lines; new ones are added")
    parser.add_argument("--concurrency", default="1,2,4,8,16")
    parser.add_argument("--block-lengths", default="2,4,8")
    parser.add_argument("--prompts", type=int, default=16, help="of each setting")
    parser.add_argument("--tokens", type=int, default=32, help="per request")
    parser.add_argument("--svg", type=Path)
    args = parser.parse_args()
    if args.bundle is None:
        compare(list(map(json.loads, args.records.read_text().splitlines())), args.svg)
        return
    lengths = [1, *map(int, args.block_lengths.split(","))]
    loads = list(map(int, args.concurrency.split(",")))
    with args.records.open("a") as records:
        for row in measure(args.bundle, loads, lengths, args.prompts, args.tokens):
            records.write(json.dumps(row) + "\n")
            records.flush()


def measure(
    bundle: Path, loads: Sequence[int], lengths: Sequence[int], count: int, tokens: int
) -> Iterator[dict[str, Any]]:
    """A row for every load: the steps file of that load alone, and what each length made of the prompts."""
    runtime = Runtime(
        bundle,
        max_batch_size=max(loads),
        prefill_chunk=512,
        prefix_cache_bytes=0,
        threads=None,
        check="size",
    )
    assert isinstance(runtime.pair, Pair)
    prompts = [
        runtime.tokenizer.encode(p.content) if isinstance(p.content, str) else runtime.chat_prompt(p.content)
        for p in read_prompts(None, count)
    ]
    for load in loads:
        passes = PassTimes(runtime.pair, [load], lengths, [_CONTEXT])
        host: list[dict[str, Any]] = []
        parts = {length: Part() for length in lengths}
        groups = [prompts[at : at + load] for at in range(0, len(prompts) - load + 1, load)]
        turns = max(len(groups), _LEAST)
        for turn in range(turns):
            passes.turn()
            if turn in (0, turns - 1):
                host += host_times(runtime, prompts, [load], [1, runtime.block_size])
            at = turn % len(lengths)
            for length in [*lengths[at:], *lengths[:at]]:
                _group(runtime, groups[turn % len(groups)], length, tokens, parts[length])
        half = len(host) // 2
        means = [
            one | {"seconds": (one["seconds"] + other["seconds"]) / 2}
            for one, other in zip(host[:half], host[half:], strict=True)
        ]
        found = document(runtime, {"passes": passes.rows(), "host": means})
        speeds = ", ".join(f"{length}: {_speed(asdict(part), load):.1f}" for length, part in parts.items())
        print(f"{load} requests; tokens/s by block length {speeds}", flush=True)
        yield {
            "steps": found,
            "requests": load,
            "made": {str(length): asdict(part) for length, part in parts.items()},
        }
    runtime.pair.close()


def _group(runtime: Runtime, prompts: Sequence[list[int]], length: int, tokens: int, part: Part) -> None:
    """Decode these prompts together until each has about so many tokens, and add up the rounds of all of them."""
    scheduler, policy = runtime.scheduler, FixedLength(length)
    assert isinstance(scheduler, Scheduler)
    scheduler.forget()
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
        part.tokens += new
        part.rounds += len(prompts)
        part.seconds.append(seconds)
    scheduler.clear()


def compare(records: Sequence[dict[str, Any]], svg: Path | None) -> None:
    """Print predicted and measured throughput of every setting, and the errors."""
    errors: list[float] = []
    panels: dict[str, dict[str, list[float | None]]] = {}
    loads = sorted({row["requests"] for row in records})
    for pair in dict.fromkeys(row["steps"]["bundle"]["name"] for row in records):
        rows = {r["requests"]: r for r in records if r["steps"]["bundle"]["name"] == pair}
        steps = _merged([row["steps"] for row in rows.values()])
        blocks = sorted({int(block) for row in rows.values() for block in row["made"]})
        acceptance = _acceptance([row["made"] for row in rows.values()])
        layout = steps.layout(_CONTEXT)
        shown = ", ".join(f"{block}: {length:.2f}" for block, length in acceptance.lengths.items())
        print(f"\n{pair}: {steps.place}; tokens per round {shown}")
        own: list[float] = []
        lines: dict[str, list[float | None]] = {}
        for block in blocks:
            name = "plain" if block == 1 else f"block {block}"
            measured, predicted = dict[int, float](), dict[int, float]()
            for load, row in rows.items():
                made = row["made"][str(block)]
                measured[load] = _speed(made, load)
                seconds = layout.plain(load) if block == 1 else layout.round(load, block)
                assert seconds is not None
                predicted[load] = load * (1.0 if block == 1 else acceptance.length(block)) / seconds
                own.append(predicted[load] / measured[load] - 1)
                print(
                    f"{name:<9}{load:>3} requests: predicted {predicted[load]:7.1f}, measured "
                    f"{measured[load]:7.1f}, {own[-1]:+.0%}"
                )
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


def _speed(made: dict[str, Any], load: int) -> float:
    """Tokens per second: the mean tokens of a round, over the median of its seconds."""
    return float(load * made["tokens"] / made["rounds"] / median(made["seconds"]))


def _merged(documents: Sequence[dict[str, Any]]) -> Steps:
    """One steps file of all loads."""
    rows = {name: [row for each in documents for row in each[name]] for name in ("passes", "host")}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "steps.json"
        file.write_text(json.dumps(documents[0] | rows))
        return read_steps(file)


def _acceptance(made: Sequence[dict[str, Any]]) -> Acceptance:
    """Tokens per round by block length, over all loads."""
    blocks = sorted({int(block) for each in made for block in each} - {1})
    parts = {block: [each[str(block)] for each in made] for block in blocks}
    lengths = {
        block: sum(part["tokens"] for part in of) / sum(part["rounds"] for part in of)
        for block, of in parts.items()
    }
    return Acceptance(lengths, "measured")


def _errors(errors: Sequence[float]) -> str:
    sizes = [abs(error) for error in errors]
    near = sum(size <= 0.1 for size in sizes)
    worst = max(errors, key=abs)
    return f"{len(errors)} points: median error {median(sizes):.1%}, {near} within 10%, largest {worst:+.0%}"


if __name__ == "__main__":
    main()

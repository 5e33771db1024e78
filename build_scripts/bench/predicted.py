"""Tokens per second as `plan --steps` predicts them, compared with measured ones.

    dflash-trt bench bundles/tiny --steps tiny.json
    python -m build_scripts.bench.predicted bundles/tiny --steps tiny.json --records all.jsonl
    python -m build_scripts.bench.predicted --records all.jsonl --svg docs/planning_cpu.svg

Groups of so many requests decode together, plainly and with each block length. Only rounds count in which all of
them are active, so no prefill and no waiting. The groups take turns. Every setting gets the same prompts.
Acceptance by place comes from the rounds of whole blocks. Predictions are made from it and from the steps file alone.
Without a bundle, the records are compared and drawn. A later record of a setting replaces an earlier one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from dflash_trt.decoding.length.policy import FixedLength
from dflash_trt.decoding.params import SamplingParams
from dflash_trt.decoding.scheduler import Scheduler
from dflash_trt.decoding.statistics import Statistics
from dflash_trt.files.disk import whole_file
from dflash_trt.planning.acceptance import Acceptance
from dflash_trt.planning.steps import Steps, read_steps
from dflash_trt.prompts import read_prompts
from dflash_trt.runtime import Runtime

_WARM_UP = 2  # rounds of each group that do not count


@dataclass
class Part:
    """Tokens and seconds of the rounds of one setting."""

    tokens: int = 0
    seconds: float = 0.0
    statistics: Statistics = field(default_factory=lambda: Statistics(num_requests=0))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path, nargs="?")
    parser.add_argument("--steps", type=Path)
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
    steps = read_steps(args.steps)
    found = measure(args.bundle, loads, lengths, args.prompts, args.tokens)
    document = {"pair": steps.known or steps.name, "steps": json.loads(args.steps.read_text())}
    with args.records.open("a") as records:
        for row in found:
            records.write(json.dumps(document | row) + "\n")
    print(f"added {len(found)} records to {args.records}")


def measure(
    bundle: Path, loads: Sequence[int], lengths: Sequence[int], count: int, tokens: int
) -> list[dict[str, Any]]:
    """A row for every load and length: tokens, seconds, and acceptance by place."""
    runtime = Runtime(
        bundle,
        max_batch_size=max(loads),
        prefill_chunk=512,
        prefix_cache_bytes=0,
        threads=None,
        check="size",
    )
    prompts = [
        runtime.tokenizer.encode(p.content) if isinstance(p.content, str) else runtime.chat_prompt(p.content)
        for p in read_prompts(None, count)
    ]
    rows: list[dict[str, Any]] = []
    for load in loads:
        parts = {length: Part() for length in lengths}
        groups = [prompts[at : at + load] for at in range(0, len(prompts) - load + 1, load)]
        for number, group in enumerate(groups):
            turn = number % len(lengths)
            for length in [*lengths[turn:], *lengths[:turn]]:
                _group(runtime, group, length, tokens, parts[length])
        for length, part in parts.items():
            total = part.statistics
            rows.append(
                {
                    "requests": load,
                    "block": length,
                    "tokens": part.tokens,
                    "seconds": part.seconds,
                    "drafts": total.num_drafts,
                    "accepted": total.num_accepted_tokens_per_pos,
                }
            )
            print(
                f"{load:>3} requests, block {length}: {part.tokens / part.seconds:.1f} tokens/s", flush=True
            )
    runtime.pair.close()
    return rows


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
        part.seconds += seconds
    part.statistics = Statistics.merge([part.statistics, *(request.statistics for request in requests)])
    scheduler.clear()


def predict(steps: Steps, acceptance: Acceptance, requests: int, block: int) -> float:
    """Tokens per second of so many requests."""
    layout = steps.layout(steps.contexts[0])
    seconds = layout.plain(requests) if block == 1 else layout.round(requests, block)
    assert seconds is not None
    return requests * (1.0 if block == 1 else acceptance.length(block)) / seconds


def compare(records: Sequence[dict[str, Any]], svg: Path | None) -> None:
    """Print predicted and measured throughput of every setting, and the errors."""
    errors: list[float] = []
    panels: dict[str, dict[str, list[float | None]]] = {}
    loads = sorted({row["requests"] for row in records})
    for pair in dict.fromkeys(row["pair"] for row in records):
        rows = {(r["block"], r["requests"]): r for r in records if r["pair"] == pair}
        steps = _read(next(reversed(rows.values()))["steps"])
        acceptance = _acceptance([row for (block, _), row in rows.items() if block == steps.block_size])
        print(f"\n{pair}: {steps.place}; tokens a round {_shown(acceptance)}")
        own: list[float] = []
        lines: dict[str, list[float | None]] = {}
        for block in sorted({block for block, _ in rows}):
            name = "plain" if block == 1 else f"block {block}"
            measured: list[float | None] = []
            predicted: list[float | None] = []
            for load in loads:
                row = rows.get((block, load))
                measured.append(None if row is None else row["tokens"] / row["seconds"])
                predicted.append(None if row is None else predict(steps, acceptance, load, block))
                if row is not None:
                    own.append((predicted[-1] or 0) / (measured[-1] or 1) - 1)
                    print(
                        f"{name:<9}{load:>3} requests: predicted {predicted[-1]:7.1f}, measured {measured[-1]:7.1f}, "
                        f"{own[-1]:+.0%}"
                    )
            lines[f"{name}, measured"], lines[f"{name}, predicted"] = measured, predicted
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
                title="Tokens per second: predicted from measured passes (lines), and measured (points)",
                x="requests at a time",
            )
            file.write(chart.encode())


def _read(steps: dict[str, Any]) -> Steps:
    import tempfile

    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(steps, file)
        file.flush()
        return read_steps(Path(file.name))


def _acceptance(rows: Sequence[dict[str, Any]]) -> Acceptance:
    drafts = sum(row["drafts"] for row in rows)
    places = [sum(each) / drafts for each in zip(*(row["accepted"] for row in rows), strict=True)]
    return Acceptance(
        {block: 1 + sum(places[: block - 1]) for block in range(2, len(places) + 2)}, "measured"
    )


def _shown(acceptance: Acceptance) -> str:
    return ", ".join(f"{block}: {length:.2f}" for block, length in acceptance.lengths.items())


def _errors(errors: Sequence[float]) -> str:
    sizes = [abs(error) for error in errors]
    near = sum(size <= 0.1 for size in sizes)
    worst = max(errors, key=abs)
    return f"{len(errors)} points: median error {median(sizes):.1%}, {near} within 10%, largest {worst:+.0%}"


if __name__ == "__main__":
    main()

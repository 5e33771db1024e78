"""How right a drafter is about itself: its probabilities beside what became of its drafts.

    python -m build_scripts.bench.calibration BUNDLE [--prompts 4] [--max-tokens 96] [--temperature 0]

Whole blocks are drafted on the shipped natural prompts. A draft counts where those before it in its block were right.
The last line is one JSON document. Its log losses are of these events: the first j drafts of a block are all right.
They are given for the drafter's word and for the calibration of draft trees, which follows the rounds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from dflash_trt.decoding.draft import Draft
from dflash_trt.decoding.length.node_odds import NodeOdds
from dflash_trt.decoding.length.policy import FixedLength, RoundDone
from dflash_trt.decoding.params import SamplingParams
from dflash_trt.hardware import processor
from dflash_trt.prompts import SHIPPED_PROMPTS, read_prompts
from dflash_trt.runtime import Runtime

Array = np.ndarray[Any, Any]
EDGES = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
LEAST = 1e-6  # a probability counts as at least this in a log loss


class Record(FixedLength):
    """Whole blocks, and what became of them: (log-probabilities, accepted, offered) of each."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.blocks: list[tuple[Array, int, int]] = []

    def verify(self, draft: Draft, slots: Sequence[int]) -> int:
        self.said = np.array(draft.logprobs)
        return draft.nodes

    def observe(self, done: RoundDone) -> None:
        if done.drafted > 1:
            said = self.said[list(done.judged)]
            self.blocks += zip(said, done.accepted, done.offered, strict=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=int, default=4, help="of each category")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    runtime = Runtime(
        args.bundle, max_batch_size=8, prefill_chunk=512, prefix_cache_bytes=0, threads=None, check="size"
    )
    record = Record(runtime.block_size)
    for file in sorted((SHIPPED_PROMPTS / "natural").glob("*.jsonl")):
        for seed, prompt in enumerate(read_prompts(file, args.prompts)):
            params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=seed)
            ids = prompt.content if isinstance(prompt.content, str) else runtime.chat_prompt(prompt.content)
            runtime.scheduler.submit(runtime.request(ids, params, draft=True))
    while not runtime.scheduler.idle:
        runtime.scheduler.step(record)
    found = figures(record.blocks)
    print(f"{len(record.blocks)} blocks\n\n| said | drafts | mean | right |\n|---|---|---|---|")
    for row in found["bins"]:
        print("| {said} | {drafts} | {mean:.2f} | {right:.2f} |".format(**row))
    print("\n| place | drafts | mean | right |\n|---|---|---|---|")
    for row in found["places"]:
        print("| {place} | {drafts} | {mean:.2f} | {right:.2f} |".format(**row))
    print(
        "\nlog loss: the drafter's word {word:.3f}, calibrated {calibrated:.3f}".format(**found["log_loss"])
    )
    print(
        json.dumps(
            {"bundle": args.bundle.name, "processor": processor(), "blocks": len(record.blocks), **found}
        )
    )


def figures(blocks: Sequence[tuple[Array, int, int]]) -> dict[str, Any]:
    """Tables by what was said and by place (from 1), and the log losses."""
    place, said, right = (
        np.array(values)
        for values in zip(
            *(
                (i + 1, np.exp(row[i]), i < accepted)
                for row, accepted, offered in blocks
                for i in range(min(accepted + 1, offered, len(row)))
            ),
            strict=True,
        )
    )
    inside = [
        (low, high, (said >= low) & ((said < high) | (high == EDGES[-1]))) for low, high in pairwise(EDGES)
    ]
    return {
        "bins": [{"said": f"{a:g} to {b:g}", **share(said, right, at)} for a, b, at in inside if at.any()],
        "places": [{"place": int(p), **share(said, right, place == p)} for p in np.unique(place)],
        "log_loss": log_losses(blocks),
    }


def share(said: Array, right: Array, at: Array) -> dict[str, float]:
    return {"drafts": int(at.sum()), "mean": float(said[at].mean()), "right": float(right[at].mean())}


def log_losses(blocks: Sequence[tuple[Array, int, int]]) -> dict[str, float]:
    """Mean over blocks and places. The calibration has seen the blocks before each, none after."""
    calibration = NodeOdds(len(blocks[0][0]))
    losses: dict[str, list[float]] = {"word": [], "calibrated": []}
    for row, accepted, offered in blocks:
        chances = {"word": np.exp(row), "calibrated": calibration(row[:, None])[0][:, 0]}
        for name, survival in ((name, np.cumprod(chance)) for name, chance in chances.items()):
            p = np.clip(survival[:offered], LEAST, 1 - LEAST)
            events = np.arange(len(p)) < accepted
            losses[name] += (-np.log(np.where(events, p, 1 - p))).tolist()
        calibration.observe(row[:, None], ([0] * accepted + [1])[:offered])
    return {name: float(np.mean(values)) for name, values in losses.items()}


if __name__ == "__main__":
    main()

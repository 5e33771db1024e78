"""Chains against draft trees, on the shipped natural prompts: tokens per pass and per second, with the same tokens.

    python -m build_scripts.bench.trees BUNDLE [--temperature T] [--seconds S]
    python -m build_scripts.bench.trees BUNDLE --noise [--temperature T] [--seconds S]

BUNDLE is built with --tree-width; 64 for --noise. Every method gets each prompt in turn. --noise takes the rounds of
one decoder. It counts the drafts that would have been accepted if the noise of the target's choice had ordered the
candidates, by its weight.
"""

from __future__ import annotations

import argparse
from time import perf_counter
from typing import Any

import numpy as np

from dflash_trt import LLM, SamplingParams
from dflash_trt.decoding.draft import Draft
from dflash_trt.decoding.sampling.philox import gumbel
from dflash_trt.decoding.statistics import Statistics
from dflash_trt.prompts import SHIPPED_PROMPTS, read_prompts

METHODS: dict[str, dict[str, Any]] = {
    "plain": {"speculate": False},
    "chain of 4": {"block_length": 4},
    "chain, adaptive": {"tree_nodes": 0},
    "tree, adaptive": {},
    **{f"tree of {nodes}": {"tree_nodes": nodes} for nodes in (8, 16, 32)},
}


def prompts(llm: LLM) -> list[list[int]]:
    """The categories in turn."""
    files = sorted((SHIPPED_PROMPTS / "natural").glob("*.jsonl"))
    ranked = zip(*(read_prompts(file, 4) for file in files), strict=True)
    return [
        llm.tokenizer.encode(each.content) if isinstance(each.content, str) else llm.chat_prompt(each.content)
        for rank in ranked
        for each in rank
    ]


def compare(llm: LLM, temperature: float, seconds: float) -> None:
    found: dict[str, list[Statistics]] = {name: [] for name in METHODS}
    asked, same = prompts(llm), True
    for options in METHODS.values():
        llm.generate(asked[0], SamplingParams(max_tokens=4), **options)
    begin = perf_counter()
    for seed, ids in enumerate(asked):
        if perf_counter() - begin > seconds:
            break
        params = SamplingParams(max_tokens=64, temperature=temperature, seed=seed)
        made = {name: llm.generate(ids, params, **options) for name, options in METHODS.items()}
        same &= len({tuple(each.token_ids) for each in made.values()}) == 1
        for name, each in made.items():
            found[name].append(each.statistics)
    print(f"{len(found['plain'])} prompts, temperature {temperature}, same tokens: {same}")
    for name, parts in found.items():
        total = Statistics.merge(parts)
        speed = 1 / total.time_per_output_token
        print(
            f"{name:16} {speed:6.1f} tokens/s, {total.mean_acceptance_length:.2f} tokens per pass with drafts"
        )


def noise(llm: LLM, temperature: float, seconds: float) -> None:
    pair: Any = llm._runtime.pair
    drafter, seen = pair.drafter, list[tuple[int, np.ndarray, np.ndarray]]()
    propose = drafter.propose

    def watched(active: Any, length: int) -> Draft:
        draft: Draft = propose(active, length)
        if draft.candidates is not None:
            tokens, said = (np.array(x[0]) for x in (draft.candidates.tokens, draft.candidates.logprobs))
            seen.append((active[0].committed + 1, tokens, said))
        return draft

    drafter.propose = watched
    rounds = list[tuple[int, int, np.ndarray, np.ndarray, list[int]]]()
    begin = perf_counter()
    for seed, ids in enumerate(prompts(llm)):
        if perf_counter() - begin > seconds:
            break
        seen.clear()
        params = SamplingParams(max_tokens=64, temperature=temperature, seed=seed, ignore_eos=True)
        whole = [*ids, *llm.generate(ids, params, block_length=llm.block_size).token_ids]
        rounds += [
            (seed, first, tokens, said, whole[first:])
            for first, tokens, said in seen
            if len(whole) - first >= len(tokens)
        ]
    print(f"{len(rounds)} rounds, temperature {temperature}")
    for width in (8, 16, 64):
        for weight in (0.0, 0.25, 0.5, 0.75, 1.0):
            accepted = 0
            for seed, first, tokens, said, right in rounds:
                for place, row in enumerate(tokens[:, :width]):
                    score = said[place, :width] / temperature + weight * gumbel(seed, first + place, row)
                    if row[score.argmax()] != right[place]:
                        break
                    accepted += 1
            print(f"{width} candidates, weight {weight}: {1 + accepted / len(rounds):.3f} tokens per pass")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--noise", action="store_true")
    args = parser.parse_args()
    with LLM(args.bundle, max_batch_size=1) as llm:
        (noise if args.noise else compare)(llm, args.temperature, args.seconds)


if __name__ == "__main__":
    main()

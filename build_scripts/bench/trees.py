"""Chains against draft trees, on the shipped natural prompts: tokens per pass and per second, with the same tokens.

    python -m build_scripts.bench.trees BUNDLE [--chains BUNDLE] [--temperatures T,...] [--prompts N] [--work DIR]
                                        [--seconds S]
    python -m build_scripts.bench.trees BUNDLE --noise [--temperatures T] [--seconds S]

BUNDLE is built with --tree-width; 64 for --noise. --chains is a bundle of the same pair with --tree-width 1. Every
method gets each prompt in turn. A call ends after S seconds, and the next one with the same DIR goes on behind it.
--noise takes the rounds of one decoder. It counts the drafts that would have been accepted if the noise of the target's
choice had ordered the candidates, by its weight.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from dflash_trt import LLM, SamplingParams
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.cli.options import each as each_of
from dflash_trt.decoding.draft import Draft
from dflash_trt.decoding.sampling.philox import gumbel
from dflash_trt.decoding.statistics import Statistics
from dflash_trt.prompts import Prompt, natural_prompts
from dflash_trt.reports.comparison import Answers, Method, decode

METHODS: dict[str, dict[str, Any]] = {
    "plain": {"speculate": False},
    "chain of 4": {"block_length": 4},
    "chain, adaptive": {"tree_nodes": 0},
    "tree, adaptive": {},
    **{f"tree of {nodes}": {"tree_nodes": nodes} for nodes in (8, 16, 32)},
}


def asked(llm: LLM, prompts: list[Prompt]) -> list[str | list[int]]:
    return [p.content if isinstance(p.content, str) else llm.chat_prompt(p.content) for p in prompts]


def compare(llm: LLM, chains: LLM | None, args: argparse.Namespace) -> None:
    """The figures of all pieces so far. The ratios are of each prompt's time per token, with their standard error."""
    prompts = natural_prompts(None, args.prompts)
    llms, ways, base = dict.fromkeys(METHODS, llm), dict(METHODS), "chain, adaptive"
    if chains is not None:
        base = "no candidates"
        llms[base], ways[base] = chains, {}
    methods = [
        Method(name, temperature, options=options)
        for temperature in args.temperatures
        for name, options in ways.items()
    ]
    args.work.mkdir(parents=True, exist_ok=True)
    asked_for = [str(args.temperatures), str(args.max_tokens), *ways, *(prompt.id for prompt in prompts)]
    bundles = [Bundle.open(path) for path in (args.bundle, args.chains) if path is not None]
    answers = Answers(args.work, bundles, asked_for)
    done = decode(
        methods, llms, prompts, asked(llm, prompts), answers, max_tokens=args.max_tokens, seconds=args.seconds
    )
    for temperature in args.temperatures:
        found = {each.name: each for each in methods if each.temperature == temperature}
        same = all(each.tokens == found["plain"].tokens for each in found.values())
        print(f"temperature {temperature:g}: {done} prompts, same tokens: {same}")
        for name, each in found.items():
            total = Statistics.merge(s for _, s in each.found)
            rounds = max(1, sum(total.block_length_histogram))
            line = f"{name:16} {1 / total.time_per_output_token:6.1f} tokens/s, "
            line += f"{total.mean_acceptance_length:.2f} tokens per pass with drafts"
            if total.num_trees:
                line += (
                    f", trees in {total.num_trees / rounds:.0%} of rounds, {total.mean_tree_nodes:.1f} nodes"
                )
            print(f"{line}; {_ratio(each, found[base])} times {base}")


def _ratio(method: Method, base: Method) -> str:
    """The speed to that of another method, and its standard error over the prompts."""
    ours, theirs = (np.array([s.time_per_output_token for _, s in each.found]) for each in (method, base))
    ratio = np.log(theirs / ours)
    error = ratio.std(ddof=1) / np.sqrt(len(ratio)) if len(ratio) > 1 else float("nan")
    return f"{np.exp(ratio.mean()):.3f} +- {error:.3f}"


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
    for seed, ids in enumerate(asked(llm, natural_prompts(None, 0))):
        if perf_counter() - begin > seconds:
            break
        seen.clear()
        params = SamplingParams(max_tokens=64, temperature=temperature, seed=seed, ignore_eos=True)
        ids = llm.tokenizer.encode(ids) if isinstance(ids, str) else ids
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
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--chains", type=Path, metavar="BUNDLE")
    parser.add_argument("--temperatures", type=each_of(float), default=[0.0, 1.0])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--work", type=Path, default=Path("trees"))
    parser.add_argument("--noise", action="store_true")
    args = parser.parse_args()
    alone: dict[str, Any] = {"max_batch_size": 1, "prefix_cache_bytes": 0}
    with ExitStack() as opened:
        llm = opened.enter_context(LLM(args.bundle, **alone))
        if args.noise:
            noise(llm, max(args.temperatures), args.seconds)
        else:
            chains = opened.enter_context(LLM(args.chains, **alone)) if args.chains is not None else None
            compare(llm, chains, args)


if __name__ == "__main__":
    main()

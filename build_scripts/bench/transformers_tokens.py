"""Greedy tokens of a pair against Transformers' own, in float32.

    python -m build_scripts.bench.transformers_tokens --target smollm2-135m --prompts 50 --tokens 128

Our engine answers held-out prompts, several at a time, plain or with drafts (--drafts). Transformers then reads each
prompt with its answer in one pass: every token must be the one with the largest logit behind the tokens before it. A
greedy answer by Transformers is then the same, up to the rounding of its passes. Where a token differs, the gap of the
two logits is printed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from dflash_trt import LLM, SamplingParams
from dflash_trt.building.build import build
from dflash_trt.building.sources import resolve
from dflash_trt.prompts import natural_prompts


def differences(model: Any, prompt: list[int], answer: list[int]) -> list[tuple[int, float]]:
    """Places of the answer at which Transformers prefers another token, and by how much."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    gaps = (logits.amax(-1) - chosen).tolist()
    return [(place, gap) for place, gap in enumerate(gaps) if gap > 0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", help="default: the known one of the target")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=128, help="at most, of an answer")
    parser.add_argument("--drafts", action="store_true", help="decode with drafts")
    parser.add_argument("--batch", type=int, default=8, help="prompts at a time")
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    from transformers import AutoModelForCausalLM

    asked = natural_prompts(None, arguments.prompts)
    params = SamplingParams(max_tokens=arguments.tokens)
    with TemporaryDirectory(prefix="dflash-trt-") as work:
        bundle = build(arguments.target, arguments.drafter, Path(work) / "bundle", max_seq_len=2048)
        with LLM(
            bundle.path, threads=arguments.threads, max_batch_size=arguments.batch, prefix_cache_bytes=0
        ) as llm:
            prompts = [llm.chat_prompt(p.content) for p in asked if not isinstance(p.content, str)]
            done = llm.generate(prompts, params, speculate=arguments.drafts)
    answers = [each.token_ids for each in done]
    directory = resolve(arguments.target, "target").directory
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, trust_remote_code=False)
    model.eval()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    equal = 0
    for prompt, ids, answer in zip(asked, prompts, answers, strict=True):
        found = differences(model, ids, answer)
        equal += not found
        for place, gap in found:
            print(
                f"{prompt.id}: token {place} of {len(answer)}: {gap:.5f} below the largest logit", flush=True
            )
    print(f"{equal} of {len(answers)} answers as Transformers, {sum(map(len, answers))} tokens")


if __name__ == "__main__":
    main()

"""`make demo`: build the shipped pair, generate with and without drafting, show that tokens are the same."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from dflash_trt import LLM, Completion, SamplingParams
from dflash_trt.prompts import SHIPPED_PROMPTS, read_prompts

BUNDLE = Path("bundles/tiny")
CATEGORIES = ("math", "code", "chat")
MAX_TOKENS = 160
REPEATS = 3


def main() -> int:
    build = ["build", "--target", "tiny", "--out", str(BUNDLE), "--force"]
    print("$ dflash-trt", *build, flush=True)
    subprocess.run([Path(sys.executable).with_name("dflash-trt"), *build], check=True)

    rows = []
    with LLM(BUNDLE, max_batch_size=1, prefix_cache_bytes=0) as llm:
        for category in CATEGORIES:
            prompt = read_prompts(SHIPPED_PROMPTS / f"{category}.jsonl", limit=1)[0]
            assert not isinstance(prompt.content, str)  # the shipped prompts are chats
            plain, plain_seconds = timed(llm, prompt.content, speculate=False)
            drafted, drafted_seconds = timed(llm, prompt.content, speculate=True)
            rows.append((category, plain, plain_seconds, drafted, drafted_seconds))
            print(
                f"\n== {category}: {prompt.id}\n{prompt.content[-1]['content']}\n--\n{drafted.text}",
                flush=True,
            )

    line = "{:<10}{:>7}{:>15}{:>16}{:>10}{:>19}{:>13}"
    heads = ("", "tokens", "plain tok/s", "drafted tok/s", "speedup", "acceptance length", "same tokens")
    print("\n" + line.format(*heads))
    for category, plain, plain_seconds, drafted, drafted_seconds in rows:
        count = len(plain.token_ids)
        numbers = (
            f"{count / plain_seconds:.0f}",
            f"{count / drafted_seconds:.0f}",
            f"{plain_seconds / drafted_seconds:.2f}x",
        )
        length = f"{drafted.statistics.mean_acceptance_length:.2f}"
        print(line.format(category, count, *numbers, length, "yes" if same(plain, drafted) else "NO"))
    if all(same(plain, drafted) for _, plain, _, drafted, _ in rows):
        return 0
    print("tokens differ; `dflash-trt verify` shows where", file=sys.stderr)
    return 1


def timed(llm: LLM, messages: list[dict[str, str]], *, speculate: bool) -> tuple[Completion, float]:
    """The completion and its time in seconds, prefill included: the best of a few, after a warm-up."""
    params = SamplingParams(max_tokens=MAX_TOKENS)
    times = []
    for _ in range(1 + REPEATS):
        began = time.perf_counter()
        completion = llm.chat(messages, params, speculate=speculate)
        times.append(time.perf_counter() - began)
    return completion, min(times[1:])


def same(plain: Completion, drafted: Completion) -> bool:
    return plain.token_ids == drafted.token_ids


if __name__ == "__main__":
    sys.exit(main())

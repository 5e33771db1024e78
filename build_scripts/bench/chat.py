"""Time to first token in a chat of several turns, with and without reuse of the earlier turns' cache rows.

    python -m build_scripts.bench.chat BUNDLE [--turns 6] [--max-tokens 96] [--chats 3]

The questions are the shipped natural prompts of the category `chat`, one after the other in one conversation.
Answers are greedy. The same conversation runs with and without reuse, turn by turn. The last line is one JSON
document. Exit code 1 if tokens differ.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

from dflash_trt import LLM, SamplingParams
from dflash_trt.hardware import processor
from dflash_trt.prompts import SHIPPED_PROMPTS, read_prompts


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--turns", type=int, default=6, help="questions of one conversation")
    parser.add_argument("--chats", type=int, default=3, help="conversations")
    parser.add_argument("--max-tokens", type=int, default=96, help="of an answer")
    args = parser.parse_args()
    turns: list[list[tuple[Any, Any]]] = [[] for _ in range(args.turns)]
    with (
        LLM(args.bundle, max_batch_size=1, prefix_cache_bytes=1 << 30) as reusing,
        LLM(args.bundle, max_batch_size=1, prefix_cache_bytes=0) as reading,
    ):
        params = SamplingParams(max_tokens=args.max_tokens)
        for questions in conversations(args.chats, args.turns):
            messages: list[Any] = []
            for turn, question in enumerate(questions):
                messages.append({"role": "user", "content": question})
                again = reading.chat(messages, params)
                reading._runtime.scheduler.forget()  # rows of a slot are reused without the cache, too
                turns[turn].append((again, answer := reusing.chat(messages, params)))
                messages.append({"role": "assistant", "content": answer.text})
    rows = [row(turn, pairs) for turn, pairs in enumerate(turns, 1)]
    print(f"{processor()}; medians of {args.chats} chats, at most {args.max_tokens} tokens, greedy")
    print("| turn | prompt | reused | TTFT, ms, all read | reused |\n|---|---|---|---|---|")
    for each in rows:
        print(
            "| {turn} | {prompt_tokens} | {cached_tokens} | {ttft_ms_read:.0f} | {ttft_ms_reused:.0f} |".format(
                **each
            )
        )
    print(json.dumps({"bundle": args.bundle.name, "processor": processor(), "turns": rows}))
    return 0 if all(each["same_tokens"] for each in rows) else 1


def conversations(chats: int, turns: int) -> list[list[str]]:
    """The questions of each conversation."""
    prompts = read_prompts(SHIPPED_PROMPTS / "natural" / "chat.jsonl", 0)
    asked = [p.content[-1]["content"] for p in prompts if not isinstance(p.content, str)]
    if len(asked) < chats * turns:
        raise SystemExit(
            f"{chats} chats of {turns} turns need {chats * turns} questions; {len(asked)} are shipped"
        )
    return [asked[i * turns : (i + 1) * turns] for i in range(chats)]


def row(turn: int, pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    """Figures of one turn: (all tokens read, earlier turns reused) of each chat."""

    def first(which: int) -> float:
        seconds: float = median(pair[which].statistics.time_to_first_token for pair in pairs)
        return round(1e3 * seconds, 1)

    reused = [pair[1].statistics for pair in pairs]
    return {
        "turn": turn,
        "prompt_tokens": median(each.num_prompt_tokens for each in reused),
        "cached_tokens": median(each.num_cached_tokens for each in reused),
        "ttft_ms_read": first(0),
        "ttft_ms_reused": first(1),
        "same_tokens": all(one.token_ids == other.token_ids for one, other in pairs),
    }


if __name__ == "__main__":
    raise SystemExit(main())

"""A chat in the terminal: each line of standard input is a message, and its answer is printed as it is generated.

python examples/chat.py smollm2-135m
"""

from __future__ import annotations

import argparse
import sys

from dflash_trt import LLM, DFlashError, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", help="a directory made by `dflash-trt build`, or the name of a pair")
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args()
    messages: list[dict[str, str]] = []
    with LLM(args.bundle) as llm:
        for line in sys.stdin:
            messages.append({"role": "user", "content": line.strip()})
            answer = ""
            # The next turn begins with this one, so its rows are reused.
            for chunk in llm.stream_chat(messages, SamplingParams(max_tokens=args.max_tokens)):
                print(chunk.text, end="", flush=True)
                answer += chunk.text
            print()
            messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    try:
        main()
    except DFlashError as error:  # such as a bundle that is not there, or a package that is not installed
        raise SystemExit(f"error: {error}") from None

"""Complete prompts with and without drafts, and show that the tokens are the same.

python examples/generate.py smollm2-135m "The capital of Japan is" "def fibonacci(n):"
"""

from __future__ import annotations

import argparse

from dflash_trt import LLM, DFlashError, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", help="a directory made by `dflash-trt build`, or the name of a pair")
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=1)
    with LLM(args.bundle) as llm:
        drafted = llm.generate(args.prompts, params)
        plain = llm.generate(args.prompts, params, speculate=False)
    for prompt, one, other in zip(args.prompts, drafted, plain, strict=True):
        print(f"--- {prompt}\n{one.text}")
        same = "the same" if one.token_ids == other.token_ids else "other"
        length = one.statistics.tokens_per_pass
        print(f"[{one.finish_reason}; {length:.2f} tokens per pass; {same} tokens without drafts]")


if __name__ == "__main__":
    try:
        main()
    except DFlashError as error:  # such as a bundle that is not there, or a package that is not installed
        raise SystemExit(f"error: {error}") from None

"""Many requests at once in one process. Each has a stream and a deadline; the metrics are printed at the end.

python examples/many_requests.py smollm2-135m "The capital of Japan is" "def fibonacci(n):" "The sea is"
"""

from __future__ import annotations

import argparse
import asyncio

from dflash_trt import AsyncLLM, DFlashError, SamplingParams


async def complete(llm: AsyncLLM, prompt: str, max_tokens: int, timeout: float) -> None:
    text, reason = "", None
    async for chunk in llm.stream(prompt, SamplingParams(max_tokens=max_tokens), timeout=timeout):
        text += chunk.text
        reason = chunk.finish_reason
    print(f"--- {prompt}\n{text}\n[{reason}]", flush=True)


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", help="a directory made by `dflash-trt build`, or the name of a pair")
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for each request")
    args = parser.parse_args()
    async with AsyncLLM(args.bundle, max_batch_size=8) as llm:
        await asyncio.gather(*(complete(llm, p, args.max_tokens, args.timeout) for p in args.prompts))
        print(llm.metrics.prometheus())


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except DFlashError as error:  # such as a bundle that is not there, or a package that is not installed
        raise SystemExit(f"error: {error}") from None

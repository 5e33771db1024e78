"""Jobs of many kinds at once for AsyncLLM, which begin and leave at any time: each has the tokens of its request alone.

    python -m tests.api.jobs 2000 [--engine onnxruntime|torch|gpu] [--slots 1,4,16]

`torch` runs on this CPU, with rounds that start ahead as on a GPU; `gpu` is the double whose work is deferred. The last
line has the ends of the jobs, how many differ, and the rounds. Exit code 1 if one differs.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import dflash_trt
from dflash_trt import LLM, AsyncLLM, SamplingParams, StructuredOutputs
from dflash_trt.building.build import build
from dflash_trt.cli.options import at_least, list_of
from dflash_trt.formats.precision import Precision

TINY = Path(dflash_trt.__file__).parent / "shipped" / "tiny"
TEXTS = (
    "Tom has 12 apples and",
    "def add(a, b):",
    "The capital of",
    "1 2 3 4 1 2 3 4 1 2 3 4",
    "Say",
    "A list: ",
)
GREEDY: Sequence[dict[str, Any]] = ({}, {"logprobs": True, "top_logprobs": 3}, {"stop": ["."]})
OTHERS: Sequence[dict[str, Any]] = (
    {"temperature": 0.8},
    {"temperature": 1.1, "top_k": 9, "top_p": 0.9, "logprobs": True},
    {"temperature": 0.7, "top_p": 0.8, "presence_penalty": 1.5},
    {"repetition_penalty": 1.3},
    {"logit_bias": {7: 2.0}, "min_tokens": 4},
    {"structured_outputs": StructuredOutputs(regex="[a-z ]{5,30}")},
    {
        "structured_outputs": StructuredOutputs(
            json={"type": "object", "properties": {"n": {"type": "integer"}}}
        )
    },
)
Known = list[tuple[str, SamplingParams, list[int]]]


def known_answers(bundle: Path, seed: int) -> list[Known]:
    """Requests that the device decides alone, and of all kinds, with their tokens, one at a time and without drafts."""
    rng, found = random.Random(seed), list[Known]()
    with LLM(bundle, max_batch_size=1, prefix_cache_bytes=0, threads=1) as llm:
        for kinds in (GREEDY, (*GREEDY, *OTHERS)):
            asked = [
                (
                    rng.choice(TEXTS) * rng.randint(1, 2),
                    SamplingParams(max_tokens=rng.randint(1, 24), seed=i, **kind),
                )
                for i, kind in enumerate([*kinds] * (12 // len(kinds) + 1))
            ]
            found.append([(*each, llm.generate(*each, speculate=False).token_ids) for each in asked])
    return found


async def run(llm: AsyncLLM, known: list[Known], jobs: int, clients: int, seed: int) -> Counter[str]:
    """How so many jobs end that these clients send, in turns of kinds. Those that differ end as `differs`."""
    rng, ends, numbers = random.Random(seed), Counter[str](), iter(range(jobs))

    async def client() -> None:
        for number in numbers:
            text, params, whole = rng.choice(known[number // 60 % 2])
            options = rng.choice(
                [{"speculate": False}, {"draft_source": "drafter"}, {"draft_source": "drafter"}, {}]
            )
            leave, timeout = rng.choice([99, 99, 99, 0, 1, 2, 5]), rng.choice([None] * 9 + [0.001, 0.05, 0.3])
            got, reason = list[int](), None
            async with aclosing(llm.stream(text, params, timeout=timeout, **options)) as chunks:
                async for chunk in chunks:
                    got, reason, leave = got + chunk.token_ids, chunk.finish_reason, leave - 1
                    if leave < 0 and reason is None:
                        break
            ended = reason in ("stop", "length")
            ends[str(reason) if got == (whole if ended else whole[: len(got)]) else "differs"] += 1

    await asyncio.gather(*(client() for _ in range(clients)))
    return ends


@contextmanager
def ahead(llm: AsyncLLM) -> Iterator[Counter[str]]:
    """Let rounds start ahead where arrays have been made for it, and count them."""
    counts, pair = Counter[str](), llm.runtime.pair
    if hasattr(pair.arrays, "prepare"):
        pair.arrays.asynchronous = True
    start, follow = pair.start, pair.follow
    pair.start = lambda *given: counts.update(["waited"]) or start(*given)
    pair.follow = lambda *given: counts.update(["ahead"]) or follow(*given)
    yield counts


def main() -> int:
    """Run the jobs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("jobs", type=at_least(1))
    parser.add_argument("--engine", choices=("onnxruntime", "torch", "gpu"), default="onnxruntime")
    parser.add_argument("--slots", type=list_of(at_least(1)), default=[1, 4, 16])
    args = parser.parse_args()
    place: Any = nullcontext()
    if args.engine == "gpu":
        from dflash_trt.engines.torch import opening
        from tests.doubles.cuda_double import deferred
        from tests.doubles.one_gpu import one_gpu

        serve, place = AsyncLLM._serve, one_gpu(on_host=False)
        opening.warm_up = lambda *_, **__: 0

        def serving(llm: AsyncLLM) -> None:
            with deferred():  # in the engine's thread, too
                serve(llm)

        AsyncLLM._serve = serving  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder, place:
        engine = "onnxruntime" if args.engine == "onnxruntime" else "torch"
        pair = str(TINY / "target"), str(TINY / "drafter")
        precision = Precision(target="fp32", drafter="fp32")
        made = build(*pair, Path(folder) / "bundle", engine=engine, precision=precision, max_seq_len=200)
        bundle = made.path
        known, ends, rounds = known_answers(bundle, 0), Counter[str](), Counter[str]()

        async def serve_all(slots: int) -> None:
            async with AsyncLLM(bundle, max_batch_size=slots, threads=1) as llm:
                with ahead(llm) as counts:
                    ends.update(await run(llm, known, args.jobs // len(args.slots), slots + 2, slots))
                rounds.update(counts)

        for slots in args.slots:
            asyncio.run(serve_all(slots))
            print(slots, dict(ends), dict(rounds), flush=True)
    return int(ends["differs"] > 0)


if __name__ == "__main__":
    sys.exit(main())

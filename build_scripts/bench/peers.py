"""The decoders that `build_scripts.bench.natural` compares, each in a process of its own.

    python -m build_scripts.bench.peers NAME MODELS CAPACITY THREADS

reads tasks (JSON, one a line) from its input and writes one answer for each. A name is KIND:WEIGHTS:

    plain, draft, adaptive   this package, on the bundle MODELS/bundles/WEIGHTS. draft-N drafts blocks of N
    llama.cpp                MODELS/gguf/WEIGHTS.gguf

Every decoder takes the same token ids, and gives token ids.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

from dflash_trt.checkpoint.gguf import packaged_target

KINDS = ("plain", "draft", "adaptive", "llama.cpp")
PEER = "llama.cpp"
GGUF = {"BF16": 32, "F32": 0, "Q8_0": 7, "Q4_0": 2}  # llama_ftype in llama.h
_PASS = 512  # prompt tokens in a pass, the default of llama.cpp and of this package


@dataclass
class Task:
    """A prompt to complete. `stop`: token ids that end a text."""

    prompt: list[int]
    max_tokens: int
    temperature: float
    stop: list[int]
    seed: int = 1


@dataclass
class Answer:
    """Tokens, and seconds from the start to the first token and to the last.

    `rounds` are verification passes with drafts, `accepted` the drafts that were right in them.
    """

    tokens: list[int]
    first: float
    seconds: float
    rounds: int = 0
    accepted: int = 0


class Ours:
    """This package, from Python."""

    def __init__(self, kind: str, bundle: Path, threads: int) -> None:
        from dflash_trt import LLM

        self._llm = LLM(bundle, max_batch_size=1, prefix_cache_bytes=0, threads=threads)
        self._options: dict[str, Any] = {"speculate": kind != "plain"}
        if kind.startswith("draft"):
            self._options["block_length"] = int(kind.partition("-")[2] or self._llm.block_size)

    def run(self, task: Task) -> Answer:
        from dflash_trt import SamplingParams

        params = SamplingParams(
            max_tokens=task.max_tokens,
            temperature=task.temperature,
            seed=task.seed,
            stop_token_ids=task.stop,
        )
        began = perf_counter()
        done = self._llm.generate(task.prompt, params, **self._options)
        seconds, counts = perf_counter() - began, done.statistics
        return Answer(
            done.token_ids, counts.time_to_first_token, seconds, counts.num_drafts, counts.num_accepted_tokens
        )


class LlamaCpp:
    """llama.cpp by its C interface, so that no Python stands between two passes but this loop."""

    def __init__(self, file: Path, capacity: int, threads: int) -> None:
        import llama_cpp

        self._lib = llama_cpp
        self._log = llama_cpp.llama_log_callback(_silent)  # C keeps only its address
        llama_cpp.llama_log_set(self._log, None)
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), params)
        if not self._model:
            raise RuntimeError(f"{file}: llama.cpp does not load it")
        context = llama_cpp.llama_context_default_params()
        context.n_ctx, context.n_batch = capacity, _PASS
        context.n_threads = context.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, context)
        self._batch = llama_cpp.llama_batch_init(_PASS, 0, 1)

    def _pass(self, tokens: list[int], start: int, *, last: bool) -> None:
        """One pass over tokens from position `start`. `last`: the logits of the last token are wanted."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, start + i, last and i + 1 == len(tokens)
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        if status := self._lib.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode: {status}")

    def _sampler(self, task: Task) -> Any:
        lib = self._lib
        chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        if task.temperature:
            lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_temp(task.temperature))
            lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_dist(task.seed))
        else:
            lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_greedy())
        return chain

    def run(self, task: Task) -> Answer:
        lib, context, prompt = self._lib, self._context, task.prompt
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        sampler = self._sampler(task)
        began = perf_counter()
        for start in range(0, len(prompt), _PASS):
            self._pass(prompt[start : start + _PASS], start, last=start + _PASS >= len(prompt))
        tokens = [lib.llama_sampler_sample(sampler, context, -1)]
        first = perf_counter() - began
        while len(tokens) < task.max_tokens and tokens[-1] not in task.stop:
            self._pass(tokens[-1:], len(prompt) + len(tokens) - 1, last=True)
            tokens.append(lib.llama_sampler_sample(sampler, context, -1))
        seconds = perf_counter() - began
        lib.llama_sampler_free(sampler)
        return Answer(tokens, first, seconds)


def _silent(level: int, text: bytes, data: object) -> None:
    pass


def make_gguf(target: str, out: Path) -> None:
    """The GGUF files of a packaged target, by llama.cpp's own quantization. Files that are there are kept.

    BF16 comes first, which are the weights that `build` converts, and the other types come from it.
    """
    import llama_cpp

    out.mkdir(parents=True, exist_ok=True)
    for name, number in GGUF.items():
        made = out / f"{name}.gguf"
        if made.exists():
            continue
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.allow_requantize = number, True
        source = packaged_target(target) if name == "BF16" else out / "BF16.gguf"
        work = made.with_suffix(".part")
        if llama_cpp.llama_model_quantize(str(source).encode(), str(work).encode(), ctypes.byref(params)):
            raise SystemExit(f"{source}: llama.cpp could not make {name} of it")
        work.rename(made)


def kind_of(name: str) -> str:
    """The kind of a decoder. Exits where the name is of none."""
    kind, _, weights = name.partition(":")
    kind = "draft" if kind.startswith("draft-") else kind
    if kind not in KINDS or not weights:
        raise SystemExit(f"{name!r} is no KIND:WEIGHTS; kinds: {', '.join(KINDS)}")
    return kind


def installed(name: str) -> bool:
    return kind_of(name) != PEER or find_spec("llama_cpp") is not None


def load(name: str, models: Path, capacity: int, threads: int) -> Ours | LlamaCpp:
    """`capacity`: most tokens of a prompt and its answer."""
    kind, _, weights = name.partition(":")
    if kind == PEER:
        return LlamaCpp(models / "gguf" / f"{weights}.gguf", capacity, threads)
    return Ours(kind, models / "bundles" / weights, threads)


def _peak_megabytes() -> float:
    """The most memory that this process had. 0 where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1000 for line in lines if line.startswith("VmHWM")), 0.0)


@contextmanager
def _answers() -> Iterator[Any]:
    """The stream of answers. Prints of libraries go to standard error."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        yield out


def main() -> None:
    name, models, capacity, threads = sys.argv[1:]
    with _answers() as out:
        decoder = load(name, Path(models), int(capacity), int(threads))
        print(json.dumps({"ready": name}), file=out, flush=True)
        for line in sys.stdin:
            answer = decoder.run(Task(**json.loads(line)))
            print(json.dumps({**asdict(answer), "peak_mb": _peak_megabytes()}), file=out, flush=True)


if __name__ == "__main__":
    main()

"""The decoders that `build_scripts.bench.natural` compares, each in a process of its own.

    python -m build_scripts.bench.peers NAME MODELS BATCH CAPACITY THREADS

reads tasks (JSON, one a line) from its input and writes one answer for each. A name is KIND:WEIGHTS:

    plain, draft, adaptive   this package, on the bundle MODELS/bundles/WEIGHTS. draft-N drafts blocks of N
    llama.cpp                llama-cpp-python, on MODELS/gguf/WEIGHTS.gguf

Every decoder takes the same token ids, and gives token ids.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

from dflash_trt.checkpoint.gguf import packaged_target

# The package that each kind needs.
OURS = ("plain", "draft", "adaptive")
PACKAGES = {**dict.fromkeys(OURS, "onnxruntime"), "llama.cpp": "llama_cpp"}
GGUF = {"BF16": 32, "F32": 0, "Q8_0": 7, "Q4_0": 2}  # llama_ftype in llama.h
_PASS = 512  # prompt tokens in a pass, the default of llama.cpp and of this package


@dataclass
class Task:
    """Prompts to complete at the same time. `stop`: token ids that end a text."""

    prompts: list[list[int]]
    max_tokens: int
    temperature: float
    stop: list[int]
    seed: int = 1


@dataclass
class Outcome:
    """Tokens of each prompt, and seconds from the start to the first token and to the last.

    `rounds` are verification passes with drafts, `accepted` the drafts that were right in them.
    """

    tokens: list[list[int]]
    first: float = 0.0
    seconds: float = 0.0
    rounds: int = 0
    accepted: int = 0


class Ours:
    """This package, from Python."""

    def __init__(self, kind: str, bundle: Path, batch: int, threads: int) -> None:
        from dflash_trt import LLM

        self._llm = LLM(bundle, max_batch_size=batch, prefix_cache_bytes=0, threads=threads)
        self._options: dict[str, Any] = {"speculate": kind != "plain"}
        if kind.startswith("draft"):
            self._options["block_length"] = int(kind.partition("-")[2] or self._llm.block_size)

    def run(self, task: Task) -> Outcome:
        """All prompts in one call."""
        from dflash_trt import SamplingParams
        from dflash_trt.decoding.statistics import Statistics

        params = SamplingParams(
            max_tokens=task.max_tokens,
            temperature=task.temperature,
            seed=task.seed,
            stop_token_ids=task.stop,
        )
        began = perf_counter()
        done = self._llm.generate(task.prompts, params, **self._options)
        seconds, counts = perf_counter() - began, Statistics.merge(each.statistics for each in done)
        tokens = [each.token_ids for each in done]
        first = done[0].statistics.time_to_first_token
        return Outcome(tokens, first, seconds, counts.num_drafts, counts.num_accepted_tokens)


class LlamaCpp:
    """llama.cpp by its C interface, so that no Python stands between two passes but this loop."""

    def __init__(self, file: Path, batch: int, capacity: int, threads: int) -> None:
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
        context.n_ctx, context.n_seq_max, context.n_batch = capacity * batch, batch, _PASS
        context.n_threads = context.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, context)
        self._batch = llama_cpp.llama_batch_init(_PASS, 0, 1)

    def _pass(self, rows: Sequence[tuple[int, int, int, bool]]) -> None:
        """One pass over rows: token, position, sequence, and whether logits are wanted."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if status := self._lib.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode: {status}")

    def _read(self, prompt: list[int], sequence: int) -> None:
        for start in range(0, len(prompt), _PASS):
            piece = enumerate(prompt[start : start + _PASS], start)
            self._pass([(token, i, sequence, i + 1 == len(prompt)) for i, token in piece])

    def _sampler(self, task: Task, number: int) -> Any:
        lib = self._lib
        chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        if task.temperature:
            lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_temp(task.temperature))
            lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_dist(task.seed + number))
        else:
            lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_greedy())
        return chain

    def run(self, task: Task) -> Outcome:
        """Each prompt alone, and then passes with a token of each."""
        lib, context, prompts = self._lib, self._context, task.prompts
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        samplers = [self._sampler(task, i) for i in range(len(prompts))]
        tokens: list[list[int]] = []
        first, began = 0.0, perf_counter()
        for sequence, prompt in enumerate(prompts):
            self._read(prompt, sequence)
            tokens.append([lib.llama_sampler_sample(samplers[sequence], context, -1)])
            first = first or perf_counter() - began
        while active := [
            i for i, out in enumerate(tokens) if len(out) < task.max_tokens and out[-1] not in task.stop
        ]:
            self._pass([(tokens[i][-1], len(prompts[i]) + len(tokens[i]) - 1, i, True) for i in active])
            for row, i in enumerate(active):
                tokens[i].append(lib.llama_sampler_sample(samplers[i], context, row))
        seconds = perf_counter() - began
        for sampler in samplers:
            lib.llama_sampler_free(sampler)
        return Outcome(tokens, first, seconds)


def _silent(level: int, text: bytes, data: object) -> None:
    pass


def make_gguf(target: str, file: Path) -> None:
    """A GGUF file of a packaged target, by llama.cpp's own quantization. A file that is there is kept.

    BF16 has the weights that `build` converts, and the other types come from it.
    """
    import llama_cpp

    if file.exists():
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    source = packaged_target(target)
    if file.stem != "BF16":
        make_gguf(target, source := file.with_stem("BF16"))
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = GGUF[file.stem], True
    work = file.with_suffix(".part")
    if llama_cpp.llama_model_quantize(str(source).encode(), str(work).encode(), ctypes.byref(params)):
        raise SystemExit(f"{source}: llama.cpp could not make {file.stem} of it")
    work.rename(file)


def kind_of(name: str) -> str:
    """The kind of a decoder. Exits where the name is of none."""
    kind, _, weights = name.partition(":")
    kind = "draft" if kind.startswith("draft-") else kind
    if kind not in PACKAGES or not weights:
        raise SystemExit(f"{name!r} is no KIND:WEIGHTS; kinds: {', '.join(PACKAGES)}")
    return kind


def installed(name: str) -> bool:
    """Whether the package of a decoder is there."""
    return find_spec(PACKAGES[kind_of(name)]) is not None


def load(name: str, models: Path, batch: int, capacity: int, threads: int) -> Ours | LlamaCpp:
    """The decoder. `capacity`: most tokens of a prompt and its answer."""
    kind, _, weights = name.partition(":")
    if kind == "llama.cpp":
        return LlamaCpp(models / "gguf" / f"{weights}.gguf", batch, capacity, threads)
    return Ours(kind, models / "bundles" / weights, batch, threads)


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
    """Answer the tasks of the input."""
    name, models, *numbers = sys.argv[1:]
    with _answers() as out:
        decoder = load(name, Path(models), *map(int, numbers))
        print(json.dumps({"ready": name}), file=out, flush=True)
        for line in sys.stdin:
            task = Task(**json.loads(line))
            outcome = asdict(decoder.run(task)) | {"peak_mb": _peak_megabytes()}
            print(json.dumps(outcome), file=out, flush=True)


if __name__ == "__main__":
    main()

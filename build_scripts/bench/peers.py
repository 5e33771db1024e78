"""The decoders that `build_scripts.bench.natural` compares, each in a process of its own.

    python -m build_scripts.bench.peers NAME MODELS BATCH CAPACITY THREADS

reads tasks (JSON, one a line) from its input and writes one answer for each. A name is KIND:WEIGHTS:

    plain, draft, adaptive   this package, on the bundle MODELS/bundles/WEIGHTS. draft-N drafts blocks of N
    llama.cpp                MODELS/gguf/WEIGHTS.gguf
    genai                    onnxruntime-genai, MODELS/genai/WEIGHTS
    transformers, z-lab      MODELS/target; z-lab's own loop also takes MODELS/drafter. WEIGHTS is a torch dtype

Every decoder takes the same token ids, and gives token ids.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

PACKAGES = {
    "plain": "onnxruntime",
    "draft": "onnxruntime",
    "adaptive": "onnxruntime",
    "llama.cpp": "llama_cpp",
    "genai": "onnxruntime_genai",
    "transformers": "transformers",
    "z-lab": "dflash",
}
_PASS = 512  # prompt tokens in a pass, the default of llama.cpp and of this package


@dataclass
class Task:
    """Prompts to complete at the same time. `stop`: token ids that end a text."""

    prompts: list[list[int]]
    max_tokens: int
    temperature: float
    seed: int
    stop: list[int]


@dataclass
class Answer:
    """Tokens of each prompt, and seconds from the start to the first token and to the last.

    `rounds` are verification passes with drafts, `accepted` the drafts that were right in them.
    """

    tokens: list[list[int]]
    first: float
    seconds: float
    rounds: int = 0
    accepted: int = 0
    lengths: list[int] = field(default_factory=list)  # verified tokens of a round -> rounds


class Decoder(Protocol):
    def run(self, task: Task) -> Answer: ...


class Ours:
    """This package, from Python."""

    def __init__(self, kind: str, bundle: Path, batch: int, capacity: int, threads: int) -> None:
        from dflash_trt import LLM

        self._llm = LLM(bundle, max_batch_size=batch, prefix_cache_bytes=0, threads=threads)
        self._options: dict[str, Any] = {"speculate": kind != "plain"}
        if kind.startswith("draft"):
            self._options["block_length"] = int(kind.partition("-")[2] or self._llm.block_size)

    def run(self, task: Task) -> Answer:
        from dflash_trt import SamplingParams, Statistics

        params = SamplingParams(
            max_tokens=task.max_tokens,
            temperature=task.temperature,
            seed=task.seed,
            stop_token_ids=task.stop,
        )
        began = perf_counter()
        done = self._llm.generate(task.prompts, params, **self._options)
        seconds = perf_counter() - began
        total = Statistics.merge([each.statistics for each in done])
        if total.num_cached_tokens:
            raise RuntimeError(f"{total.num_cached_tokens} prompt tokens came from a cache")
        return Answer(
            [each.token_ids for each in done],
            total.time_to_first_token,
            seconds,
            total.num_drafts,
            total.num_accepted_tokens,
            total.block_length_histogram,
        )


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

    def _sampler(self, task: Task, number: int) -> Any:
        lib = self._lib
        chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        if task.temperature:
            lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_temp(task.temperature))
            lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_dist(task.seed + number))
        else:
            lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_greedy())
        return chain

    def run(self, task: Task) -> Answer:
        lib, context = self._lib, self._context
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        samplers = [self._sampler(task, i) for i in range(len(task.prompts))]
        tokens: list[list[int]] = [[] for _ in task.prompts]
        began = perf_counter()
        for sequence, prompt in enumerate(task.prompts):
            for start in range(0, len(prompt), _PASS):
                piece = prompt[start : start + _PASS]
                last = len(prompt) - 1
                self._pass([(t, start + i, sequence, start + i == last) for i, t in enumerate(piece)])
            tokens[sequence].append(lib.llama_sampler_sample(samplers[sequence], context, -1))
        first = perf_counter() - began
        while active := [
            i for i, out in enumerate(tokens) if len(out) < task.max_tokens and out[-1] not in task.stop
        ]:
            self._pass([(tokens[i][-1], len(task.prompts[i]) + len(tokens[i]) - 1, i, True) for i in active])
            for row, i in enumerate(active):
                tokens[i].append(lib.llama_sampler_sample(samplers[i], context, row))
        seconds = perf_counter() - began
        for sampler in samplers:
            lib.llama_sampler_free(sampler)
        return Answer(tokens, first, seconds)


def _silent(level: int, text: bytes, data: object) -> None:
    pass


class Genai:
    """onnxruntime-genai. Prompts of a batch are padded on the left."""

    def __init__(self, model: Path, batch: int, capacity: int, threads: int) -> None:
        import onnxruntime_genai

        self._lib = onnxruntime_genai
        config = onnxruntime_genai.Config(str(model))
        options = {"intra_op_num_threads": threads}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self._model = onnxruntime_genai.Model(config)
        self._pad: int = json.loads((model / "genai_config.json").read_text())["model"]["pad_token_id"]

    def run(self, task: Task) -> Answer:
        import numpy as np

        count, longest = len(task.prompts), max(map(len, task.prompts))
        prompts: Any = np.full((count, longest), self._pad, np.int32)
        for row, prompt in zip(prompts, task.prompts, strict=True):
            row[longest - len(prompt) :] = prompt
        params = self._lib.GeneratorParams(self._model)
        sampling = {"do_sample": True, "temperature": task.temperature, "top_k": 0, "top_p": 1.0}
        options: dict[str, Any] = {"max_length": longest + task.max_tokens, "batch_size": count}
        if task.temperature:
            options |= sampling | {"random_seed": task.seed}
        params.set_search_options(**options)
        tokens: list[list[int]] = [[] for _ in task.prompts]
        first = 0.0
        began = perf_counter()
        generator = self._lib.Generator(self._model, params)
        generator.append_tokens(prompts if count > 1 else prompts[0])
        while not generator.is_done():
            generator.generate_next_token()
            for out, token in zip(tokens, generator.get_next_tokens(), strict=True):
                if not out or out[-1] not in task.stop:
                    out.append(int(token))
            first = first or perf_counter() - began
        return Answer(tokens, first, perf_counter() - began)


class Transformers:
    """`generate` of Transformers. Prompts of a batch are padded on the left."""

    def __init__(self, target: Path, dtype: str, threads: int) -> None:
        self._torch, self._model = _load(target, dtype, threads)

    def run(self, task: Task) -> Answer:
        from transformers import StoppingCriteriaList

        torch, longest = self._torch, max(map(len, task.prompts))
        pad = task.stop[0]
        rows = [[pad] * (longest - len(prompt)) + prompt for prompt in task.prompts]
        seen = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in task.prompts]
        sampling: dict[str, Any] = {"do_sample": False}
        if task.temperature:
            torch.manual_seed(task.seed)
            sampling = {"do_sample": True, "temperature": task.temperature, "top_k": 0, "top_p": 1.0}
        firsts: list[float] = []

        def note(ids: Any, scores: Any, **_: Any) -> Any:
            firsts.append(perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool)

        began = perf_counter()
        with torch.inference_mode():
            out = self._model.generate(
                torch.tensor(rows),
                attention_mask=torch.tensor(seen),
                max_new_tokens=task.max_tokens,
                eos_token_id=task.stop,
                pad_token_id=pad,
                stopping_criteria=StoppingCriteriaList([note]),
                **sampling,
            )
        seconds = perf_counter() - began
        tokens = [_until(row, task.stop) for row in out[:, longest:].tolist()]
        return Answer(tokens, firsts[0] - began, seconds)


class ZLab:
    """z-lab's own loop (package dflash), which takes one prompt at a time."""

    def __init__(self, target: Path, drafter: Path, dtype: str, threads: int) -> None:
        self._torch, self._model = _load(target, dtype, threads)
        self._drafter: Any = import_module("dflash").DFlashDraftModel.from_pretrained(
            drafter, dtype=getattr(self._torch, dtype)
        )
        self._passes: list[float] = []
        self._model.register_forward_hook(lambda *_: self._passes.append(perf_counter()))

    def run(self, task: Task) -> Answer:
        (prompt,) = task.prompts
        self._torch.manual_seed(task.seed)
        self._passes.clear()
        began = perf_counter()
        out = self._drafter.spec_generate(
            self._model, self._torch.tensor([prompt]), task.max_tokens, task.stop, task.temperature
        )
        seconds = perf_counter() - began
        tokens = out[0, len(prompt) :].tolist()
        rounds = len(self._passes) - 1
        return Answer([tokens], self._passes[0] - began, seconds, rounds, len(tokens) - 1 - rounds)


def _load(target: Path, dtype: str, threads: int) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    return torch, AutoModelForCausalLM.from_pretrained(target, dtype=getattr(torch, dtype))


def _until(tokens: list[int], stop: list[int]) -> list[int]:
    """Tokens up to the first that ends a text, that one included."""
    ends = (i for i, token in enumerate(tokens) if token in stop)
    return tokens[: next(ends, len(tokens)) + 1]


def package_of(name: str) -> str:
    """The package that a decoder needs. Exits where the name is of none."""
    kind, _, weights = name.partition(":")
    package = PACKAGES.get("draft" if kind.startswith("draft-") else kind)
    if package is None or not weights:
        raise SystemExit(f"{name!r} is no KIND:WEIGHTS; kinds: {', '.join(PACKAGES)}")
    return package


def installed(name: str) -> bool:
    return find_spec(package_of(name)) is not None


def load(name: str, models: Path, batch: int, capacity: int, threads: int) -> Decoder:
    """`capacity`: most tokens of a prompt and its answer."""
    kind, _, weights = name.partition(":")
    if kind == "llama.cpp":
        return LlamaCpp(models / "gguf" / f"{weights}.gguf", batch, capacity, threads)
    if kind == "genai":
        return Genai(models / "genai" / weights, batch, capacity, threads)
    if kind == "transformers":
        return Transformers(models / "target", weights, threads)
    if kind == "z-lab":
        return ZLab(models / "target", models / "drafter", weights, threads)
    return Ours(kind, models / "bundles" / weights, batch, capacity, threads)


def _memory() -> dict[str, float]:
    """Megabytes of this process, now and at most. Empty where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return {}
    fields = {"VmRSS": "resident_mb", "VmHWM": "peak_mb"}
    pairs = (line.split() for line in lines)
    return {
        fields[words[0][:-1]]: int(words[1]) / 1000 for words in pairs if words and words[0][:-1] in fields
    }


@contextmanager
def _answers() -> Iterator[Any]:
    """The stream of answers. Prints of libraries go to standard error."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        yield out


def main() -> None:
    name, models, batch, capacity, threads = sys.argv[1:]
    with _answers() as out:
        decoder = load(name, Path(models), int(batch), int(capacity), int(threads))
        print(json.dumps({"ready": name}), file=out, flush=True)
        for line in sys.stdin:
            answer = decoder.run(Task(**json.loads(line)))
            print(json.dumps(asdict(answer) | _memory()), file=out, flush=True)


if __name__ == "__main__":
    main()

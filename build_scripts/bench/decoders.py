"""The decoders of a comparison: this package, llama.cpp, onnxruntime-genai, OpenVINO and Transformers, in one form.

Each takes token ids and gives token ids: `run` answers prompts, `begin` and `advance` feed one text pass by pass.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from dflash_trt.building.sources import resolve

_PASS = 512  # prompt tokens in a pass, the default of llama.cpp and of this package


@dataclass
class Task:
    """Prompts to complete at the same time. `stop`: token ids that end a text.

    With `widths`, the one prompt's greedy answer is fed again in passes of so many tokens instead.
    """

    prompts: list[list[int]]
    max_tokens: int
    temperature: float
    stop: list[int]
    seed: int = 1
    widths: list[int] = field(default_factory=list)


@dataclass
class Decoded:
    """Tokens of each prompt, and seconds from the start to the first token and to the last.

    `rounds` are verification passes with drafts, `accepted` the drafts that were right in them. `flips` has, for each
    width, the number of tokens that were fed and the places at which another token had the largest logit.
    """

    tokens: list[list[int]]
    first: float = 0.0
    seconds: float = 0.0
    rounds: int = 0
    accepted: int = 0
    flips: dict[int, tuple[int, list[int]]] = field(default_factory=dict)


class Stepper(Protocol):
    """A decoder whose passes can be given token by token. Both methods give the ids with the largest logits."""

    def begin(self, prompt: list[int]) -> int:
        """Forget everything and read a prompt: the first token after it."""
        ...

    def advance(self, tokens: list[int]) -> list[int]:
        """One pass over these tokens: the token after each."""
        ...


class Ours:
    """This package, from Python."""

    def __init__(self, kind: str, bundle: Path, batch: int, threads: int) -> None:
        from dflash_trt import LLM

        self._llm = LLM(bundle, max_batch_size=batch, prefix_cache_bytes=0, threads=threads)
        self._options: dict[str, Any] = {"speculate": kind != "plain"}
        if kind.startswith("draft"):
            self._options["block_length"] = int(kind.partition("-")[2] or self._llm.block_size)
        self._position = 0

    def run(self, task: Task) -> Decoded:
        from dflash_trt import SamplingParams
        from dflash_trt.decoding.results import Statistics

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
        return Decoded(tokens, first, seconds, counts.num_drafts, counts.num_accepted_tokens)

    def begin(self, prompt: list[int]) -> int:
        pair = self._llm._runtime.pair
        for start in range(0, len(prompt), pair.prefill_chunk):
            piece = prompt[start : start + pair.prefill_chunk]
            logits, _, _ = pair.prefill(piece, start, 0, draft=False)
        self._position = len(prompt)
        return int(np.argmax(logits))

    def advance(self, tokens: list[int]) -> list[int]:
        logits = self._llm._runtime.pair.logits([tokens], [self._position])
        self._position += len(tokens)
        return _largest(logits[0])


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
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._position = 0

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

    def _clear(self) -> None:
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)

    def _sampler(self, task: Task, number: int) -> Any:
        lib = self._lib
        chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        if task.temperature:
            lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_temp(task.temperature))
            lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_dist(task.seed + number))
        else:
            lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_greedy())
        return chain

    def run(self, task: Task) -> Decoded:
        lib, context, prompts = self._lib, self._context, task.prompts
        self._clear()
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
        return Decoded(tokens, first, seconds)

    def begin(self, prompt: list[int]) -> int:
        self._clear()
        self._read(prompt, 0)
        self._position = len(prompt)
        return self._choices(1)[0]

    def advance(self, tokens: list[int]) -> list[int]:
        self._pass([(token, i, 0, True) for i, token in enumerate(tokens, self._position)])
        self._position += len(tokens)
        return self._choices(len(tokens))

    def _choices(self, rows: int) -> list[int]:
        """Of the last pass, whose logits lie row after row."""
        logits = self._lib.llama_get_logits(self._context)
        return _largest(np.ctypeslib.as_array(logits, (rows, self._vocabulary)))


def _silent(level: int, text: bytes, data: object) -> None:
    pass


class Genai:
    """onnxruntime-genai. Prompts of a batch are padded on the left."""

    def __init__(self, model: Path, capacity: int, threads: int) -> None:
        import onnxruntime_genai

        self._lib, self._capacity = onnxruntime_genai, capacity
        config = onnxruntime_genai.Config(str(model))
        options = {"intra_op_num_threads": threads}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self._model = onnxruntime_genai.Model(config)
        self._generator: Any = None

    def _open(self, **options: Any) -> Any:
        params = self._lib.GeneratorParams(self._model)
        params.set_search_options(**options)
        return self._lib.Generator(self._model, params)

    def run(self, task: Task) -> Decoded:
        prompts, _ = _padded(task, np.int32)
        count, longest = prompts.shape
        options: dict[str, Any] = {"max_length": longest + task.max_tokens, "batch_size": count}
        if task.temperature:
            options |= {"do_sample": True, "temperature": task.temperature, "top_k": 0, "top_p": 1.0}
            options["random_seed"] = task.seed
        tokens: list[list[int]] = [[] for _ in task.prompts]
        first, began = 0.0, perf_counter()
        generator = self._open(**options)
        generator.append_tokens(prompts if count > 1 else prompts[0])
        while not generator.is_done():
            generator.generate_next_token()
            for out, token in zip(tokens, generator.get_next_tokens(), strict=True):
                out.append(int(token))
            first = first or perf_counter() - began
        seconds = perf_counter() - began
        return Decoded([_until(each, task.stop) for each in tokens], first, seconds)

    def begin(self, prompt: list[int]) -> int:
        self._generator = self._open(max_length=self._capacity, batch_size=1)
        return self.advance(prompt)[-1]

    def advance(self, tokens: list[int]) -> list[int]:
        self._generator.append_tokens(np.array(tokens, np.int32))
        return _largest(self._generator.get_output("logits")[0])


class OpenVINO:
    """The pipeline of openvino-genai, which reads GGUF files. Prompts of a batch are padded on the left."""

    def __init__(self, file: Path, threads: int) -> None:
        import openvino
        import openvino_genai

        self._lib, self._tensor = openvino_genai, openvino.Tensor
        self._pipeline = openvino_genai.LLMPipeline(str(file), "CPU", INFERENCE_NUM_THREADS=threads)

    def run(self, task: Task) -> Decoded:
        config = self._lib.GenerationConfig()
        config.max_new_tokens, config.stop_token_ids = task.max_tokens, set(task.stop)
        config.do_sample = bool(task.temperature)
        if task.temperature:
            config.temperature, config.rng_seed = task.temperature, task.seed
        ids, mask = (self._tensor(each) for each in _padded(task, np.int64))
        began = perf_counter()
        done = self._pipeline.generate(self._lib.TokenizedInputs(ids, mask), config)
        seconds = perf_counter() - began
        tokens = [_until(list(each), task.stop) for each in done.tokens]
        return Decoded(tokens, done.perf_metrics.get_ttft().mean / 1e3, seconds)


class Transformers:
    """The forward passes of Transformers, with its cache of keys and values."""

    def __init__(self, target: str, dtype: str, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self._torch = torch
        source = resolve(target, "target").directory
        self._model = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype))
        self._cache: Any = None

    def begin(self, prompt: list[int]) -> int:
        self._cache = None
        return self.advance(prompt)[-1]

    def advance(self, tokens: list[int]) -> list[int]:
        with self._torch.inference_mode():
            out = self._model(self._torch.tensor([tokens]), past_key_values=self._cache, use_cache=True)
        self._cache = out.past_key_values
        return _largest(out.logits[0].float().numpy())


def _largest(logits: Any) -> list[int]:
    return [int(token) for token in np.argmax(logits, axis=-1)]


def _padded(task: Task, dtype: Any) -> tuple[Any, Any]:
    """The prompts, [n, longest], and the mask of their own tokens."""
    longest = max(map(len, task.prompts))
    rows = [[task.stop[0]] * (longest - len(prompt)) + prompt for prompt in task.prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in task.prompts]
    return np.array(rows, dtype), np.array(mask, dtype)


def _until(tokens: list[int], stop: list[int]) -> list[int]:
    """Tokens up to the first that ends a text, that one included."""
    ends = (i for i, token in enumerate(tokens) if token in stop)
    return tokens[: next(ends, len(tokens)) + 1]

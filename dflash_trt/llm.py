"""`LLM(bundle).generate(...)`: text from a bundle, with and without drafting."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Self, cast, overload

import numpy as np

from dflash_trt.bundle import Bundle, Check
from dflash_trt.decoding.loop import Emission, decode
from dflash_trt.decoding.pair import EnginePair, InFlight
from dflash_trt.decoding.request import Chunk, Completion, FinishReason, SamplingParams
from dflash_trt.decoding.sampling import TokenCounts
from dflash_trt.decoding.statistics import Statistics
from dflash_trt.decoding.stopping import StopChecker
from dflash_trt.decoding.text import Detokenizer
from dflash_trt.engines.onnxruntime import OnnxRuntimeEngine
from dflash_trt.errors import BundleError, DFlashError, RequestError
from dflash_trt.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A target and its drafter, loaded from a bundle.

    max_batch_size: sequences decoded at the same time; each holds cache memory for max_seq_len tokens.
    prefill_chunk: prompt tokens per pass.  threads: CPU threads per pass (default: every core this process may use).
    check: how much of the bundle is verified before it is used, see `Bundle.open`.

    Raises BundleError if the bundle is not whole. One call generates at a time; use it as a context manager, or
    `close()` it, to free the memory.
    """

    def __init__(
        self,
        bundle: str | Path,
        *,
        max_batch_size: int = 8,
        prefill_chunk: int = 512,
        threads: int | None = None,
        check: Check = "size",
    ) -> None:
        for name, value in (("max_batch_size", max_batch_size), ("prefill_chunk", prefill_chunk)):
            if value < 1:
                raise DFlashError(f"{name} is {value}, expected 1 or more")
        self.bundle = Bundle.open(bundle, check)
        if self.bundle.manifest["weights"] == "none":
            raise BundleError(
                f"{bundle}: was built with --weights none and cannot run; build it with its weights"
            )
        self.tokenizer = Tokenizer(self.bundle.path)
        manifest = self.bundle.manifest
        self.max_seq_len: int = manifest["max_seq_len"]
        self.block_size: int = manifest["block_size"]
        target, drafter = (
            OnnxRuntimeEngine(
                self.bundle.path / f"{role}.onnx",
                slots=max_batch_size,
                capacity=self.bundle.capacity,
                threads=threads,
            )
            for role in ("target", "drafter")
        )
        self._pair = EnginePair(
            target,
            drafter,
            slots=max_batch_size,
            mask_token_id=manifest["mask_token_id"],
            feature_size=len(manifest["target_layer_ids"]) * manifest["hidden_size"],
            prefill_chunk=prefill_chunk,
        )
        self._running = threading.Lock()
        self._closed = False

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is also a Sequence of str
        self,
        prompts: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        speculate: bool = True,
        block_length: int | None = None,
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculate: bool = True,
        block_length: int | None = None,
    ) -> list[Completion]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculate: bool = True,
        block_length: int | None = None,
    ) -> Completion | list[Completion]:
        """Complete one prompt (text or token ids), or a list of them, in the order given.

        The tokens are the same with and without `speculate`, for every `block_length` (tokens verified per round,
        1..block_size) and in every batch: only the speed differs.

        Raises:
            RequestError: a prompt is empty or too long for max_seq_len, or a parameter is out of range.
        """
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int | np.integer))
        listed = [cast(Prompt, prompts)] if single else list(cast(Sequence[Prompt], prompts))
        if isinstance(sampling_params, Sequence):
            if len(sampling_params) != len(listed):
                raise RequestError(f"{len(sampling_params)} sampling_params for {len(listed)} prompts")
            params = list(sampling_params)
        else:
            params = [sampling_params or SamplingParams()] * len(listed)
        requests = [self._request(i, p, s) for i, (p, s) in enumerate(zip(listed, params, strict=True))]
        tokens: list[list[int]] = [[] for _ in requests]
        texts: list[list[str]] = [[] for _ in requests]
        reasons: list[FinishReason] = ["length"] * len(requests)
        for emission in self._decode(requests, speculate, block_length):
            i = emission.request.index
            tokens[i] += emission.token_ids
            texts[i].append(emission.text)
            reasons[i] = emission.finish_reason or reasons[i]
        completions = [
            Completion("".join(text), ids, reason, r.statistics, r.seed, list(r.prompt))
            for r, text, ids, reason in zip(requests, texts, tokens, reasons, strict=True)
        ]
        return completions[0] if single else completions

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        speculate: bool = True,
        block_length: int | None = None,
    ) -> Iterator[Chunk]:
        """Complete one prompt, as chunks: runs of tokens, as each round commits them. See `generate`."""
        request = self._request(0, prompt, sampling_params or SamplingParams())
        return self._chunks(self._decode([request], speculate, block_length))

    def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        speculate: bool = True,
        block_length: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Completion:
        """The assistant's answer to `messages` ({"role": ..., "content": ...}), by the model's chat template."""
        prompt = self.chat_prompt(messages, chat_template_kwargs)
        return self.generate(prompt, sampling_params, speculate=speculate, block_length=block_length)

    def stream_chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        speculate: bool = True,
        block_length: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[Chunk]:
        """`chat`, as chunks."""
        prompt = self.chat_prompt(messages, chat_template_kwargs)
        return self.stream(prompt, sampling_params, speculate=speculate, block_length=block_length)

    def chat_prompt(
        self, messages: Messages, chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Token ids of the rendered chat, ready for `generate`."""
        text = self.tokenizer.apply_chat_template(messages, **(chat_template_kwargs or {}))
        return self.tokenizer.encode(text, add_special_tokens=False)

    def logits(self, token_ids: Sequence[int]) -> np.ndarray[Any, Any]:
        """The target's logits for the token after `token_ids`: float32 [V]."""
        ids = self._prompt_ids(token_ids)
        with self._exclusive():
            return self._pair.prefill(ids, 0, draft=False).copy()

    def close(self) -> None:
        """Free the engines and their caches. Further calls raise DFlashError."""
        if not self._closed:
            self._closed = True
            self._pair.target.close()
            self._pair.drafter.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        if self._closed:
            raise DFlashError("this LLM is closed; open the bundle again")
        if not self._running.acquire(blocking=False):
            raise RequestError("this LLM is generating already; finish or close that stream first")
        try:
            yield
        finally:
            self._running.release()

    def _decode(
        self, requests: list[InFlight], speculate: bool, block_length: int | None
    ) -> Iterator[Emission]:
        length = self.block_size if block_length is None else block_length
        if not 1 <= length <= self.block_size:
            raise RequestError(
                f"block_length is {length}, expected 1..{self.block_size} (this bundle's block size)"
            )
        return self._run(requests, length if speculate else 1)

    def _run(self, requests: list[InFlight], length: int) -> Iterator[Emission]:
        with self._exclusive():
            for request in requests:
                request.started = perf_counter()
            yield from decode(self._pair, requests, length)

    def _chunks(self, emissions: Iterator[Emission]) -> Iterator[Chunk]:
        for e in emissions:
            statistics = e.request.statistics if e.finish_reason is not None else None
            yield Chunk(e.text, e.token_ids, e.finish_reason, statistics)

    def _request(self, index: int, prompt: Prompt, params: SamplingParams) -> InFlight:
        ids = self._prompt_ids(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        if len(ids) + params.max_tokens > self.max_seq_len:
            raise RequestError(
                f"the prompt has {len(ids)} tokens and max_tokens is {params.max_tokens}, together "
                f"{len(ids) + params.max_tokens}, but this bundle holds {self.max_seq_len}: lower max_tokens, shorten "
                "the prompt, or build with a larger --max-seq-len"
            )
        eos = () if params.ignore_eos else tuple(self.bundle.manifest["eos_token_ids"])
        return InFlight(
            index=index,
            prompt=ids,
            params=params,
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            stop=StopChecker(params, eos, Detokenizer(self.tokenizer.backend)),
            counts=TokenCounts(ids) if params.penalized else None,
            started=perf_counter(),
            statistics=Statistics(num_prompt_tokens=len(ids)),
        )

    def _prompt_ids(self, ids: Sequence[int]) -> list[int]:
        vocab = self.bundle.manifest["vocab_size"]
        if not len(ids):
            raise RequestError("the prompt is empty: give at least one token")
        if wrong := [t for t in ids if not 0 <= t < vocab]:
            raise RequestError(f"the prompt has token id {wrong[0]}, expected 0..{vocab - 1}")
        if len(ids) > self.max_seq_len:
            raise RequestError(
                f"the prompt has {len(ids)} tokens, but this bundle holds {self.max_seq_len}: shorten it, or build "
                "with a larger --max-seq-len"
            )
        return [int(t) for t in ids]

"""`LLM(bundle).generate(...)`: text from a bundle, with and without drafting."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Self, Unpack, cast, overload

import numpy as np

from dflash_trt.decoding.length.policy import Lengths
from dflash_trt.decoding.params import DraftingOptions, RequestOptions, SamplingParams
from dflash_trt.decoding.request import Emission, Request, completion, items
from dflash_trt.decoding.results import Chunk, Completion
from dflash_trt.errors import INTERRUPTIONS, BatchError, DFlashError, EngineError, RequestError
from dflash_trt.runtime import Messages, Opened, OpeningOptions, Prompt, Runtime, Tools, asked


class LLM(Opened):
    """A target and its drafter, loaded from a bundle.

    bundle: a directory; or the name of a known pair, such as "tiny", which is built into a cache at first use
    (`open_bundle`).
    engine: for which a pair is built that is given by its name ("auto", the default: what this machine runs best).
    max_batch_size: sequences decoded at the same time (default: 8, halved until they fit into the GPU's memory). Each
        needs cache memory for max_seq_len tokens.
    prefill_chunk: prompt tokens per pass (default 512).
    prompt_delay: seconds for which a step may read waiting prompts (default 0.2). So much later, and at least one pass,
        come the next tokens of the others, while there are free slots.
    cache_tokens: on torch, the tokens of all sequences for which caches have memory, at least one sequence (default:
        max_batch_size times max_seq_len; on a GPU what fits of one sequence more). Without more, the newest request
        waits.
    threads: CPU threads per pass (default: every core this process may use).
    prefix_cache_bytes: memory limit for cache rows of finished requests (default 256 MiB). Prompts with the same
        beginning reuse them. 0 reuses no rows at all. With cache_tokens the memory of the caches that nobody needs
        keeps them instead, unless layers have windows or states.
    check: how thoroughly the bundle is verified first, see `Bundle.open` (default: "size").
    exact: run only passes that give a row the same bits, so that drafts change no token (docs/decoding.md,
        "Exact mode"). What that takes is measured at first use, and then is `exactness`. None: as the bundle was built,
        or if a measurement of this machine shows that it costs under 5%. A warning says where drafts may change tokens.

    One call generates at a time (`AsyncLLM` serves many). The memory is freed by `close()`, at the end of a `with`, or
    with the object itself. An interrupted call (Ctrl-C) leaves nothing behind.

    Raises BundleError if the bundle is incomplete, or if `exact` cannot be promised on this machine.
    """

    def __init__(self, bundle: str | Path, **options: Unpack[OpeningOptions]) -> None:
        super().__init__(bundle, chats=True, **options)
        self.most_tree_nodes = self.runtime.scheduler.most_tree_nodes
        # Held while the engines run. `close` waits for it, so it never frees the memory of a running pass.
        self._engines = threading.RLock()
        # The call that may generate: a reference to an object that lives as long as the call.
        self._turn: weakref.ref[_Turn] | None = None
        self._free = weakref.finalize(self, _free, self._engines, self.runtime)

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is also a Sequence of str
        self,
        prompts: Prompt,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[DraftingOptions],
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Unpack[DraftingOptions],
    ) -> list[Completion]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Unpack[DraftingOptions],
    ) -> Completion | list[Completion]:
        """Complete one prompt (text or token ids), or a list of them, in the given order.

        One prompt with a list of parameters gives a list of completions, one for each. So
        `generate(prompt, params.samples(4))` gives four samples.

        `RequestOptions` describes the options speculate, block_length, tree_nodes and draft_source. They and the batch
        change the speed alone, on ONNX Runtime with chains and in exact mode (docs/decoding.md, "Sampling").

        If a request of a list fails during decoding, the others are finished, and BatchError has their completions.

        Raises:
            RequestError: a prompt is empty or too long for max_seq_len, or a parameter is out of range. Nothing was
                generated.
            DecodingError: decoding this prompt failed.
            BatchError: decoding some prompts of a list failed.
            EngineError: an engine failed; no request is finished.
            DFlashError: this object is closed, or another thread closed it meanwhile.
        """
        single = _is_single(prompts) and not isinstance(sampling_params, Sequence)
        listed = [cast(Prompt, prompts)] if _is_single(prompts) else list(cast(Sequence[Prompt], prompts))
        if isinstance(sampling_params, Sequence):
            if _is_single(prompts):
                listed *= len(sampling_params)
            if len(sampling_params) != len(listed):
                raise RequestError(f"{len(sampling_params)} sampling_params for {len(listed)} prompts")
            params = list(sampling_params)
        else:
            params = [sampling_params or SamplingParams()] * len(listed)
        request_options, lengths = self._asked(options)
        requests = [self.runtime.request(p, s, request_options) for p, s in zip(listed, params, strict=True)]
        texts: dict[Request, list[str]] = {request: [] for request in requests}
        errors: dict[Request, RequestError] = {}
        for emission in self._run(requests, lengths):
            texts[emission.request].append(emission.text)
            if emission.error is not None:
                errors[emission.request] = emission.error
        if errors and single:
            raise errors[requests[0]]
        completions = [errors.get(r) or completion(r, "".join(texts[r])) for r in requests]
        if errors:
            raise BatchError(completions)
        return cast(Completion, completions[0]) if single else cast(list[Completion], completions)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[DraftingOptions],
    ) -> Iterator[Chunk]:
        """Complete one prompt in chunks: the tokens that each round commits. See `generate`."""
        request_options, lengths = self._asked(options)
        request = self.runtime.request(prompt, sampling_params or SamplingParams(), request_options)
        return _chunks(self._run([request], lengths))

    def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        tools: Tools | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[DraftingOptions],
    ) -> Completion:
        """The assistant's answer to `messages` ({"role": ..., "content": ...}), by the model's chat template.

        tools: functions that the model may call, as in OpenAI's API ({"type": "function", "function": {...}}). Calls
            are in the answer's text, in the model's own notation; the server reads them.
        """
        prompt = self.chat_prompt(messages, chat_template_kwargs, tools)
        return self.generate(prompt, sampling_params, **options)

    def stream_chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        tools: Tools | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[DraftingOptions],
    ) -> Iterator[Chunk]:
        """`chat`, in chunks."""
        prompt = self.chat_prompt(messages, chat_template_kwargs, tools)
        return self.stream(prompt, sampling_params, **options)

    def logits(self, token_ids: Sequence[int]) -> np.ndarray[Any, Any]:
        """The target's logits for the token after `token_ids`: float32 [V]."""
        ids = self.runtime.prompt_ids(token_ids)
        turn = _Turn()
        try:
            with self._engines:
                self._take_turn(turn)
                with _engine_errors():
                    self.runtime.scheduler.clear()
                    return self.runtime.scheduler.logits(ids)
        finally:
            self._end_turn(turn)

    def close(self) -> None:
        """Free the engines and their caches. Further calls raise DFlashError.

        If another thread generates, this waits for the current pass. The call there then raises DFlashError.
        """
        self._free()

    def __repr__(self) -> str:
        return f"LLM({self.runtime.describe()}{', closed' if self.runtime.closed else ''})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _asked(self, options: DraftingOptions) -> tuple[RequestOptions, Lengths]:
        """The options of each request of a call, and the policy of its rounds, which block_length and tree_nodes are
        about. Raises RequestError.
        """
        drafting = asked(DraftingOptions, options)
        return replace(drafting, block_length=None, tree_nodes=None), self.runtime.lengths(drafting)

    def _run(self, requests: list[Request], lengths: Lengths) -> Generator[Emission]:
        scheduler, turn = self.runtime.scheduler, _Turn()
        try:
            with self._engines:
                self._take_turn(turn)
                with _engine_errors():
                    scheduler.clear()  # an interruption may have left some
                for request in requests:
                    request.arrived = perf_counter()
                    scheduler.submit(request)
            idle = False
            while not idle:
                with self._engines:
                    self._check_open()
                    with _engine_errors():
                        emissions = scheduler.step(lengths)
                    idle = scheduler.idle
                yield from emissions
        finally:  # also for a stream that was not read to its end
            self._end_turn(turn)

    def _take_turn(self, turn: _Turn) -> None:
        self._check_open()
        if self._turn is not None and self._turn() is not None:
            raise RequestError("this LLM is already generating; finish or close that stream first")
        self._turn = weakref.ref(turn)

    def _end_turn(self, turn: _Turn) -> None:
        """Keep the rows of unfinished requests for reuse. The next call clears the rest after an error."""
        with self._engines:
            if self._turn is None or self._turn() is not turn:
                return
            scheduler = self.runtime.scheduler
            if not self.runtime.closed and not scheduler.cut_short:
                scheduler.clear()
            self._turn = None

    def _check_open(self) -> None:
        if self.runtime.closed:
            raise DFlashError("this LLM is closed; open the bundle again")


class _Turn:
    """An object that lives as long as the call that generates."""


@contextmanager
def _engine_errors() -> Iterator[None]:
    try:
        yield
    except (*INTERRUPTIONS, DFlashError):
        raise
    except BaseException as error:
        raise EngineError(f"the engine failed: {type(error).__name__}: {error}") from error


def _chunks(emissions: Generator[Emission]) -> Iterator[Chunk]:
    with closing(emissions):  # before an error propagates: its handler may generate
        first = True
        for emission in emissions:
            for item in items([emission], first=first):
                if isinstance(item, RequestError):
                    raise item
                yield item
                first = False


def _free(engines: threading.RLock, runtime: Runtime) -> None:
    runtime.closed = True  # a call in another thread ends, also where the interpreter does
    with engines:
        runtime.close()


def _is_single(prompts: Any) -> bool:
    """Whether this is one prompt: a text, token ids, or anything that is not a list of prompts. Its request will
    refuse that.
    """
    if isinstance(prompts, str | bytes | bytearray) or not isinstance(prompts, Sequence | np.ndarray):
        return True
    return getattr(prompts, "ndim", 1) == 0 or (len(prompts) > 0 and isinstance(prompts[0], int | np.integer))

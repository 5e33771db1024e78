"""Run requests through TensorRT-LLM's own scheduler, with our scheduler's interface: `submit`, `step`, emissions.

Tokens come from `tensorrt_llm.LLM.generate_async(streaming=True)`, one response per decoding iteration. Stop strings,
text and statistics are ours, as for every engine. Sampling is TensorRT-LLM's. Greedy requests get the target's
argmax. Other requests use its random numbers, so the same seed gives other tokens than our engines. `load` opens its
LLM from a bundle, once the installed release agrees with it.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import queue
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple, NoReturn

import numpy as np
import yaml

from dflash_trt.bundle.manifest import Bundle
from dflash_trt.decoding.acceptance import fail, isolated, leave
from dflash_trt.decoding.length.policy import Lengths
from dflash_trt.decoding.metrics import Metrics
from dflash_trt.decoding.params import FinishReason, RequestOptions, SamplingParams
from dflash_trt.decoding.request import Emission, Queue, Request
from dflash_trt.engines.packages import installation
from dflash_trt.engines.registry import engine_of
from dflash_trt.errors import DFlashError, EngineError, RequestError
from dflash_trt.logs import warn_once

_log = logging.getLogger(__name__)

# Modules that a backend of the drafter's attention imports, with their packages: NVIDIA/TensorRT-LLM, pull requests
# 16914 and 18553. It does so when the drafter is made, after minutes of loading.
_NEEDS = {
    "VANILLA": {"flash_attn": "flash-attn"},
    "FA4": {"flash_attn.cute": "flash-attn", "flashinfer": "flashinfer-python"},
    "TRTLLM": {"flashinfer": "flashinfer-python"},
}
# Sections of llm_args.yaml and their classes.
_SECTIONS = {
    "kv_cache_config": "KvCacheConfig",
    "cuda_graph_config": "CudaGraphConfig",
    "moe_config": "MoeConfig",
}
_DRAFTING = {"DFlash": "DFlashDecodingConfig", "SA": "SADecodingConfig"}  # by decoding_type


def _constructed(api: Any, llm_args: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with a section's class for each section, which checks its fields and values.

    Raises ValueError naming all that the installed classes refuse.
    """
    refused = [
        f"{key} is not a field of its TorchLlmArgs"
        for key in llm_args
        if key not in api.TorchLlmArgs.model_fields
    ]
    args = dict(llm_args)
    drafting = _DRAFTING[llm_args["speculative_config"]["decoding_type"]]
    for section, name in {**_SECTIONS, "speculative_config": drafting}.items():
        if llm_args.get(section) is None:
            continue
        try:
            args[section] = getattr(api, name)(**llm_args[section])
        except (AttributeError, TypeError, ValueError) as error:
            refused.append(f"{section}: {error}")
    if refused:
        raise ValueError("; ".join(refused))
    return args


def read_llm_args(bundle: Bundle) -> dict[str, Any]:
    """The bundle's configuration. Raises DFlashError if it requests to run Python code of the checkpoint."""
    file = bundle.path / "llm_args.yaml"
    args: dict[str, Any] = yaml.safe_load(file.read_text())
    if args.get("trust_remote_code"):
        raise DFlashError(
            f"{file}: trust_remote_code is {args['trust_remote_code']!r}; code of a checkpoint is never run"
        )
    return args


def load(bundle: Bundle) -> tuple[Any, Any]:
    """The package, and its LLM for this bundle.

    Raises DFlashError, before anything is loaded, if the package is missing or would refuse the configuration, or if
    the drafter's attention lacks a package. Warns if the package is another release than the bundle's, but accepts the
    configuration.
    """
    version = bundle.manifest["tensorrt_llm"]["version"]
    try:
        module: Any = importlib.import_module("tensorrt_llm")
    except Exception as error:  # its native parts may raise anything
        raise DFlashError(
            f"tensorrt_llm cannot be imported ({type(error).__name__}: {error}); this bundle is for {version}: "
            f"{installation(engine_of(bundle), bundle.manifest)}"
        ) from error
    args = read_llm_args(bundle)
    backend = args["speculative_config"].get("attention_backend")
    for needed, package in _NEEDS[backend].items() if backend else ():
        try:
            importlib.import_module(needed)
        except Exception as error:  # native parts may raise anything
            raise DFlashError(
                f"{bundle.path}: the drafter's attention_backend is {backend}, but {needed} cannot be imported "
                f"({error}); pip install {package}"
            ) from None
    if "drafter" in bundle.roles:
        args["speculative_config"]["speculative_model"] = str((bundle.path / "drafter").resolve())
    try:
        args = _constructed(module.llmapi, args)
    except ValueError as error:
        raise DFlashError(
            f"{bundle.path / 'llm_args.yaml'}: made for TensorRT-LLM {version}, but {module.__version__} is "
            f"installed: {error}. Install {version}"
        ) from None
    if module.__version__ != version:
        warn_once(
            _log,
            f"{bundle.path}: made for TensorRT-LLM {version}, {module.__version__} is installed; it knows every field",
        )
    model = str((bundle.path / "target").resolve())
    return module, module.LLM(model=model, skip_tokenizer_init=True, **args)


_PATIENCE = 0.05  # seconds that a step waits for tokens before it checks cancellations and deadlines


class _Response(NamedTuple):
    """The new tokens of one response. `iteration` counts decoding iterations of the request."""

    request: Request
    tokens: list[int]
    iteration: int
    finish_reason: FinishReason | None
    error: BaseException | None = None


@dataclass
class _Run:
    result: Any = None  # until the request was handed over
    iteration: int | None = None  # of the previous response


class Driver:
    """One `tensorrt_llm.LLM`. As with `Scheduler`, one thread calls `submit` and `step`.

    A step is never `cut_short`: it processes a response completely or not at all.

    The bundle's `max_batch_size` limits the running requests. TensorRT-LLM queues the others itself.
    """

    cut_short = False

    def __init__(self, bundle: Bundle) -> None:
        self._path, manifest = bundle.path, bundle.manifest
        self._eos: tuple[int, ...] = tuple(manifest["eos_token_ids"])
        self._draft_len: int = manifest["block_size"] - 1
        self._source = "drafter" if "drafter" in bundle.roles else "lookup"
        self._module, self._llm = load(bundle)
        self.metrics = Metrics()
        self._runs: dict[Request, _Run] = {}
        self._queue = Queue()
        self._responses: queue.SimpleQueue[_Response] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="dflash-trt responses", daemon=True
        )
        self._thread.start()

    @property
    def idle(self) -> bool:
        return not self._runs

    @property
    def pair(self) -> NoReturn:
        raise DFlashError(f"{self._path}: this engine runs its own loop, and its passes cannot be checked")

    @property
    def most_tree_nodes(self) -> int:
        """0: it drafts chains."""
        return 0

    def check(self, options: RequestOptions, params: SamplingParams) -> None:
        """Refuse settings that TensorRT-LLM does not support, or not per request. Raises RequestError naming the
        field.
        """
        if options.block_length not in (None, self._draft_len + 1):
            raise RequestError(
                f"block_length is {options.block_length}, but TensorRT-LLM verifies {self._draft_len + 1} tokens of "
                "every request; leave it out, or build with --block-size"
            )
        if not options.speculate:
            raise RequestError(
                "speculate is False, but TensorRT-LLM drafts for every request of an engine; leave it out, or remove "
                "speculative_config from the bundle's llm_args.yaml and serve that with trtllm-serve"
            )
        if options.draft_source != self._source and "," not in options.draft_source:
            raise RequestError(
                f"draft_source is {options.draft_source}, but TensorRT-LLM takes the drafts of this bundle from: "
                f"{self._source}; leave it out"
            )
        refused = {
            "min_p": params.min_p != 0,
            "min_tokens": params.min_tokens,
            "bad_words": params.bad_words,
            "structured_outputs": params.structured_outputs,
            "logit_bias": params.logit_bias,
            "allowed_token_ids": params.allowed_token_ids,
            "logprobs": params.logprobs,
            "prompt_logprobs": params.prompt_logprobs,
        }
        if name := next((name for name, asked in refused.items() if asked), ""):
            raise RequestError(
                f"{name} is {getattr(params, name)}, which TensorRT-LLM does not support with speculative decoding"
            )
        if params.penalized:
            raise RequestError(
                "repetition_penalty, presence_penalty and frequency_penalty: TensorRT-LLM refuses penalties with "
                "speculative decoding"
            )

    def submit(self, request: Request) -> None:
        self._runs[request] = _Run()
        self._queue.watch(request)
        asyncio.run_coroutine_threadsafe(self._follow(request, self._runs[request]), self._loop)

    def cancel(self, request: Request) -> None:
        self._queue.cancel(request)

    def step(self, lengths: Lengths) -> list[Emission]:
        """The results since the last step. Waits briefly if there are none. `lengths` has no effect."""
        emissions = self._give_up()
        wait = bool(self._runs) and not emissions
        try:
            while True:
                response = self._responses.get(block=wait, timeout=_PATIENCE)
                wait = False
                if response.request in self._runs:
                    emissions.append(self._answer(response))
        except queue.Empty:
            pass
        self.metrics.observe_step(emissions, len(self._runs), 0)
        return emissions

    def parts(self, lengths: Lengths) -> Iterator[list[Emission]]:
        yield self.step(lengths)

    def forget(self) -> None:
        """No effect: TensorRT-LLM has no call to drop what it keeps for reuse (by default nothing)."""

    def clear(self) -> None:
        for request in self._runs:
            self.cancel(request)
        self._give_up()

    def logits(self, ids: list[int]) -> np.ndarray[Any, Any]:
        raise DFlashError(
            "TensorRT-LLM gives no logits with speculative decoding; use an ONNX Runtime bundle"
        )

    def close(self) -> None:
        self.clear()
        self._llm.shutdown()
        asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _follow(self, request: Request, run: _Run) -> None:
        """On the loop's thread: hand the request over, and pass its responses on."""
        seen = 0
        try:
            run.result = self._llm.generate_async(
                list(request.prompt), self._sampling_params(request), streaming=True
            )
            if request not in self._runs:  # given up before it was handed over
                run.result.abort()
            async for output in run.result:
                completion = output.outputs[0]
                tokens, seen = list(completion.token_ids[seen:]), len(completion.token_ids)
                iteration, reason = int(output.decoding_iter), completion.finish_reason
                self._responses.put(_Response(request, tokens, iteration, reason))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # also a library's panic: the waiting caller must learn of it
            self._responses.put(_Response(request, [], 0, None, error))

    def _sampling_params(self, request: Request) -> Any:
        """TensorRT-LLM's parameters. `skip_tokenizer_init` needs ids instead of strings; stop strings are found in
        our text.
        """
        p = request.params
        eos = () if p.ignore_eos else self._eos
        values: dict[str, Any] = {
            "max_tokens": p.max_tokens,
            "end_id": eos[0] if eos else -1,
            "stop_token_ids": [*eos[1:], *p.stop_token_ids] or None,
            "include_stop_str_in_output": True,  # otherwise the stop token's id is cut off
            "ignore_eos": p.ignore_eos,
            "detokenize": False,
            "seed": request.seed,
        }
        if p.temperature == 0:
            values["top_k"] = 1
        else:
            values |= {"temperature": p.temperature, "top_p": p.top_p}
            if p.top_k:
                values["top_k"] = p.top_k
        return self._module.SamplingParams(**values)

    def _answer(self, response: _Response) -> Emission:
        request = response.request
        if response.error is not None:
            return self._failed(request, response.error)
        emission = isolated(request, partial(self._take, response))
        if emission.error is not None:
            self._loop.call_soon_threadsafe(self._runs.pop(request).result.abort)
        return emission

    def _take(self, response: _Response) -> Emission:
        request, tokens = response.request, response.tokens
        statistics, run = request.statistics, self._runs[request]
        if tokens and not request.output:
            request.first_token_at = perf_counter()
            statistics.time_to_first_token = request.first_token_at - request.arrived
            if len(tokens) > 1:  # the first iteration after the prompt arrived with it
                self._count(request, len(tokens) - 1, 1)
        elif tokens:
            before = run.iteration or 0
            self._count(request, len(tokens), max(1, response.iteration - before))
        run.iteration = response.iteration
        request.output += tokens
        kept, text, reason = request.stop.push(tokens)
        statistics.num_generation_tokens += kept
        if reason is None and response.finish_reason is not None:
            reason = response.finish_reason
            text += request.stop.abandon(reason)
        if reason is not None:
            statistics.generation_time = perf_counter() - request.first_token_at
            self._runs.pop(request)
            if response.finish_reason is None:  # a stop string or a budget that only we know
                self._loop.call_soon_threadsafe(run.result.abort)
        return Emission(request, tokens[:kept], text, reason)

    def _failed(self, request: Request, error: BaseException) -> Emission:
        """Handle an error. TensorRT-LLM refuses a request by ValueError or its own RequestError; others are engine
        failures.
        """
        del self._runs[request]
        text = f"TensorRT-LLM: {type(error).__name__}: {error}"
        if not isinstance(error, ValueError) and type(error).__name__ != "RequestError":
            raise EngineError(text) from error
        refused = RequestError(text)
        refused.__cause__ = error
        return fail(request, refused)

    def _count(self, request: Request, tokens: int, rounds: int) -> None:
        """Count verification rounds that gave this many tokens, evenly if one response covers several rounds."""
        for i in range(rounds):
            share = tokens // rounds + (i < tokens % rounds)
            accepted = min(max(share - 1, 0), self._draft_len)
            request.statistics.record_round(self._draft_len, accepted)
            self.metrics.observe_round(self._draft_len + 1)

    def _give_up(self) -> list[Emission]:
        """Remove the requests that were cancelled or are out of time."""
        emissions = list[Emission]()
        for request in self._queue.leaving(perf_counter()):
            run = self._runs.pop(request, None)
            if run is None:  # not submitted yet
                continue
            emissions.append(leave(request, "cancelled" if request.cancelled else "timeout"))
            if run.result is not None:
                self._loop.call_soon_threadsafe(run.result.abort)
        return emissions


async def _cancel_all() -> None:
    """End the loop's other tasks, which wait for given-up requests."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)

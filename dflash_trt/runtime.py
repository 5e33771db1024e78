"""The common parts of `LLM` and `AsyncLLM`: a loaded bundle, its scheduler, and requests made for it."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from itertools import chain, cycle, islice
from pathlib import Path
from time import perf_counter
from typing import Any, TypedDict, Unpack

import numpy as np

from dflash_trt.building.exactness import Exactness, exactness, kept, place_of, rows_agree
from dflash_trt.building.first_use import open_bundle
from dflash_trt.building.progress import progress_display
from dflash_trt.bundle.manifest import Check
from dflash_trt.bundle.workspace import Progress
from dflash_trt.checkpoint.catalogue import known_pair
from dflash_trt.decoding.length.choice import Policies
from dflash_trt.decoding.length.policy import Lengths
from dflash_trt.decoding.loop import DecodingLoop
from dflash_trt.decoding.metrics import Metrics
from dflash_trt.decoding.output import Detokenizer, StopChecker
from dflash_trt.decoding.pair import Pair
from dflash_trt.decoding.params import RequestOptions, SamplingParams, integer, token_ids
from dflash_trt.decoding.request import Request
from dflash_trt.decoding.results import Statistics
from dflash_trt.decoding.sampling.history import History
from dflash_trt.decoding.sampling.structure import Structure, Structures
from dflash_trt.engines.base import PREFILL_CHUNK, PROMPT_DELAY, Engine, RunSettings
from dflash_trt.engines.registry import AUTO, engine_of, require_packages
from dflash_trt.errors import DFlashError, RequestError, UsageError, quoted
from dflash_trt.logs import warn_once
from dflash_trt.prompts import natural_prompts

_log = logging.getLogger(__name__)
BATCH = 8  # sequences at a time, where none is asked for and the memory suffices
_MEASURED_TOKENS = 300  # of the prompt that exact mode cuts into passes

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]


class OpeningOptions(TypedDict, total=False):
    """Keyword arguments of `LLM` and `AsyncLLM`. `LLM` describes them, and `Runtime` has their defaults."""

    max_batch_size: int | None
    prefill_chunk: int
    prefix_cache_bytes: int
    prompt_delay: float
    cache_tokens: int | None
    threads: int | None
    check: Check
    exact: bool | None
    engine: str


class Opened:
    """The base of `LLM` and `AsyncLLM`, with metrics and a chat template.

    runtime: the `Runtime` that does the work, with its `scheduler` and `pair`, for reports and tests.
    """

    def __init__(self, bundle: str | Path, *, chats: bool = False, **options: Unpack[OpeningOptions]) -> None:
        """chats: start what renders chats while the engines are opened; otherwise the first chat does."""
        self.runtime = Runtime(bundle, chats=chats, **options)
        self.exactness = self.runtime.exactness
        self.bundle, self.tokenizer = self.runtime.bundle, self.runtime.tokenizer
        self.max_seq_len, self.block_size = self.runtime.max_seq_len, self.runtime.block_size
        manifest = self.bundle.manifest
        self._thinking_warning = thinking_warning(manifest["target"]["name"]) if manifest["drafter"] else ""

    @property
    def metrics(self) -> Metrics:
        """Metrics of everything generated so far."""
        return self.runtime.scheduler.metrics

    def chat_prompt(
        self,
        messages: Messages,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Tools | None = None,
    ) -> list[int]:
        """Token ids of the rendered chat, for `generate` and `stream`; made in the calling thread. In an event loop use
        `asyncio.to_thread` for a long chat. Warns once if the drafter was trained for another mode of the target.
        """
        if self._thinking_warning and (chat_template_kwargs or {}).get("enable_thinking", True):
            warn_once(_log, self._thinking_warning)
        most = self.max_seq_len  # a token has one character or more
        if _characters(chat := [messages, chat_template_kwargs, tools], most) > most and (
            _characters(chat, most := self.tokenizer.most_bytes(most)) > most
        ):
            raise RequestError(
                f"the messages have over {most} characters, more than the {self.max_seq_len} tokens of this bundle "
                "can have: shorten them"
            )
        if not all(isinstance(name, str) for name in chat_template_kwargs or {}):
            raise RequestError(
                f"chat_template_kwargs is {quoted(chat_template_kwargs)}, expected names and values"
            )
        variables = dict(chat_template_kwargs or {})
        if tools is not None:
            if "tools" in variables:
                raise RequestError("tools are given twice: as the argument and in chat_template_kwargs")
            if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
                raise RequestError(f"tools is {quoted(tools)}, expected a list of objects as in OpenAI's API")
            variables["tools"] = list(tools)
        text = self.tokenizer.apply_chat_template(messages, **variables)
        return self.tokenizer.encode(text, add_special_tokens=False, max_tokens=self.max_seq_len)


class Runtime:
    """A loaded bundle. See `LLM` and `Opened` for the arguments.

    closed: whether its engines are freed, or will be as soon as a running pass has ended.
    """

    closed = False

    def __init__(
        self,
        bundle: str | Path,
        *,
        max_batch_size: int | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
        prefix_cache_bytes: int = 256 << 20,
        prompt_delay: float = PROMPT_DELAY,
        cache_tokens: int | None = None,
        threads: int | None = None,
        check: Check = "size",
        exact: bool | None = None,
        engine: str = AUTO,
        chats: bool = False,
    ) -> None:
        began = perf_counter()
        batch = BATCH if max_batch_size is None else integer("max_batch_size", max_batch_size, 1)
        prefill_chunk = integer("prefill_chunk", prefill_chunk, 1)
        prefix_cache_bytes = integer("prefix_cache_bytes", prefix_cache_bytes, 0)
        if not isinstance(prompt_delay, int | float) or not prompt_delay >= 0:
            raise UsageError(f"prompt_delay is {quoted(prompt_delay)}, expected seconds, 0 or more")
        self.bundle = open_bundle(bundle, check, engine)
        manifest = self.bundle.manifest
        require_packages(self.bundle)
        self.max_seq_len: int = manifest["max_seq_len"]
        self.block_size: int = manifest["block_size"]
        opener = engine_of(self.bundle)
        self.tokenizer = opener.tokenizer(self.bundle)
        with suppress(DFlashError):  # chats raise it
            templates = self.tokenizer.templates  # read now, so that the first chat need not
            if chats:
                templates.prepare()
        self.structures = Structures(self.tokenizer, manifest["vocab_size"], manifest["eos_token_ids"])
        with progress_display() as progress:
            settings = RunSettings(
                max_batch_size=batch,
                prefill_chunk=prefill_chunk,
                prefix_cache_bytes=prefix_cache_bytes,
                prompt_delay=prompt_delay,
                cache_tokens=None if cache_tokens is None else integer("cache_tokens", cache_tokens, 1),
                threads=threads,
                progress=progress,
            )
            self.scheduler = self._opened(opener, settings, may_lower=max_batch_size is None)
            try:
                self.exactness = self._follow_rule(exact, threads, progress)
            except MemoryError as error:
                self.scheduler.close()
                raise DFlashError(
                    f"{self.bundle.path}: the passes that are compared at first use do not fit ({error}); raise "
                    "cache_tokens, or lower max_batch_size"
                ) from error
            except BaseException:
                self.scheduler.close()
                raise
        drafter = "drafter" in self.bundle.roles
        times = None if opener.own_loop else place_of(self.bundle, self.pair, threads, "pass-times")
        self._policies = Policies(self.block_size, times, drafter=drafter)
        _log.info(
            "opened %s for %s in %.2f s: block %d, %d tokens, %d slots",
            *(self.bundle.path, manifest["engine"], perf_counter() - began),
            *(self.block_size, self.max_seq_len, self.max_batch_size),
        )

    def _opened(self, opener: Engine, settings: RunSettings, *, may_lower: bool) -> DecodingLoop:
        """The scheduler of a bundle. may_lower: halve `max_batch_size` as often as it takes to fit into memory."""
        while True:
            self.max_batch_size = batch = settings.max_batch_size
            try:
                return opener.open(self.bundle, settings)
            except MemoryError as error:
                kinds = [kind for role in self.bundle.roles for kind in self.bundle.cache_kinds(role)]
                caches = batch * sum(kind.rows * kind.row_bytes for kind in kinds) / 2**30
                sequences = "one sequence" if batch == 1 else f"{batch} sequences"
                lacking = (
                    f"no memory is left for {sequences} of {self.max_seq_len} tokens, whose caches take {caches:.2f} "
                    f"GiB ({error})"
                )
                if not may_lower or batch == 1:
                    fewer = "lower max_batch_size, or " if batch > 1 else ""
                    raise DFlashError(
                        f"{self.bundle.path}: {lacking}; {fewer}build with a smaller --max-seq-len or fewer bits "
                        "(--precision)"
                    ) from error
            settings = replace(settings, max_batch_size=batch // 2)
            _log.warning("%s: max_batch_size is %d: %s", self.bundle.path, settings.max_batch_size, lacking)

    def _follow_rule(self, exact: bool | None, threads: int | None, progress: Progress) -> Exactness | None:
        """Let the scheduler follow the rule of exact mode that was measured here. None: every pass is allowed."""
        if exact is False:
            return None
        wanted = self.bundle.manifest.get("exact") if exact is None else exact
        try:
            pair = self.pair
        except DFlashError as error:
            if wanted:
                reason = f"{error}, so exact mode cannot promise equal tokens; leave exact out"
                raise DFlashError(reason) from None
            self._say_what_may_differ(None, threads)
            return None
        with pair.arrays.stream():
            if wanted:
                prompts = self.measured_prompts()
                measured = exactness(self.bundle, pair, prompts, threads=threads, progress=progress)
            else:
                known = kept(self.bundle, pair, threads)
                if known is None or not known.free:
                    self._say_what_may_differ(known, threads)
                    return None
                measured = known
        assert measured.rule is not None
        pair.rule, pair.most_together = measured.rule, 1
        return measured

    def _say_what_may_differ(self, known: Exactness | None, threads: int | None) -> None:
        """Warn where rounding may let drafts change a token. known: what was measured of exact mode here."""
        engine, chains = engine_of(self.bundle), self.bundle.manifest["tree_width"] == 1
        if chains and engine.equal_rows:
            return
        asked = chains and not engine.own_loop and self.pair.equal_rows
        if asked and rows_agree(self.bundle, self.pair, self.measured_prompts()[-1], threads):
            return
        if engine.own_loop or (known is not None and known.rule is None):
            way = "exact mode is not possible here"
        elif known is None:
            way = "`dflash-trt verify BUNDLE --widths` measures exact mode, which then is on if it costs nothing"
        else:
            way = f"exact mode prevents that ({known.describe()})"
        warn_once(
            _log, f"{self.bundle.path}: drafts may change a token where two logits are nearly equal; {way}"
        )

    def measured_prompts(self) -> list[list[int]]:
        """A short prompt, and one that is cut into passes, for exact mode's measurement."""
        texts = [str(prompt.content) for prompt in natural_prompts(None, 8)]
        most = self.max_seq_len - self.max_seq_len // 4
        short, *others = [self.tokenizer.encode(text) for text in texts]
        long = islice(cycle(chain.from_iterable(others)), min(most, _MEASURED_TOKENS))
        return [short[:most], [*long]]

    def describe(self) -> str:
        """The bundle in a few words."""
        parts = self.bundle.manifest["engine"], f"block {self.block_size}", f"up to {self.max_seq_len} tokens"
        return ", ".join([repr(str(self.bundle.path)), *parts])

    @property
    def pair(self) -> Pair:
        """Its pair. Raises DFlashError if the engine runs its passes by itself."""
        return self.scheduler.pair

    def lengths(self, options: RequestOptions) -> Lengths:
        """The policy for these options. Raises RequestError."""
        self.check(options)
        return self._policies(options, self.scheduler.most_tree_nodes)

    def close(self) -> None:
        """Free the engines. What was learned of their times is kept for later processes."""
        self._policies.keep()
        self.scheduler.close()

    def check(self, options: RequestOptions, params: SamplingParams | None = None) -> None:
        """Raise RequestError if this bundle does not support them."""
        drafter = "drafter" in self.bundle.roles
        options.check(self.block_size, self.scheduler.most_tree_nodes, drafter=drafter)
        self.scheduler.check(options, params or SamplingParams())

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        options: RequestOptions,
        deadline: float | None = None,
    ) -> Request:
        """A request that this bundle can serve; tokenizes. `deadline` is of perf_counter. Raises RequestError."""
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params is {quoted(params)}, expected a SamplingParams")
        self.check(options, params)
        try:
            ids = self.prompt_ids(prompt)
            if len(ids) + params.max_tokens > self.max_seq_len:
                raise RequestError(
                    f"the prompt has {len(ids)} tokens and max_tokens is {params.max_tokens}, together "
                    f"{len(ids) + params.max_tokens}, but this bundle holds {self.max_seq_len}: lower max_tokens, "
                    "shorten the prompt, or build with a larger --max-seq-len"
                )
            vocab = self.bundle.manifest["vocab_size"]
            if params.logit_bias and (most := max(params.logit_bias)) >= vocab:
                raise RequestError(f"logit_bias has token id {most}, expected 0..{vocab - 1}")
            if params.allowed_token_ids and (most := max(params.allowed_token_ids)) >= vocab:
                raise RequestError(f"allowed_token_ids contains {most}, expected 0..{vocab - 1}")
            form = params.structured_outputs
            structure = None if form is None else self.structures.compile(form, options.cache_salt)
            return self._request(ids, params, options, deadline, structure)
        except MemoryError as error:
            raise RequestError(
                f"the prompt has a length of {len(prompt)}: no memory is left for its request"
            ) from error

    def waits_for_form(self, params: SamplingParams, salt: str = "") -> bool:
        """Whether `request` may take long to compile a form, so that others must not wait for its thread."""
        form = getattr(params, "structured_outputs", None)
        return form is not None and not self.structures.is_cheap(form, salt)

    def late_request(self, params: SamplingParams, deadline: float) -> Request:
        """A request without a prompt, as its deadline passed before that was tokenized. It ends in the next step."""
        return self._request([], params, RequestOptions(speculate=False), deadline)

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Token ids for this target, from a text or from token ids. Raises RequestError."""
        if isinstance(prompt, str):
            prompt = self.tokenizer.encode(prompt, max_tokens=self.max_seq_len)
        listed = isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray | memoryview)
        if not listed and not (isinstance(prompt, np.ndarray) and prompt.ndim == 1):
            raise RequestError(
                f"the prompt is {quoted(prompt)} ({type(prompt).__name__}), expected a text or a list of token ids"
            )
        if not len(prompt):
            raise RequestError("the prompt is empty: give at least one token")
        if len(prompt) > self.max_seq_len:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, but this bundle holds {self.max_seq_len}: shorten it, or build "
                "with a larger --max-seq-len"
            )
        ids = token_ids(prompt, "the prompt")
        vocab = self.bundle.manifest["vocab_size"]
        if wrong := [t for t in ids if not 0 <= t < vocab]:
            raise RequestError(f"the prompt has token id {quoted(wrong[0])}, expected 0..{vocab - 1}")
        return ids

    def _request(
        self,
        ids: list[int],
        params: SamplingParams,
        options: RequestOptions,
        deadline: float | None,
        structure: Structure | None = None,
    ) -> Request:
        eos = () if params.ignore_eos else tuple(self.bundle.manifest["eos_token_ids"])
        stop = StopChecker(params, eos, Detokenizer(self.tokenizer.backend, params.skip_special_tokens))
        history = None
        if params.adjusted:
            # Each word at the start of a text, and after a space.
            spellings = dict.fromkeys(
                spelling for word in params.bad_words for spelling in (word, f" {word.lstrip()}")
            )
            encoded = (self.tokenizer.encode(spelling, add_special_tokens=False) for spelling in spellings)
            words = [tokens for tokens in encoded if tokens]
            ends = [token for token in stop.end_tokens if token < self.bundle.manifest["vocab_size"]]
            history = History(params, ids, words, ends, structure)
        return Request(
            prompt=ids,
            params=params,
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            stop=stop,
            history=history,
            arrived=perf_counter(),
            options=options,
            deadline=deadline,
            statistics=Statistics(num_prompt_tokens=len(ids)),
        )


def thinking_warning(target: str) -> str:
    """What to say of a chat with this target in thinking mode, if its known drafter was trained without."""
    pair = known_pair(target)
    return f"{pair.name}: {pair.warning}" if pair and pair.thinking == "off" else ""


def _characters(value: object, most: int) -> int:
    """Characters of the strings in nested lists and objects, plus one per value. Counting stops beyond `most`."""
    size, left = 0, [value]
    while left and size <= most:
        value = left.pop()
        size += 1
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, Mapping):
            left += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            left += value
    return size


_SAMPLING = {field.name for field in fields(SamplingParams)}


def asked(kind: type[Any], options: Mapping[str, Any]) -> RequestOptions:
    """The options of a call, whose names are those of `kind`, a TypedDict. Raises TypeError for others."""
    if named := [f"{name}={quoted(value)}" for name, value in options.items() if name in _SAMPLING]:
        raise TypeError(f"{named[0]} belongs in sampling_params=SamplingParams({', '.join(named)})")
    if unknown := [name for name in options if name not in kind.__optional_keys__]:
        raise TypeError(f"got an unexpected keyword argument {unknown[0]!r}")
    return RequestOptions(**options)

"""The common part of `LLM` and `AsyncLLM`: a loaded bundle, its scheduler, and requests made for it."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from numbers import Integral
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from dflash_trt.building.first_use import open_bundle
from dflash_trt.building.progress import progress_display
from dflash_trt.bundle.manifest import Check
from dflash_trt.checkpoint.catalogue import known_pair
from dflash_trt.decoding.length.adaptive import AdaptiveLength
from dflash_trt.decoding.length.pass_times import measure
from dflash_trt.decoding.length.policy import FixedLength, Lengths
from dflash_trt.decoding.length.trees import MOST_NODES, TreeLengths
from dflash_trt.decoding.output.detokenizer import Detokenizer
from dflash_trt.decoding.output.stopping import StopChecker
from dflash_trt.decoding.pair import USUAL_CONTEXT, Pair
from dflash_trt.decoding.params import SamplingParams, token_ids
from dflash_trt.decoding.request import Request
from dflash_trt.decoding.sampling.history import History
from dflash_trt.decoding.sampling.structure import Structure, Structures
from dflash_trt.decoding.scheduler import Scheduler
from dflash_trt.decoding.statistics import Statistics
from dflash_trt.engines.base import RunSettings
from dflash_trt.engines.registry import engine_of
from dflash_trt.errors import BundleError, DFlashError, RequestError, UsageError, quoted
from dflash_trt.logs import warn_once
from dflash_trt.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from dflash_trt.trtllm.driver import Driver

_log = logging.getLogger(__name__)

T = TypeVar("T")
Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


class Runtime:
    """A loaded bundle. See `LLM` for the arguments."""

    def __init__(
        self,
        bundle: str | Path,
        *,
        max_batch_size: int,
        prefill_chunk: int,
        prefix_cache_bytes: int,
        threads: int | None,
        check: Check,
    ) -> None:
        began = perf_counter()
        max_batch_size, prefill_chunk, prefix_cache_bytes = map(
            _plain, (max_batch_size, prefill_chunk, prefix_cache_bytes)
        )
        limits = {"max_batch_size": (max_batch_size, 1), "prefill_chunk": (prefill_chunk, 1)}
        limits["prefix_cache_bytes"] = (prefix_cache_bytes, 0)
        for name, (value, least) in limits.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise UsageError(f"{name} is {quoted(value)}, expected an integer, {least} or more")
        self.bundle = open_bundle(bundle, check)
        manifest = self.bundle.manifest
        if manifest["weights"] == "none":
            raise BundleError(
                f"{bundle}: was built with --weights none and cannot run; build it with its weights"
            )
        self.max_seq_len: int = manifest["max_seq_len"]
        self.block_size: int = manifest["block_size"]
        self._adaptive: AdaptiveLength | None = None
        self._trees: TreeLengths | None = None
        engine = engine_of(self.bundle)
        self.tokenizer = self._tokenizer(engine.tokenizer_folder)
        self._structures = Structures(
            self.tokenizer.backend, manifest["vocab_size"], manifest["eos_token_ids"]
        )
        try:
            with progress_display() as progress:
                settings = RunSettings(
                    max_batch_size=max_batch_size,
                    prefill_chunk=prefill_chunk,
                    prefix_cache_bytes=prefix_cache_bytes,
                    threads=threads,
                    progress=progress,
                )
                self.scheduler = engine.open(self.bundle, settings)
        except MemoryError as error:
            raise DFlashError(
                f"{self.bundle.path}: no memory is left for {max_batch_size} sequences of {self.max_seq_len} tokens "
                f"({error}); lower max_batch_size, or build with a smaller --max-seq-len"
            ) from error
        # An engine with a scheduler of its own is a driver instead: pair and scheduler in one.
        self.driver: Driver | None = None
        self.pair: Pair | Driver
        if isinstance(self.scheduler, Scheduler):
            self.pair = self.scheduler.pair
        else:
            self.pair = self.driver = cast("Driver", self.scheduler)
        _log.info(
            "opened %s for %s in %.2f s: block %d, %d tokens, %d slots",
            *(self.bundle.path, manifest["engine"], perf_counter() - began),
            *(self.block_size, self.max_seq_len, max_batch_size),
        )

    def describe(self) -> str:
        """The bundle in a few words."""
        engine = self.bundle.manifest["engine"]
        return (
            f"{str(self.bundle.path)!r}, {engine}, block {self.block_size}, up to {self.max_seq_len} tokens"
        )

    def _tokenizer(self, folder: str) -> Tokenizer:
        files = self.bundle.manifest["files"]
        if folder:
            files = {name.removeprefix(f"{folder}/") for name in files if name.startswith(f"{folder}/")}
        return Tokenizer(self.bundle.path / folder, files)

    def lengths(self, speculate: bool, block_length: int | None, tree_nodes: int | None = None) -> Lengths:
        """The policy for a block length and a number of tree nodes. None selects the adaptive one.

        The adaptive policy times some passes when it is first requested. Nothing may run then.
        """
        block_length, tree_nodes = self.checked(block_length, tree_nodes)
        if not speculate:
            return FixedLength(1)
        if tree_nodes:
            return TreeLengths(FixedLength(block_length or self.block_size), self.block_size - 1, tree_nodes)
        if block_length is not None or self.driver is not None:
            return FixedLength(block_length or self.block_size)
        if not (isinstance(self.pair, Pair) and isinstance(self.scheduler, Scheduler)):
            return FixedLength(self.block_size)  # an engine's own loop has one length
        if self._adaptive is None:
            self.scheduler.slots.overwritten()
            with self.scheduler.whole():
                most = min(MOST_NODES, self.most_tree_nodes)
                self._adaptive = new_adaptive(self.block_size, self.pair, self.scheduler.max_batch_size, most)
                for slot in range(
                    self.scheduler.max_batch_size
                ):  # the numbers of these passes may not be finite
                    self.pair.clear(slot, last=USUAL_CONTEXT + 2 * max(most, self.block_size))
            if self.pair.trees:
                self._trees = TreeLengths(self._adaptive, self.block_size - 1)
        return self._adaptive if self._trees is None or tree_nodes == 0 else self._trees

    @property
    def most_tree_nodes(self) -> int:
        """The most nodes of a tree that a pass of this bundle verifies; 0 if it takes chains only."""
        if not (isinstance(self.pair, Pair) and self.pair.trees):
            return 0
        return min(self.pair.arrays.most_nodes, self.pair.capacity // 2)

    def checked(self, block_length: int | None, tree_nodes: int | None) -> tuple[int | None, int | None]:
        """Both as Python's integers. Raises RequestError if this bundle does not support them."""
        block_length, tree_nodes = _plain(block_length), _plain(tree_nodes)
        self.check_block_length(block_length)
        self.check_tree_nodes(tree_nodes)
        return block_length, tree_nodes

    def check_tree_nodes(self, tree_nodes: int | None) -> None:
        """Raise RequestError if this bundle does not support trees of so many nodes."""
        if tree_nodes is None or (type(tree_nodes) is int and tree_nodes == 0):
            return
        most = self.most_tree_nodes
        if not most:
            raise UsageError(
                f"tree_nodes is {quoted(tree_nodes)}, but this bundle drafts chains: build it with --tree-width 2 or "
                "more"
            )
        if type(tree_nodes) is not int or not 2 <= tree_nodes <= most:
            raise UsageError(
                f"tree_nodes is {quoted(tree_nodes)}, expected 2..{most}, or 0 for chains; leave it out for the default"
            )

    def check_block_length(self, block_length: int | None) -> None:
        """Raise RequestError if this bundle does not support a block length."""
        fits = type(block_length) is int and 1 <= block_length <= self.block_size
        if block_length is not None and not fits:
            raise UsageError(
                f"block_length is {quoted(block_length)}, expected 1..{self.block_size} (this bundle's block size); "
                "leave it out for the default"
            )
        if self.driver is not None:
            self.driver.check_block_length(block_length)

    def chat_prompt(
        self, messages: Messages, chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Token ids of the rendered chat. Warns once if the drafter was trained for another mode of the target."""
        pair = known_pair(self.bundle.manifest["target"]["name"])
        if pair and pair.thinking == "off" and (chat_template_kwargs or {}).get("enable_thinking", True):
            warn_once(_log, f"{pair.name}: {pair.warning}")
        most = self.tokenizer.most_bytes(self.max_seq_len)
        if _characters([messages, chat_template_kwargs], most) > most:
            raise RequestError(
                f"the messages have over {most} characters, more than the {self.max_seq_len} tokens of this bundle "
                "can have: shorten them"
            )
        if not all(isinstance(name, str) for name in chat_template_kwargs or {}):
            raise RequestError(
                f"chat_template_kwargs is {quoted(chat_template_kwargs)}, expected names and values"
            )
        text = self.tokenizer.apply_chat_template(messages, **(chat_template_kwargs or {}))
        return self.tokenizer.encode(text, add_special_tokens=False, max_tokens=self.max_seq_len)

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        draft: bool,
        deadline: float | None = None,
        block_length: int | None = None,
        tree_nodes: int | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Request:
        """Make a request that this bundle can serve; tokenizes. `deadline` is a time of perf_counter. Raises
        RequestError.
        """
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params is {quoted(params)}, expected a SamplingParams")
        if not isinstance(cache_salt, str):
            raise RequestError(f"cache_salt is {quoted(cache_salt)}, expected a text")
        block_length, tree_nodes = self.checked(block_length, tree_nodes)
        if self.driver is not None:
            self.driver.check(params, draft=draft)
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
            form = params.structured_outputs
            structure = None if form is None else self._structures.compile(form)
            made = self._request(ids, params, draft, deadline, block_length, priority, structure)
            made.tree_nodes, made.cache_salt = tree_nodes, cache_salt
            return made
        except MemoryError as error:
            raise RequestError(
                f"the prompt has a length of {len(prompt)}: no memory is left for its request"
            ) from error

    def late_request(self, params: SamplingParams, deadline: float) -> Request:
        """A request whose deadline passed before its prompt was tokenized. It has no prompt, and ends in the next
        step.
        """
        return self._request([], params, False, deadline, None)

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
        draft: bool,
        deadline: float | None,
        block_length: int | None,
        priority: int = 0,
        structure: Structure | None = None,
    ) -> Request:
        eos = () if params.ignore_eos else tuple(self.bundle.manifest["eos_token_ids"])
        stop = StopChecker(params, eos, Detokenizer(self.tokenizer.backend))
        words, vocab = self._word_tokens(params.bad_words), self.bundle.manifest["vocab_size"]
        ends = [token for token in stop.end_tokens if token < vocab]
        return Request(
            prompt=ids,
            params=params,
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            stop=stop,
            history=History(params, ids, words, ends, structure) if params.adjusted else None,
            arrived=perf_counter(),
            draft=draft,
            deadline=deadline,
            block_length=block_length,
            priority=priority,
            statistics=Statistics(num_prompt_tokens=len(ids)),
        )

    def _word_tokens(self, words: Sequence[str]) -> list[list[int]]:
        """The token sequences of words: each at the start of a text, and after a space."""
        spellings = dict.fromkeys(spelling for word in words for spelling in (word, f" {word.lstrip()}"))
        return [ids for s in spellings if (ids := self.tokenizer.encode(s, add_special_tokens=False))]


def _plain(value: T) -> T:
    """An integer of any library, such as NumPy's, as Python's. Anything else stays as it is."""
    return cast(T, int(value)) if isinstance(value, Integral) and not isinstance(value, bool) else value


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


def new_adaptive(block_size: int, pair: Pair, max_batch_size: int, most_nodes: int = 0) -> AdaptiveLength:
    """The adaptive length of a pair. Times the pair's passes, which overwrites rows of slots 0 .. max_batch_size-1.

    most_nodes: the most nodes of a tree, whose times are followed too.
    """
    batches = [*(2**i for i in range(max_batch_size.bit_length()) if 2**i < max_batch_size), max_batch_size]
    lengths = sorted({n for n in (1, 2, 4, 8, 16, block_size) if n <= block_size})
    nodes = sorted({n for n in (16, most_nodes) if block_size < n <= most_nodes})
    return AdaptiveLength(
        block_size,
        measure(pair.rehearse_draft, batches, lengths[1:]),
        measure(pair.rehearse_verify, batches, lengths + nodes),
    )

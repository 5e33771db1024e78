"""The parameters and options of a request."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral, Real
from secrets import randbits
from typing import TYPE_CHECKING, Literal, TypedDict

from dflash_trt.errors import RequestError, UsageError, quoted
from dflash_trt.options import option

if TYPE_CHECKING:
    from dflash_trt.decoding.sampling.structure import StructuredOutputs

# "cancelled" and "timeout" come from the caller. "error" exists only in the metrics, for requests that ended by their
# own error; their caller gets that error.
FinishReason = Literal["stop", "length", "cancelled", "timeout", "error"]
MOST_WORDS = 1024  # for stop, bad_words, stop_token_ids and logit_bias
MOST_ALLOWED = 1 << 17  # for allowed_token_ids: they are checked in about 10 ms
MOST_CHARACTERS = 8192  # for stop, and for bad_words: the search takes 120 bytes of memory per character
MOST_SAMPLES = 128  # of one prompt, as in OpenAI's API
MOST_PRIORITY = 100  # either way; requests with lower numbers start first
MOST_LOGPROBS = 20  # for top_logprobs, as in OpenAI's API
_FLAGS = ("ignore_eos", "logprobs", "prompt_logprobs", "include_stop_str_in_output", "skip_special_tokens")
_LONG = 1e9  # seconds: practically no timeout
_SMALLEST = 2.0**-126  # the smallest normal float32; kernels may take smaller numbers for 0


@dataclass(frozen=True)
class SamplingParams:
    """The decoding parameters of one request, with vLLM's names. Raises RequestError naming the field.

    They apply in vLLM's order: `structured_outputs`, `allowed_token_ids`, bad words and `min_tokens`, bias, penalties,
    temperature, min-p, top-k, top-p.

    max_tokens: the most tokens to generate, stop token included.
    min_tokens: so many tokens are generated before an end token may come, or a stop string counts.
    temperature: 0 takes the most probable token; otherwise 0.01 to 100.
    top_k: keep the k most probable tokens; 0 keeps all.
    top_p: keep the smallest set that holds this probability, at least the best token. Numbers below 2**-126 keep only
        that token.
    min_p: keep tokens at least this fraction as probable as the most probable one.
    repetition_penalty: over prompt and output.
    presence_penalty, frequency_penalty: over the output.
    seed: 0 to 2**64 - 1; None draws one, reported in Completion.seed.
    stop: strings that end the text. They are not part of it.
    stop_token_ids: more end tokens, in addition to the model's own.
    include_stop_str_in_output: the text also has the stop string, or the text of the stop token.
    stop_outside: pairs of marks, such as ("<think>", "</think>"). A stop string does not count between the first and
        the second one. The pair that begins last counts. A pair whose first mark is "" has begun with the text.
    skip_special_tokens: special tokens have no text.
    ignore_eos: ignore the model's own end tokens. `stop` and `stop_token_ids` still end the text.
    bad_words: words that are not generated. Their token sequences, with and without a leading space, are never
        completed. Other tokens may still spell the same letters.
    allowed_token_ids: no other tokens are generated; None allows all. The model's end tokens must be among them to end
        the text.
    logit_bias: numbers from -100 to 100 that are added to the logits of these token ids.
    structured_outputs: the form that the whole text must have. It ends by the model's own end token.
    logprobs: report the natural logarithm of each token's probability under the target. It is that of the raw logits,
        before everything above.
    top_logprobs: also report the so many most probable tokens at each position, 0 to 20.
    prompt_logprobs: report the same for the prompt's tokens, from the second on. The prompt reuses no rows then.

    `stop` and `bad_words` have at most 1024 strings and 8192 characters each. `stop_token_ids` and `logit_bias` have
    at most 1024 ids, and `allowed_token_ids` at most 131,072.
    """

    max_tokens: int = option("most tokens to generate", "N", default=256)
    temperature: float = option("0 takes the most likely token", "T", default=0.0)
    top_k: int = option("sample from the K most likely tokens; 0: from all", "K", default=0)
    top_p: float = option("sample from the most likely tokens that reach probability P", "P", default=1.0)
    min_p: float = option("drop tokens below P times the most likely one", "P", default=0.0)
    repetition_penalty: float = option("divide the logits of tokens already seen by X", "X", default=1.0)
    presence_penalty: float = option(
        "subtract X from the logits of tokens already generated", "X", default=0.0
    )
    frequency_penalty: float = option("the same, for each time it was generated", "X", default=0.0)
    seed: int | None = option(
        "the same seed gives the same tokens (default: a random one)", "N", default=None
    )
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    stop_outside: Sequence[Sequence[str]] = ()
    skip_special_tokens: bool = True
    ignore_eos: bool = option("do not end at the model's stop tokens", default=False)
    bad_words: Sequence[str] = ()
    min_tokens: int = option("least tokens before the text may end", "N", default=0)
    allowed_token_ids: Sequence[int] | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    structured_outputs: StructuredOutputs | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: bool = False

    def __post_init__(self) -> None:
        self._integer("max_tokens", 1, 2**31 - 1)
        self._integer("min_tokens", 0, 2**31 - 1)
        if self.min_tokens > self.max_tokens:
            raise UsageError(
                f"min_tokens is {self.min_tokens}, expected at most max_tokens ({self.max_tokens})"
            )
        self._integer("top_logprobs", 0, MOST_LOGPROBS)
        self._integer("top_k", 0, 2**31 - 1)
        if self.seed is not None:
            self._integer("seed", 0, 2**64 - 1)
        self._number("temperature", 0.01, 100, "0 (greedy) or ", zero=True)
        self._number("top_p", 0, 1, "above ", open_low=True)
        object.__setattr__(self, "top_p", max(self.top_p, _SMALLEST))
        self._number("min_p", 0, 1)
        self._number("repetition_penalty", 0.01, 100)
        self._number("presence_penalty", -100, 100)
        self._number("frequency_penalty", -100, 100)
        for name in _FLAGS:
            if not isinstance(getattr(self, name), (bool, *_of_numpy("bool_"))):
                raise UsageError(f"{name} is {quoted(getattr(self, name))}, expected True or False")
            object.__setattr__(self, name, bool(getattr(self, name)))
        if (form := self.structured_outputs) is not None:
            from dflash_trt.decoding.sampling.structure import StructuredOutputs  # needs NumPy

            if not isinstance(form, StructuredOutputs):
                raise UsageError(f"structured_outputs is {quoted(form)}, expected a StructuredOutputs")
            if self.ignore_eos:
                raise UsageError(
                    "ignore_eos is True, but structured_outputs ends by the model's own end token"
                )
        if self.top_logprobs and not (self.logprobs or self.prompt_logprobs):
            raise UsageError(
                f"top_logprobs is {self.top_logprobs}, but logprobs and prompt_logprobs are False: ask for one of them"
            )
        stop = (self.stop,) if isinstance(self.stop, str) else self._items("stop")
        bad_words = self._items("bad_words")
        for name, words in (("stop", stop), ("bad_words", bad_words)):
            if wrong := [s for s in words if not isinstance(s, str) or not s]:
                raise UsageError(f"{name} contains {quoted(wrong[0])}, expected non-empty strings")
            if (size := sum(len(s) for s in words if isinstance(s, str))) > MOST_CHARACTERS:
                raise UsageError(f"{name} has {size} characters, expected at most {MOST_CHARACTERS}")
        ids = tuple(token_ids(self._items("stop_token_ids"), "stop_token_ids"))
        if ids and min(ids) < 0:
            raise UsageError(f"stop_token_ids contains {quoted(min(ids))}, expected token ids (0 or more)")
        marks = tuple(
            tuple(pair) if isinstance(pair, list | tuple) else () for pair in self._items("stop_outside")
        )
        if wrong := [p for p in marks if len(p) != 2 or not all(isinstance(m, str) for m in p) or not p[1]]:
            raise UsageError(f"stop_outside contains {quoted(list(wrong[0]))}, expected pairs of marks")
        if self.allowed_token_ids is not None:
            if not _is_list(self.allowed_token_ids):
                raise UsageError(f"allowed_token_ids is {quoted(self.allowed_token_ids)}, expected a list")
            if (count := len(self.allowed_token_ids)) > MOST_ALLOWED:
                raise UsageError(f"allowed_token_ids has {count} ids, expected at most {MOST_ALLOWED}")
            allowed = tuple(dict.fromkeys(token_ids(self.allowed_token_ids, "allowed_token_ids")))
            if not allowed or min(allowed) < 0:
                raise UsageError(
                    f"allowed_token_ids is {quoted(list(allowed))}, expected at least one token id (0 or more)"
                )
            object.__setattr__(self, "allowed_token_ids", allowed)
        lists = {"stop": stop, "stop_outside": marks, "stop_token_ids": ids, "bad_words": bad_words}
        for name, value in {**lists, "logit_bias": self._biases()}.items():
            object.__setattr__(self, name, value)

    @property
    def penalized(self) -> bool:
        """Whether a penalty applies."""
        return any((self.repetition_penalty - 1, self.presence_penalty, self.frequency_penalty))

    @property
    def adjusted(self) -> bool:
        """Whether the logits are adjusted before the temperature. Then a History is needed, and the host decides."""
        return self.penalized or bool(
            self.bad_words
            or self.logit_bias
            or self.min_tokens
            or self.structured_outputs
            or self.allowed_token_ids
        )

    @cached_property  # asked in every round
    def greedy(self) -> bool:
        """Whether the token is the plain argmax of the logits, which the graph computes itself."""
        return self.temperature == 0 and not self.adjusted

    def samples(self, n: int) -> list[SamplingParams]:
        """Parameters for `n` samples of one prompt, with distinct seeds.

        Sample i has the seed of these parameters plus i, modulo 2**64. So each sample can be had alone, too. Without a
        seed, the first is drawn. Raises RequestError.
        """
        if integer("n", n, 1, MOST_SAMPLES) == 1:
            return [self]
        first = randbits(64) if self.seed is None else self.seed
        samples = [copy(self) for _ in range(n)]
        for i, sample in enumerate(samples):  # all but the seed was checked already
            object.__setattr__(sample, "seed", (first + i) % 2**64)
        return samples

    def _integer(self, field: str, low: int, high: int) -> None:
        object.__setattr__(self, field, integer(field, getattr(self, field), low, high))

    def _number(
        self,
        field: str,
        low: float,
        high: float,
        note: str = "",
        *,
        open_low: bool = False,
        zero: bool = False,
    ) -> None:
        value = getattr(self, field)
        real = isinstance(value, Real) and not isinstance(value, bool)
        if not real or not (low <= value <= high or (zero and value == 0)) or (open_low and value == low):
            raise UsageError(f"{field} is {quoted(value)}, expected {note}{low} to {high}")
        object.__setattr__(self, field, float(value))

    def _biases(self) -> dict[int, float]:
        if not isinstance(self.logit_bias, Mapping):
            raise UsageError(f"logit_bias is {quoted(self.logit_bias)}, expected token ids with numbers")
        if len(self.logit_bias) > MOST_WORDS:
            raise UsageError(f"logit_bias has {len(self.logit_bias)} ids, expected at most {MOST_WORDS}")
        ids = token_ids(list(self.logit_bias), "logit_bias")
        if ids and min(ids) < 0:
            raise UsageError(f"logit_bias has token id {quoted(min(ids))}, expected token ids (0 or more)")
        for token, bias in self.logit_bias.items():
            if not isinstance(bias, Real) or isinstance(bias, bool) or not -100 <= bias <= 100:
                raise UsageError(f"logit_bias[{token}] is {quoted(bias)}, expected -100 to 100")
        return {token: float(bias) for token, bias in zip(ids, self.logit_bias.values(), strict=True)}

    def _items(self, field: str) -> tuple[object, ...]:
        value = getattr(self, field)
        if isinstance(value, str | bytes | bytearray) or not _is_list(value):
            raise UsageError(f"{field} is {quoted(value)}, expected a list")
        if len(value) > MOST_WORDS:
            what = "ids" if field.endswith("_ids") else "strings"
            raise UsageError(f"{field} has {len(value)} {what}, expected at most {MOST_WORDS}")
        return tuple(value)


def _of_numpy(name: str) -> tuple[type, ...]:
    """A class of NumPy, where it was imported: elsewhere there are no values of it. Help texts need no NumPy."""
    numpy = sys.modules.get("numpy")
    return () if numpy is None else (getattr(numpy, name),)


def _is_list(value: object) -> bool:
    return isinstance(value, (Sequence, *_of_numpy("ndarray")))


def integer(name: str, value: object, low: int, high: int | None = None) -> int:
    """An integer of any library, such as NumPy's, as Python's. Raises UsageError naming a value that is out of range,
    or none.
    """
    if isinstance(value, Integral) and not isinstance(value, bool):
        value = int(value)
        if low <= value and (high is None or value <= high):
            return value
    most = "or more" if high is None else f"to {high}"
    raise UsageError(f"{name} is {quoted(value)}, expected an integer, {low} {most}")


def token_ids(values: Collection[object], name: str) -> list[int]:
    """Token ids as Python integers. Raises RequestError naming a value that is not an integer: a float, a bool,
    bytes.
    """
    kinds = set(map(type, values))
    if kinds == {int}:
        return list(values)  # type: ignore[arg-type]
    if others := {kind for kind in kinds if not issubclass(kind, Integral) or issubclass(kind, bool)}:
        wrong = next(value for value in values if type(value) in others)
        raise UsageError(
            f"{name} contains {quoted(wrong)}, a {type(wrong).__name__}, expected token ids: integers"
        )
    return [int(value) for value in values]  # type: ignore[call-overload]


_SOURCES = ("drafter", "lookup", "drafter,lookup", "lookup,drafter")


class DraftingOptions(TypedDict, total=False):
    """Keyword arguments of `LLM`'s methods. `RequestOptions` describes them."""

    speculate: bool
    block_length: int | None
    tree_nodes: int | None
    draft_source: str


class ServingOptions(DraftingOptions, total=False):
    """Keyword arguments of `AsyncLLM`'s methods. `RequestOptions` describes them."""

    timeout: float | None
    priority: int
    cache_salt: str
    count_prompt: bool


@dataclass(frozen=True)
class RequestOptions:
    """How a request is decoded and served. No option changes the tokens. Raises RequestError naming the option.

    speculate: whether the request takes drafts.
    block_length: tokens verified per round, 1 to the block size. None: each round drafts and verifies the number that
        is expected to be fastest, or none (`AdaptiveLength`).
    tree_nodes: for bundles built with `--tree-width`: the tokens of the tree that each round verifies, including the
        newest token. 0 verifies chains. None: a round verifies a tree where that is expected to be faster.
    draft_source: where drafts may come from: "drafter", "lookup" (the request's own text), or "drafter,lookup".
    timeout: seconds after which the request ends with finish_reason "timeout".
    priority: -100 to 100. Each step counts like a second in the queue, and the lowest starts first.
    cache_salt: the request reuses the cache rows of requests with the same one only.
    count_prompt: whether the metrics count the prompt's tokens. Further samples of a prompt leave them out.

    For `LLM`, block_length and tree_nodes are those of every round of a call. `AsyncLLM` has its own for all rounds.
    There a request's block_length is the most that rounds verify for it, and its tree_nodes the most nodes of trees in
    its rounds, also for the other requests of the batch.
    """

    speculate: bool = True
    block_length: int | None = None
    tree_nodes: int | None = None
    draft_source: str = "drafter,lookup"
    timeout: float | None = None
    priority: int = 0
    cache_salt: str = ""
    count_prompt: bool = True

    @property
    def takes_drafter(self) -> bool:
        """Whether drafts may come from the drafter."""
        return "drafter" in self.draft_source

    @property
    def takes_lookup(self) -> bool:
        """Whether drafts may come from the request's own text."""
        return "lookup" in self.draft_source

    def __post_init__(self) -> None:
        timeout = self.timeout
        if timeout is not None:
            if not isinstance(timeout, Real) or isinstance(timeout, bool) or not timeout >= 0:
                raise RequestError(f"timeout is {quoted(timeout)}, expected seconds, 0 or more")
            object.__setattr__(self, "timeout", float(min(timeout, _LONG)))
        priority = integer("priority", self.priority, -MOST_PRIORITY, MOST_PRIORITY)
        object.__setattr__(self, "priority", priority)
        if not isinstance(self.draft_source, str) or self.draft_source not in _SOURCES:
            raise RequestError(
                f"draft_source is {quoted(self.draft_source)}, expected drafter, lookup, or drafter,lookup"
            )
        if not isinstance(self.cache_salt, str):
            raise RequestError(f"cache_salt is {quoted(self.cache_salt)}, expected a text")
        for name in ("block_length", "tree_nodes"):  # `check` knows their limits
            value = getattr(self, name)
            if isinstance(value, Integral) and not isinstance(value, bool):
                object.__setattr__(self, name, int(value))

    def check(self, block_size: int, most_tree_nodes: int, *, drafter: bool = True) -> None:
        """Raise RequestError if a bundle of this block size does not support them.

        most_tree_nodes: the most nodes of a tree that a pass verifies; 0 if it takes chains only.
        drafter: whether the bundle has one.
        """
        length, nodes = self.block_length, self.tree_nodes
        if self.draft_source == "drafter" and not drafter:
            raise UsageError(
                "draft_source is drafter, but this bundle has none: leave it out, or give lookup"
            )
        if length is not None and not (type(length) is int and 1 <= length <= block_size):
            raise UsageError(
                f"block_length is {quoted(length)}, expected 1..{block_size} (this bundle's block size); "
                "leave it out for the default"
            )
        if nodes is None or (type(nodes) is int and nodes == 0):
            return
        if not most_tree_nodes:
            raise UsageError(
                f"tree_nodes is {quoted(nodes)}, but this bundle drafts chains: build it with --tree-width 2 or more, "
                "or open it without exact, if that refuses its trees on this machine"
            )
        if type(nodes) is not int or not 2 <= nodes <= most_tree_nodes:
            raise UsageError(
                f"tree_nodes is {quoted(nodes)}, expected 2..{most_tree_nodes}, or 0 for chains; leave it out for the "
                "default"
            )

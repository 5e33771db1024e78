"""The pair that `selftest` checks, beside its reference, and the passes that the checks run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dflash_trt.bundle.manifest import Bundle
from dflash_trt.decoding.draft import Draft
from dflash_trt.decoding.pair import Pair
from dflash_trt.decoding.params import RequestOptions, SamplingParams
from dflash_trt.decoding.request import Request
from dflash_trt.decoding.widths import cache_rows
from dflash_trt.engines.base import PREFILL_CHUNK
from dflash_trt.engines.registry import engine_of
from dflash_trt.errors import BundleError
from dflash_trt.llm import LLM
from dflash_trt.reports.localize import Compared, Limits, Localizer, centred, deviation

Array = np.ndarray[Any, Any]
# Tokens of the prompt that the passes read, beyond the shortest window where there is one.
_PROMPT = 24


class Failure(Exception):
    """What is wrong."""


class Skip(Exception):
    """Why a check cannot run here."""


class Subject:
    """A bundle and its reference, with a random prompt, and a random block after it. The passes write its slots.

    reference: the same pair built for ONNX Runtime, from the same checkpoints.
    """

    def __init__(self, bundle: Path, reference: Path | None = None) -> None:
        self.bundle, self.reference_path = Bundle.open(bundle), reference
        engine = engine_of(self.bundle)
        if engine.own_loop:
            raise BundleError(
                f"{bundle}: --engine {engine.name} runs its passes by itself, and `selftest` reads passes; use `verify`"
            )
        self.reference: LLM | None = None
        self.limits = Limits(self.bundle.manifest)
        self.localizer: Localizer | None = None
        self._llm: LLM | None = None
        self._expected: list[tuple[Array, Array]] = []  # the reference's drafts and their log-probabilities
        manifest, rng = self.bundle.manifest, np.random.default_rng(0)
        chunk = min(PREFILL_CHUNK, manifest.get("tensorrt", {}).get("prefill_chunk", PREFILL_CHUNK))
        windows = [kind.window or 0 for kind in self.bundle.cache_kinds("target")]
        lengths = [_PROMPT + window for window in sorted(windows) if 0 < window <= chunk - _PROMPT]
        self.length = max(2, min(chunk, *lengths[:1] or [_PROMPT], self.bundle.capacity // 3))
        self.prompt: list[int] = rng.integers(0, manifest["vocab_size"], self.length).tolist()
        self.block: list[int] = rng.integers(0, manifest["vocab_size"], manifest["block_size"]).tolist()

    @property
    def loaded(self) -> bool:
        """Whether the bundle is loaded. Only `integrity` runs without."""
        return self._llm is not None

    @property
    def compared(self) -> list[Compared]:
        """What `layers` has compared with the reference."""
        return [] if self.localizer is None else self.localizer.compared

    @property
    def llm(self) -> LLM:
        assert self._llm is not None
        return self._llm

    @property
    def pair(self) -> Pair:
        return self.llm._runtime.pair

    def close(self) -> None:
        for llm in (self._llm, self.reference):
            if llm is not None:
                llm.close()

    def _prefill(
        self,
        tokens: Sequence[int] | None = None,
        start: int = 0,
        slot: int = 0,
        *,
        pair: Pair | None = None,
        draft: bool = False,
    ) -> Array:
        """The logits [1, V] after these tokens of the prompt, or all of it."""
        pair = pair or self.pair
        logits = np.array(pair.prefill(tokens or self.prompt, start, slot, draft=draft)[0])
        pair.drafter.catch_up(slot)
        return logits

    def _verify(self, count: int = 1, length: int | None = None, *, pair: Pair | None = None) -> Array:
        """The logits [count, N, V] of the block's first tokens after the prompt, in so many slots."""
        return (pair or self.pair).logits([self.block[:length]] * count, [self.length] * count)

    def _rows(self, slot: int, start: int, stop: int) -> list[Array]:
        """Rows of the target's caches, once the passes that write them have ended."""
        return [rows for _, rows in cache_rows(self.pair, "target", slot, start, stop)]

    def _drafted(self, pair: Pair) -> list[Array]:
        """Log-probabilities of the drafts of two rounds. The reference drafts first.

        After a token that the reference did not draft, a drafter may go on otherwise: there its numbers are taken, and
        its tokens are verified, so that the rows of both remain the same.
        """
        ours = self.reference is None or pair is not self.reference._runtime.pair
        self._prefill(pair=pair, draft=True)
        request, logprobs = self._request(self.block[0]), []
        if not ours:
            self._expected = []
        for i in range(2):
            draft = pair.drafter.propose([request], len(self.block))
            tokens, given = np.array(draft.tokens), np.array(draft.logprobs)[0]
            if not ours:
                self._expected.append((tokens, given))
            elif not np.array_equal(tokens, self._expected[i][0]):
                first = int(np.argmax(tokens[0] != self._expected[i][0][0]))  # a draft of logprobs[first - 1]
                tokens, theirs = self._expected[i]
                given = np.concatenate([given[:first], theirs[first:]])
                draft = Draft(tokens, None, theirs[None])
            pair.verify([request], draft)
            logprobs.append(given)
            pair.commit(request, 0, [0, 1])
            request.committed += 2
        return logprobs

    def _request(self, anchor: int) -> Request:
        """A request in slot 0 whose prompt was read."""
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        request = self.llm._runtime.request(self.prompt, params, RequestOptions())
        request.slot, request.committed = 0, self.length
        request.output.append(anchor)
        return request

    def _close(self, what: str, a: Array, b: Array, largest: float | None = None) -> float:
        """The deviation of logits. Raises Failure if rounding does not explain it.

        largest: that of the target's logits, where these are the drafter's log-probabilities. They err like it.
        """
        kind = ("target", "logits") if largest is None else ("drafter", "log-probabilities")
        if largest is None:
            a, b = centred(a), centred(b)
        error, limit = deviation(a, b, size=largest, median=self.limits.experts), self.limits.of(*kind)
        if error > limit:
            raise Failure(f"{what} differ by {error:.2g} of their size, where rounding explains {limit:.2g}")
        return float(f"{error:.3g}")

    def _generate(self, params: SamplingParams) -> list[int]:
        return list(self.llm.generate(self.prompt, params).token_ids)


def chain(tokens: Sequence[int]) -> Draft:
    """A draft of one request with these nodes."""
    return Draft(np.array([tokens]), None, np.zeros((1, len(tokens) - 1)))

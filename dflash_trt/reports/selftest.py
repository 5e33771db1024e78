"""Check a bundle on the machine that will run it: what can be wrong, from the simplest to the whole.

Each check says what it proves. A failed check names its cause as closely as it can, because later checks fail, too, if
an earlier one does. The checks run passes on slots of their own, and none of them knows the engine.
"""

from __future__ import annotations

import faulthandler
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from dflash_trt.bundle.manifest import Bundle
from dflash_trt.decoding.draft import Draft
from dflash_trt.decoding.options import RequestOptions
from dflash_trt.decoding.pair import Pair
from dflash_trt.decoding.params import SamplingParams
from dflash_trt.decoding.request import Request
from dflash_trt.decoding.widths import cache_rows
from dflash_trt.engines.base import PREFILL_CHUNK
from dflash_trt.errors import DFlashError
from dflash_trt.llm import LLM
from dflash_trt.reports.environment import describe
from dflash_trt.reports.localize import Localizer, write_archive
from dflash_trt.reports.rounding import PART, Limits, centred, deviation
from dflash_trt.reports.verification import Case, Difference, chains, verify

Array = np.ndarray[Any, Any]
FORMAT = "dflash-trt selftest"
# Tokens of the prompt that the passes read, beyond the shortest window where there is one.
_PROMPT = 24
# So many drafts are not all right by chance, where ONNX Runtime's are not.
_DRAFTS = 8
# The number of the check that loads the bundle.
_LOADING = 2


@dataclass
class Check:
    """One check's result. `state` is passed, failed, skipped or timed out."""

    name: str
    proves: str
    state: str = "running"
    detail: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


class Failure(Exception):
    """What a check found wrong."""


class Skip(Exception):
    """Why a check cannot run here."""


class Selftest:
    """The checks of a bundle, in order.

    reference: the same pair built for ONNX Runtime, from the same checkpoints.
    """

    def __init__(self, bundle: Path, reference: Path | None = None) -> None:
        self.bundle, self.reference_path = Bundle.open(bundle), reference
        self.reference: LLM | None = None
        self.limits = Limits(self.bundle.manifest)
        self.localizer: Localizer | None = None
        self._llm: LLM | None = None
        self._expected: list[tuple[Array, Array]] = []  # the reference's drafts and their log-probabilities
        self._header: dict[str, Any] = {}
        rng = np.random.default_rng(0)
        vocab = self.bundle.manifest["vocab_size"]
        self.block: int = self.bundle.manifest["block_size"]
        chunk = min(
            PREFILL_CHUNK, self.bundle.manifest.get("tensorrt", {}).get("prefill_chunk", PREFILL_CHUNK)
        )
        windows = [kind.window or 0 for kind in self.bundle.cache_kinds("target")]
        lengths = [_PROMPT + window for window in sorted(windows) if 0 < window <= chunk - _PROMPT]
        self.length = max(2, min(chunk, *lengths[:1] or [_PROMPT], self.bundle.capacity // 3))
        self.prompt: list[int] = rng.integers(0, vocab, self.length).tolist()
        self.tokens: list[int] = rng.integers(0, vocab, self.block).tolist()
        self.checks: list[tuple[str, str, Callable[[], dict[str, Any]]]] = [
            ("environment", "the versions and the machine that a report is about", self.environment),
            ("integrity", "the engines take and give what the manifest says", self.integrity),
            ("kernels", "each kernel gives its reference's numbers, and the host's tokens", self.kernels),
            ("cache writes", "a pass writes its rows, and no others", self.cache_writes),
            ("copies", "rows that are copied or kept give the same logits", self.copies),
            ("prefill", "a pass is over when its numbers are read", self.prefill),
            ("layers", "every layer's numbers are right, of the target and the drafter", self.layers),
            ("chunks", "prefill in parts and verification give the logits of one prefill", self.chunks),
            ("batch", "a sequence does not depend on other slots", self.batch),
            ("replay", "a recorded pass repeats the plain one", self.replay),
            ("drafts", "the drafter reads the target's latest features", self.drafts),
            ("acceptance", "drafts of the target itself are accepted", self.acceptance),
            ("tokens", "drafting changes no token, greedy or sampled", self.verified_tokens),
            ("time", "seconds of a pass, beside the bytes of its weights", self.time),
        ]

    def run(self, report: Path, limit: float) -> Iterator[Check]:
        """Run each check for `limit` seconds at most, and keep `report` up to date.

        A check that takes longer ends the process: a pass on a device cannot be interrupted.
        """
        done: list[Check] = []
        for name, proves, check in self.checks:
            result = Check(name, proves)
            done.append(result)
            timer = threading.Timer(limit, _give_up, (report, self.header(), done, limit))
            timer.daemon = True
            timer.start()
            begin = perf_counter()
            try:
                if self._llm is None and len(done) > _LOADING:
                    raise Skip("the bundle did not load")
                result.figures = check()
                result.state = "passed"
            except Skip as reason:
                result.state, result.detail = "skipped", str(reason)
            except Failure as error:
                result.state, result.detail = "failed", str(error)
            except Exception as error:
                result.state, result.detail = "failed", f"{type(error).__name__}: {error}"
            timer.cancel()
            result.seconds = round(perf_counter() - begin, 3)
            write_report(report, self.header(), done)
            yield result

    def header(self) -> dict[str, Any]:
        if not self._header:
            fields = {name: value for name, value in self.bundle.manifest.items() if name != "files"}
            self._header = {"bundle": fields, "machine": describe()}
        return self._header

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

    def environment(self) -> dict[str, Any]:
        machine = self.header()["machine"]
        return {"dflash_trt": machine["dflash_trt"], "gpus": machine["gpus"], "cpu": machine["cpu"]}

    def integrity(self) -> dict[str, Any]:
        try:
            self._llm = LLM(self.bundle.path)
            if self.reference_path is not None:
                self.reference = LLM(self.reference_path)
        except DFlashError as error:
            raise Failure(str(error)) from error
        problems = getattr(self.pair.arrays, "problems", None)
        if problems is not None and (faults := problems(self.bundle.manifest)):
            raise Failure("; ".join(faults))
        return {"slots": self.pair.slots, "capacity": self.pair.capacity}

    def kernels(self) -> dict[str, Any]:
        arrays: Any = self.pair.arrays
        if not getattr(arrays, "samples", False):
            raise Skip("no kernels run between passes here, and the host samples")
        faults = {name: problem for name, problem in arrays.kernel_problems().items() if problem}
        if faults:
            raise Failure("; ".join(f"{name}: {problem}" for name, problem in faults.items()))
        params = SamplingParams(temperature=0.9, top_p=0.9, top_k=40, max_tokens=12, seed=7, ignore_eos=True)
        there = self._generate(params)
        arrays.samples = False
        try:
            here = self._generate(params)
        finally:
            arrays.samples = True
        _same("tokens sampled on the device and on the host", there, here)
        return {"tokens": len(here)}

    def cache_writes(self) -> dict[str, Any]:
        last = self.pair.slots - 1
        self._prefill(self.prompt, slot=last)
        self._prefill(self.prompt, slot=0)
        n = self.length
        before = [self._rows(slot, 0, n) for slot in (0, last)]
        self._verify(1)
        after = [self._rows(slot, 0, n) for slot in (0, last)]
        for slot, old, new in zip((0, last), before, after, strict=True):
            if any(not np.array_equal(a, b) for a, b in zip(old, new, strict=True)):
                raise Failure(
                    f"a pass that writes from row {n} of slot 0 on changed earlier rows of slot {slot}"
                )
        written = self._rows(0, n, n + self.block)
        if not all(np.abs(rows).max() > 0 for rows in written):
            raise Failure(f"a pass did not write rows {n} to {n + self.block - 1}")
        return {"caches": len(written)}

    def copies(self) -> dict[str, Any]:
        self._prefill(self.prompt)
        expected, last = self._verify(1)[0], self.pair.slots - 1
        length = self.pair.lengths(0, self.length, draft=False)[0][-1]
        kept = self.pair.keep(0, 0, length, length, draft=False)
        self.pair.clear(0)
        self.pair.restore(0, [kept], length, draft=False)
        errors = {"kept": self._continued("kept and restored", length, expected)}
        if last:
            _prefill(self.pair, self.prompt, 0, last)
            length = self.pair.lengths(last, self.length, draft=False)[0][-1]
            self.pair.clear(0)
            self.pair.copy(last, 0, length, draft=False)
            errors["copied"] = self._continued(f"copied from slot {last}", length, expected)
        return errors

    def _continued(self, how: str, length: int, expected: Array) -> float:
        """Read what the first `length` rows of slot 0 lack of the prompt, and verify."""
        if length < self.length:
            _prefill(self.pair, self.prompt[length:], length, 0)
        return self._close(f"logits after {length} rows that were {how}", self._verify(1)[0], expected)

    def prefill(self) -> dict[str, Any]:
        first = self._prefill(self.prompt)
        self.pair.arrays.wait()
        if not np.array_equal(first, self._prefill(self.prompt)):
            raise Failure(
                "two equal passes differ: a result was read before its pass had ended, or memory is shared"
            )
        return {}

    def layers(self) -> dict[str, Any]:
        if self.reference is None:
            raise Skip("give --reference to compare the numbers with ONNX Runtime's")
        self.localizer = Localizer(self.pair, self.reference._runtime.pair, self.limits)
        length, block = self.length, self.tokens
        self.localizer.run(
            [
                (
                    *("prefill", ("target", "drafter"), (0, length), "logits"),
                    lambda pair: _prefill(pair, self.prompt, 0, 0, draft=True),
                ),
                (
                    *("verification", ("target",), (length, length + len(block)), "logits"),
                    lambda pair: _verify(pair, [block], length)[0],
                ),
                (
                    "draft",
                    ("drafter",),
                    (0, length),
                    "log-probabilities",
                    lambda pair: self._drafted(pair)[0],
                ),
            ]
        )
        if self.localizer.first is not None:
            raise Failure(self.localizer.describe())
        worst = max(each.error / each.limit for each in self.localizer.compared)
        return {"share of what rounding explains": round(worst, 3)}

    def chunks(self) -> dict[str, Any]:
        whole, n = self._prefill(self.prompt), self.length
        self._prefill(self.prompt[: n // 2])
        split = _prefill(self.pair, self.prompt[n // 2 :], n // 2, 0)
        errors = {"split": self._close("logits of a prompt in one part and in two", split, whole)}
        rows = min(self.block, n - 1)
        self._prefill(self.prompt[: n - rows])
        logits = _verify(self.pair, [self.prompt[n - rows :]], n - rows)[0, -1]
        errors["verified"] = self._close("logits of prefill and of verification", logits, whole)
        return errors

    def batch(self) -> dict[str, Any]:
        if self.pair.slots == 1:
            raise Skip("the bundle has one slot")
        self._prefill(self.prompt)
        alone = self._verify(1)[0]
        for slot in range(1, self.pair.slots):
            _prefill(self.pair, self.tokens[::-1], 0, slot)
        together = self._verify(self.pair.slots)[0]
        return {"error": self._close("logits of a sequence alone and in a batch", together, alone)}

    def replay(self) -> dict[str, Any]:
        self._prefill(self.prompt)
        short = max(1, self.block // 2)
        by_length: dict[int, Array] = {}
        for length in (self.block, short) * 3:
            logits = self._verify(1, length)[0]
            if not np.array_equal(by_length.setdefault(length, logits), logits):
                raise Failure(f"a pass of {length} tokens gave other logits when it was repeated")
        return {}

    def drafts(self) -> dict[str, Any]:
        """Two rounds: the second one reads features of the first verification."""
        if self.reference is None:
            raise Skip("give --reference to compare them with ONNX Runtime's")
        expected, drafted = self._drafted(self.reference._runtime.pair), self._drafted(self.pair)
        largest = float(np.abs(centred(self._prefill(self.prompt))).max())
        errors = {}
        for which, ours, theirs in zip(("prefill", "verification"), drafted, expected, strict=True):
            what = f"the drafter's log-probabilities after a {which} and ONNX Runtime's"
            errors[f"after a {which}"] = self._close(
                what, ours, theirs, "drafter", "log-probabilities", largest
            )
        return errors

    def acceptance(self) -> dict[str, Any]:
        """The target's own greedy tokens as a draft: all are accepted."""
        params = SamplingParams(max_tokens=self.block, ignore_eos=True)
        greedy = self._generate(params)
        logits = self._prefill(self.prompt)
        if int(np.argmax(logits)) != greedy[0]:
            raise Failure(f"the greedy token is {int(np.argmax(logits))}, but generation gave {greedy[0]}")
        request = self._request(self.prompt, greedy[0])
        verdict = self.pair.verify([request], Draft(np.array([greedy]), None, np.zeros((1, self.block - 1))))
        accepted = int(np.asarray(verdict.accepted)[0])
        if accepted != self.block - 1:
            raise Failure(f"{accepted} of {self.block - 1} drafts that the target would choose were accepted")
        return {"accepted": accepted}

    def verified_tokens(self) -> dict[str, Any]:
        figures: dict[str, Any] = {}
        for case in self._drafting(self.llm):
            name = f"temperature {case.temperature:g}, block {case.block_length or 'auto'}"
            figures[name] = round(case.mean_acceptance_length, 3)
            if case.first_difference is not None and not self._tied(case.first_difference):
                raise Failure(f"{name}: drafting changed tokens: {case.first_difference}")
            if case.accepted == 1 and case.drafted >= _DRAFTS and self.reference is not None:
                (expected,) = self._drafting(self.reference, case)
                if expected.drafted and expected.accepted < 1:
                    raise Failure(
                        f"{name}: all {case.drafted} drafts were accepted, but {expected.accepted:.2f} of ONNX "
                        "Runtime's: the drafter reads what it should predict, or is not the one that drafts"
                    )
        return {"mean_acceptance_length": figures}

    def _tied(self, difference: Difference) -> bool:
        """Whether rounding explains which of two tokens won. Passes of other widths may round a logit otherwise."""
        if difference.plain_token is None or difference.drafted_token is None:
            return False
        return difference.margin is None or abs(difference.margin) <= PART * self.limits.of(
            "target", "logits"
        )

    def _drafting(self, llm: LLM, like: Case | None = None) -> Iterator[Case]:
        """A short answer with and without drafts: at temperature 0 and 1, or as `like`."""
        from dflash_trt.prompts import Prompt

        return verify(
            llm,
            [Prompt(id="selftest", category="selftest", content="The capital of France is")],
            temperatures=[0.0, 1.0] if like is None else [like.temperature],
            ways=chains((self.block, None) if like is None else [like.block_length]),
            batch_sizes=[1],
            max_tokens=min(32, self.bundle.capacity // 3),
        )

    def time(self) -> dict[str, Any]:
        self._prefill(self.prompt)
        seconds = []
        for _ in range(9):
            self._verify(1)
            seconds.append(self.pair.verify_time)
        weights = self.bundle.manifest["target"].get("weight_bytes", {})
        size = sum(sum(kind.values()) for kind in weights.values())
        middle = float(np.median(seconds))
        return {
            "verify_seconds": middle,
            "weight_bytes": size,
            "bytes_per_second": round(size / middle) if middle > 0 else None,
        }

    def localize(self, report: Path, archive: Path) -> str:
        """What `layers` found, in words. Writes the archive of a bug report."""
        if self.localizer is None:
            raise DFlashError(
                f"{self.bundle.path}: did not load, or has no --reference; layers are compared with "
                "ONNX Runtime's"
            )
        tokens = {"prompt": self.prompt, "block": self.tokens}
        written = json.loads(report.read_text(encoding="utf-8"))
        write_archive(archive, self.localizer, written, tokens, self.bundle.path)
        return self.localizer.describe()

    def _prefill(self, tokens: Sequence[int], slot: int = 0) -> Array:
        return _prefill(self.pair, tokens, 0, slot)

    def _verify(self, count: int, length: int | None = None) -> Array:
        return _verify(self.pair, [self.tokens[: length or self.block]] * count, self.length)

    def _rows(self, slot: int, start: int, stop: int) -> list[Array]:
        """Rows of the target's caches, once the passes that write them have ended."""
        return [rows for _, rows in cache_rows(self.pair, "target", slot, start, stop)]

    def _drafted(self, pair: Pair) -> list[Array]:
        """Log-probabilities of the drafts of two rounds. The reference drafts first.

        After a token that the reference did not draft, a drafter may go on otherwise: there its numbers are taken, and
        its tokens are verified, so that the rows of both remain the same.
        """
        ours = self.reference is None or pair is not self.reference._runtime.pair
        _prefill(pair, self.prompt, 0, 0, draft=True)
        request, logprobs = self._request(self.prompt, self.tokens[0]), []
        if not ours:
            self._expected = []
        for i in range(2):
            draft = pair.propose([request], self.block)
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

    def _request(self, prompt: Sequence[int], anchor: int) -> Request:
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        request = self.llm._runtime.request(list(prompt), params, RequestOptions())
        request.slot, request.committed = 0, len(prompt)
        request.output.append(anchor)
        return request

    def _close(
        self,
        what: str,
        a: Array,
        b: Array,
        model: str = "target",
        tensor: str = "logits",
        size: float | None = None,
    ) -> float:
        """Their deviation. Raises Failure if rounding does not explain it."""
        if tensor == "logits":
            a, b = centred(a), centred(b)
        error, limit = deviation(a, b, size=size, median=self.limits.experts), self.limits.of(model, tensor)
        if error > limit:
            raise Failure(f"{what} differ by {error:.2g} of their size, where rounding explains {limit:.2g}")
        return float(f"{error:.3g}")

    def _generate(self, params: SamplingParams) -> list[int]:
        return list(self.llm.generate(self.prompt, params).token_ids)


def write_report(report: Path, header: dict[str, Any], checks: Sequence[Check]) -> None:
    """Write the report, so that a reader never sees a part of it."""
    partial = report.with_name(report.name + ".part")
    content = {"format": FORMAT, **header, "checks": [asdict(check) for check in checks]}
    partial.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
    os.replace(partial, report)


def _give_up(report: Path, header: dict[str, Any], checks: Sequence[Check], limit: float) -> None:
    checks[-1].state, checks[-1].detail = "timed out", f"did not end within {limit:g} s"
    write_report(report, header, checks)
    faulthandler.dump_traceback()
    os._exit(1)


def _prefill(pair: Pair, tokens: Sequence[int], start: int, slot: int, *, draft: bool = False) -> Array:
    logits, _ = pair.prefill(list(tokens), start, slot, draft=draft)
    return np.array(logits)


def _verify(pair: Pair, tokens: Sequence[Sequence[int]], start: int) -> Array:
    """The logits [n, N, V] of a pass over these tokens from position `start` on."""
    return pair.logits(tokens, [start] * len(tokens))


def _same(what: str, a: Sequence[int], b: Sequence[int]) -> None:
    if list(a) != list(b):
        at = next((i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), len(a))
        raise Failure(f"{what} differ from token {at} on: {list(a)[at : at + 3]} and {list(b)[at : at + 3]}")

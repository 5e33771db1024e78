"""Check a bundle on the machine that will run it, from the simplest that can be wrong to the whole, and keep a report.

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
from functools import cached_property
from pathlib import Path
from time import perf_counter
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
from dflash_trt.errors import BundleError, DFlashError
from dflash_trt.files.disk import whole_file
from dflash_trt.llm import LLM
from dflash_trt.prompts import Prompt
from dflash_trt.reports.environment import describe
from dflash_trt.reports.localize import PART, Compared, Limits, Localizer, Stage, centred, deviation
from dflash_trt.reports.verification import Case, Difference, chains, verify

Array = np.ndarray[Any, Any]
Figures = dict[str, Any]
FORMAT = "dflash-trt selftest"
# Tokens of the prompt that the passes read, beyond the shortest window where there is one.
_PROMPT = 24
# So many drafts are not all right by chance, where ONNX Runtime's are not.
_DRAFTS = 8


class Failure(Exception):
    """What is wrong."""


class Skip(Exception):
    """Why a check cannot run here."""


@dataclass
class Check:
    """One check's result. `state` is passed, failed, skipped or timed out."""

    name: str
    proves: str
    state: str = "running"
    detail: str = ""
    figures: Figures = field(default_factory=dict)
    seconds: float = 0.0


class Selftest:
    """The checks of a bundle, in their order. The first line of each one's docstring says what it proves.

    A check returns figures for the report. It raises Failure or Skip. `integrity` loads the bundles. Passes read a
    random prompt, and a random block after it, and write the slots.

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
        self.llm: LLM  # and its pair, from `integrity` on
        self.pair: Pair
        self.loaded = False
        self._expected: list[tuple[Array, Array]] = []  # the reference's drafts and their log-probabilities
        manifest, rng = self.bundle.manifest, np.random.default_rng(0)
        chunk = min(PREFILL_CHUNK, manifest.get("tensorrt", {}).get("prefill_chunk", PREFILL_CHUNK))
        windows = [kind.window or 0 for kind in self.bundle.cache_kinds("target")]
        lengths = [_PROMPT + window for window in sorted(windows) if 0 < window <= chunk - _PROMPT]
        self.length = max(2, min(chunk, *lengths[:1] or [_PROMPT], self.bundle.capacity // 3))
        self.prompt: list[int] = rng.integers(0, manifest["vocab_size"], self.length).tolist()
        self.block: list[int] = rng.integers(0, manifest["vocab_size"], manifest["block_size"]).tolist()
        self.checks: list[Callable[[], Figures]] = [
            *(self.environment, self.integrity, self.kernels, self.cache_writes, self.copies, self.prefill),
            *(self.layers, self.chunks, self.batch, self.replay, self.drafts),
            *(self.acceptance, self.tokens, self.time),
        ]

    def run(self, report: Path, limit: float) -> Iterator[Check]:
        """Run each check for `limit` seconds at most, and keep `report` up to date.

        A check that takes longer ends the process: a pass on a device cannot be interrupted.
        """
        done: list[Check] = []
        for check in self.checks:
            name, proves = check.__name__.replace("_", " "), (check.__doc__ or "").partition("\n")[0]
            result = Check(name, proves.rstrip("."))
            done.append(result)
            timer = threading.Timer(limit, _give_up, (report, self.header, done, limit))
            timer.daemon = True
            timer.start()
            begin = perf_counter()
            try:
                if not self.loaded and check not in (self.environment, self.integrity):
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
            write_report(report, self.header, done, self.localizer.compared if self.localizer else ())
            yield result

    @cached_property
    def header(self) -> dict[str, Any]:
        """The bundle's manifest without its files, and the machine."""
        fields = {name: value for name, value in self.bundle.manifest.items() if name != "files"}
        return {"bundle": fields, "machine": describe()}

    def environment(self) -> Figures:
        """The versions and the machine that a report is about."""
        machine = self.header["machine"]
        return {"dflash_trt": machine["dflash_trt"], "gpus": machine["gpus"], "cpu": machine["cpu"]}

    def integrity(self) -> Figures:
        """Both bundles open."""
        try:
            self.llm = LLM(self.bundle.path)
            self.pair, self.loaded = self.llm.runtime.pair, True
            if self.reference_path is not None:
                self.reference = LLM(self.reference_path)
        except DFlashError as error:
            raise Failure(str(error)) from error
        return {"slots": self.pair.slots, "capacity": self.pair.capacity}

    def kernels(self) -> Figures:
        """Each kernel gives its reference's numbers, and the host's tokens."""
        arrays = self.pair.arrays
        if not arrays.samples:
            raise Skip("no kernels run between passes here, and the host samples")
        from dflash_trt.reports.kernels import problems_of

        if faults := problems_of(arrays, self.bundle.manifest["vocab_size"]):
            raise Failure("; ".join(f"{name}: {problem}" for name, problem in faults.items()))
        params = SamplingParams(temperature=0.9, top_p=0.9, top_k=40, max_tokens=12, seed=7, ignore_eos=True)
        there = self._generate(params)
        arrays.samples = False
        try:
            here = self._generate(params)
        finally:
            arrays.samples = True
        if there != here:
            raise Failure(f"tokens sampled on the device and on the host differ: {there} and {here}")
        return {"tokens": len(here)}

    def cache_writes(self) -> Figures:
        """A pass writes its rows, and no others."""
        last = self.pair.slots - 1
        self._prefill(slot=last)
        self._prefill(slot=0)
        n, end = self.length, self.length + len(self.block)
        before = [self._rows(slot, 0, n) for slot in (0, last)]
        self._verify()
        after = [self._rows(slot, 0, n) for slot in (0, last)]
        for slot, old, new in zip((0, last), before, after, strict=True):
            if any(not np.array_equal(a, b) for a, b in zip(old, new, strict=True)):
                raise Failure(f"a pass from row {n} of slot 0 on changed earlier rows of slot {slot}")
        written = self._rows(0, n, end)
        if not all(np.abs(rows).max() > 0 for rows in written):
            raise Failure(f"a pass did not write rows {n} to {end - 1}")
        return {"caches": len(written)}

    def copies(self) -> Figures:
        """Rows that are copied or kept give the same logits."""
        self._prefill()
        expected, last = self._verify()[0], self.pair.slots - 1
        length = self.pair.cut_lengths(0, self.length, draft=False)[0][-1]
        kept = self.pair.keep(0, 0, length, length, draft=False)
        self.pair.clear(0)
        self.pair.restore(0, [kept], length, draft=False)
        errors = {"kept": self._continued("kept and restored", length, expected)}
        if last:
            self._prefill(slot=last)
            length = self.pair.cut_lengths(last, self.length, draft=False)[0][-1]
            self.pair.clear(0)
            self.pair.copy(last, 0, length, draft=False)
            errors["copied"] = self._continued(f"copied from slot {last}", length, expected)
        return errors

    def _continued(self, how: str, length: int, expected: Array) -> float:
        """Read what the first `length` rows of slot 0 lack of the prompt, and verify."""
        if length < self.length:
            self._prefill(self.prompt[length:], length)
        return self._close(f"logits after {length} rows that were {how}", self._verify()[0], expected)

    def prefill(self) -> Figures:
        """A pass is over when its numbers are read."""
        first = self._prefill()
        self.pair.arrays.wait()
        if not np.array_equal(first, self._prefill()):
            raise Failure("two equal passes differ: one was read before its end, or memory is shared")
        return {}

    def layers(self) -> Figures:
        """Every layer's numbers are right, of the target and the drafter."""
        if self.reference is None:
            raise Skip("give --reference to compare the numbers with ONNX Runtime's")
        self.localizer = Localizer(self.pair, self.reference.runtime.pair, self.limits)
        prompt, block = (0, self.length), (self.length, self.length + len(self.block))
        roles = self.bundle.roles
        drafts = len(roles) > 1
        passes: list[Stage] = [
            ("prefill", roles, prompt, "logits", lambda pair: self._prefill(pair=pair, draft=drafts)),
            ("verification", roles[:1], block, "logits", lambda pair: self._verify(pair=pair)[0]),
            ("draft", roles[1:], prompt, "log-probabilities", lambda pair: self._drafted(pair)[0]),
        ]
        self.localizer.run(passes if drafts else passes[:2])
        if self.localizer.first is not None:
            raise Failure(self.localizer.describe())
        worst = max(result.error / result.limit for result in self.localizer.compared)
        return {"share of what rounding explains": round(worst, 3)}

    def chunks(self) -> Figures:
        """Prefill in parts and verification give the logits of one prefill."""
        whole, n = self._prefill(), self.length
        self._prefill(self.prompt[: n // 2])
        split = self._prefill(self.prompt[n // 2 :], n // 2)
        errors = {"split": self._close("logits of a prompt in one part and in two", split, whole)}
        rows = min(len(self.block), n - 1)
        self._prefill(self.prompt[: n - rows])
        logits = self.pair.logits([self.prompt[n - rows :]], [n - rows])[0, -1]
        errors["verified"] = self._close("logits of prefill and of verification", logits, whole)
        return errors

    def batch(self) -> Figures:
        """A sequence does not depend on other slots."""
        if self.pair.slots == 1:
            raise Skip("the bundle has one slot")
        self._prefill()
        alone = self._verify()[0]
        for slot in range(1, self.pair.slots):
            self._prefill(self.block[::-1], slot=slot)
        together = self._verify(self.pair.slots)[0]
        return {"error": self._close("logits of a sequence alone and in a batch", together, alone)}

    def replay(self) -> Figures:
        """A recorded pass repeats the plain one."""
        self._prefill()
        short = max(1, len(self.block) // 2)
        by_length: dict[int, Array] = {}
        for length in (len(self.block), short) * 3:
            logits = self._verify(length=length)[0]
            if not np.array_equal(by_length.setdefault(length, logits), logits):
                raise Failure(f"a pass of {length} tokens gave other logits when it was repeated")
        return {}

    def drafts(self) -> Figures:
        """The drafter reads the target's latest features.

        Two rounds: the second one reads features of the first verification.
        """
        if "drafter" not in self.bundle.roles:
            raise Skip("the bundle has no drafter")
        if self.reference is None:
            raise Skip("give --reference to compare them with ONNX Runtime's")
        expected, drafted = self._drafted(self.reference.runtime.pair), self._drafted(self.pair)
        largest = float(np.abs(centred(self._prefill())).max())
        errors = {}
        for which, ours, theirs in zip(("prefill", "verification"), drafted, expected, strict=True):
            what = f"the drafter's log-probabilities after a {which} and ONNX Runtime's"
            errors[f"after a {which}"] = self._close(what, ours, theirs, largest)
        return errors

    def acceptance(self) -> Figures:
        """Drafts that are the target's own greedy tokens are accepted."""
        drafts = len(self.block) - 1
        greedy = self._generate(SamplingParams(max_tokens=drafts + 1, ignore_eos=True))
        if (token := int(np.argmax(self._prefill()))) != greedy[0]:
            raise Failure(f"the greedy token is {token}, but generation gave {greedy[0]}")
        verified = self.pair.verify([self._request(greedy[0])], chain(greedy))
        if (accepted := int(np.asarray(verified.accepted)[0])) != drafts:
            raise Failure(f"{accepted} of {drafts} drafts that the target would choose were accepted")
        return {"accepted": accepted}

    def tokens(self) -> Figures:
        """Drafting changes no token, greedy or sampled."""
        figures: dict[str, Any] = {}
        for case in self._drafting(self.llm):
            name = f"temperature {case.temperature:g}, block {case.block_length or 'auto'}"
            figures[name] = round(case.tokens_per_pass, 3)
            if case.first_difference is not None and not self._tied(case.first_difference):
                raise Failure(f"{name}: drafting changed tokens: {case.first_difference}")
            if case.accepted == 1 and case.drafted >= _DRAFTS and self.reference is not None:
                (expected,) = self._drafting(self.reference, case)
                if expected.drafted and expected.accepted < 1:
                    raise Failure(
                        f"{name}: all {case.drafted} drafts were accepted, but {expected.accepted:.2f} of ONNX "
                        "Runtime's: the drafter reads what it should predict, or is not the one that drafts"
                    )
        return {"tokens_per_pass": figures}

    def _tied(self, difference: Difference) -> bool:
        """Whether rounding explains which of two tokens won. Passes of other widths may round a logit otherwise."""
        if difference.plain_token is None or difference.drafted_token is None:
            return False
        limit = PART * self.limits.of("target", "logits")
        return difference.margin is None or abs(difference.margin) <= limit

    def _drafting(self, llm: LLM, like: Case | None = None) -> Iterator[Case]:
        """A short answer with and without drafts: at temperature 0 and 1, or as `like`."""
        return verify(
            llm,
            [Prompt(id="selftest", category="selftest", content="The capital of France is")],
            temperatures=[0.0, 1.0] if like is None else [like.temperature],
            ways=chains((len(self.block), None) if like is None else [like.block_length]),
            batch_sizes=[1],
            max_tokens=min(32, self.bundle.capacity // 3),
        )

    def time(self) -> Figures:
        """Seconds of a pass, beside the bytes of its weights."""
        self._prefill()
        request, seconds = self._request(self.block[0]), []
        for _ in range(9):
            self.pair.verify([request], chain(self.block))
            seconds.append(self.pair.verify_time)
        weights = self.bundle.manifest["target"].get("weight_bytes", {})
        size = sum(sum(kind.values()) for kind in weights.values())
        middle = float(np.median(seconds))
        return {
            "verify_seconds": middle,
            "weight_bytes": size,
            "bytes_per_second": round(size / middle) if middle > 0 else None,
        }

    def close(self) -> None:
        """Free the bundles."""
        for llm in ([self.llm] if self.loaded else []) + ([self.reference] if self.reference else []):
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
        ours = self.reference is None or pair is not self.reference.runtime.pair
        self._prefill(pair=pair, draft=True)
        request, logprobs = self._request(self.block[0]), []
        if not ours:
            self._expected = []
        for i in range(2):
            draft = pair.drafter.propose([request], len(self.block))
            tokens, drafted = np.array(draft.tokens), np.array(draft.logprobs)[0]
            if not ours:
                self._expected.append((tokens, drafted))
            elif not np.array_equal(tokens, self._expected[i][0]):
                first = int(np.argmax(tokens[0] != self._expected[i][0][0]))  # a draft of logprobs[first - 1]
                tokens, theirs = self._expected[i]
                drafted = np.concatenate([drafted[:first], theirs[first:]])
                draft = Draft(tokens, None, theirs[None])
            pair.verify([request], draft)
            logprobs.append(drafted)
            pair.commit(request, 0, [0, 1])
            request.committed += 2
        return logprobs

    def _request(self, anchor: int) -> Request:
        """A request in slot 0 whose prompt was read."""
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        request = self.llm.runtime.request(self.prompt, params, RequestOptions())
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


def write_report(
    report: Path, header: dict[str, Any], checks: Sequence[Check], compared: Sequence[Compared] = ()
) -> None:
    """Write the report, so that a reader never sees a part of it."""
    content = {"format": FORMAT, **header, "checks": [asdict(check) for check in checks]}
    content["layers"] = [asdict(result) for result in compared]
    with whole_file(report) as file:
        file.write(json.dumps(content, indent=1, default=str).encode() + b"\n")


def _give_up(report: Path, header: dict[str, Any], checks: Sequence[Check], limit: float) -> None:
    checks[-1].state, checks[-1].detail = "timed out", f"did not end within {limit:g} s"
    write_report(report, header, checks)
    faulthandler.dump_traceback()
    os._exit(1)


def chain(tokens: Sequence[int]) -> Draft:
    """A draft of one request with these nodes."""
    return Draft(np.array([tokens]), None, np.zeros((1, len(tokens) - 1)))

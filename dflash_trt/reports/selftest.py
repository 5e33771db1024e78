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
from dflash_trt.errors import DFlashError
from dflash_trt.llm import LLM
from dflash_trt.reports.environment import describe
from dflash_trt.reports.localize import Localizer, cache_rows, write_archive
from dflash_trt.reports.verification import chains, verify

Array = np.ndarray[Any, Any]
FORMAT = "dflash-trt selftest"
# The prompt that the passes read, in tokens, and the block that they verify.
_PROMPT = 24
# Two ways of computing the same logits may differ by this share of their spread: rounding of BF16 over many layers.
_ROUNDING = 0.06
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
        self._llm: LLM | None = None
        rng = np.random.default_rng(0)
        vocab = self.bundle.manifest["vocab_size"]
        self.block: int = self.bundle.manifest["block_size"]
        self.length = max(2, min(_PROMPT, self.bundle.capacity // 3))
        self.prompt: list[int] = rng.integers(0, vocab, self.length).tolist()
        self.tokens: list[int] = rng.integers(0, vocab, self.block).tolist()
        self.checks: list[tuple[str, str, Callable[[], dict[str, Any]]]] = [
            ("environment", "the versions and the machine that a report is about", self.environment),
            ("integrity", "the engines take and give what the manifest says", self.integrity),
            ("kernels", "each kernel gives its reference's numbers, and the host's tokens", self.kernels),
            ("cache writes", "a pass writes its rows, and no others", self.cache_writes),
            (
                "prefill",
                "the target's numbers are right, and a pass is over when they are read",
                self.prefill,
            ),
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
        fields = {name: value for name, value in self.bundle.manifest.items() if name != "files"}
        return {"bundle": fields, "machine": describe()}

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
        machine = describe()
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

    def prefill(self) -> dict[str, Any]:
        first = self._prefill(self.prompt)
        self.pair.arrays.wait()
        again = self._prefill(self.prompt)
        if not np.array_equal(first, again):
            raise Failure(
                "two equal passes differ: a result was read before its pass had ended, or memory is shared"
            )
        if self.reference is None:
            raise Skip("repeated equally; give --reference to compare the numbers with ONNX Runtime's")
        expected = _prefill(self.reference._runtime.pair, self.prompt, 0, 0)
        return {"error": _close("logits of a prefill and ONNX Runtime's", first, expected)}

    def chunks(self) -> dict[str, Any]:
        whole, n = self._prefill(self.prompt), self.length
        self._prefill(self.prompt[: n // 2])
        split = _prefill(self.pair, self.prompt[n // 2 :], n // 2, 0)
        errors = {"split": _close("logits of a prompt in one part and in two", split, whole)}
        rows = min(self.block, n - 1)
        self._prefill(self.prompt[: n - rows])
        logits = _verify(self.pair, [self.prompt[n - rows :]], n - rows)[0, -1]
        errors["verified"] = _close("logits of prefill and of verification", logits, whole)
        return errors

    def batch(self) -> dict[str, Any]:
        if self.pair.slots == 1:
            raise Skip("the bundle has one slot")
        self._prefill(self.prompt)
        alone = self._verify(1)[0]
        for slot in range(1, self.pair.slots):
            _prefill(self.pair, self.tokens[::-1], 0, slot)
        together = self._verify(self.pair.slots)[0]
        return {"error": _close("logits of a sequence alone and in a batch", together, alone)}

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
        drafted = self._drafted(self.pair)
        if self.reference is None:
            raise Skip("give --reference to compare them with ONNX Runtime's")
        expected = self._drafted(self.reference._runtime.pair)
        errors = {}
        for i, (ours, theirs) in enumerate(zip(drafted, expected, strict=True)):
            which = "after a prefill" if i == 0 else "after a verification"
            errors[which] = _close(
                f"the drafter's log-probabilities {which} and ONNX Runtime's", ours, theirs
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
        from dflash_trt.prompts import Prompt

        prompts = [Prompt(id="selftest", category="selftest", content="The capital of France is")]
        figures: dict[str, Any] = {}
        for case in verify(
            self.llm,
            prompts,
            temperatures=[0.0, 1.0],
            ways=chains((self.block, None)),
            batch_sizes=[1],
            max_tokens=min(32, self.bundle.capacity // 3),
        ):
            name = f"temperature {case.temperature:g}, block {case.block_length or 'auto'}"
            figures[name] = round(case.mean_acceptance_length, 3)
            if case.differing:
                raise Failure(f"{name}: drafting changed tokens: {case.first_difference}")
        return {"mean_acceptance_length": figures}

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
        """The first layer that differs from the reference, in words. Writes the archive of a bug report."""
        if self._llm is None or self.reference is None:
            raise DFlashError(
                f"{self.bundle.path}: did not load, or has no --reference; layers are compared with "
                "ONNX Runtime's"
            )
        length, block = self.length, self.tokens

        def prefill(pair: Pair) -> Array:
            return _prefill(pair, self.prompt, 0, 0, draft=True)

        def verify_block(pair: Pair) -> Array:
            logits: Array = _verify(pair, [block], length)[0]
            return logits

        def draft(pair: Pair) -> Array:
            return self._drafted(pair)[0]

        localizer = Localizer(self.pair, self.reference._runtime.pair, _ROUNDING * 4)
        localizer.run(
            [
                ("prefill", ("target", "drafter"), (0, length), "logits", prefill),
                ("verification", ("target",), (length, length + len(block)), "logits", verify_block),
                ("draft", ("drafter",), (0, length), "log-probabilities", draft),
            ]
        )
        tokens = {"prompt": self.prompt, "block": block}
        written = json.loads(report.read_text(encoding="utf-8"))
        write_archive(archive, localizer, written, tokens, self.bundle.path)
        return localizer.describe()

    def _prefill(self, tokens: Sequence[int], slot: int = 0) -> Array:
        return _prefill(self.pair, tokens, 0, slot)

    def _verify(self, count: int, length: int | None = None) -> Array:
        return _verify(self.pair, [self.tokens[: length or self.block]] * count, self.length)

    def _rows(self, slot: int, start: int, stop: int) -> list[Array]:
        """Rows of the target's caches, once the passes that write them have ended."""
        return [rows for _, rows in cache_rows(self.pair, "target", slot, start, stop)]

    def _drafted(self, pair: Pair) -> list[Array]:
        _prefill(pair, self.prompt, 0, 0, draft=True)
        request, logprobs = self._request(self.prompt, self.tokens[0]), []
        for _ in range(2):
            draft = pair.propose([request], self.block)
            pair.verify([request], draft)
            logprobs.append(np.array(draft.logprobs)[0])
            pair.commit(request, 0, [0, 1])
            request.committed += 2
        return logprobs

    def _request(self, prompt: Sequence[int], anchor: int) -> Request:
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        request = self.llm._runtime.request(list(prompt), params, RequestOptions())
        request.slot, request.committed = 0, len(prompt)
        request.output.append(anchor)
        return request

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


def _close(what: str, a: Array, b: Array) -> float:
    """The largest difference as a share of the spread of `b`. Raises Failure if rounding does not explain it."""
    if not np.isfinite(a).all():
        raise Failure(f"{what}: not finite")
    error = float(np.abs(a - b).max() / max(float(np.std(b)), 1e-6))
    if error > _ROUNDING * 4:
        raise Failure(f"{what} differ by {error:.2f} of their spread, which rounding does not explain")
    return round(error, 5)

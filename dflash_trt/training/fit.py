"""From a target to a drafter that pays: prompts, the target's answers, training, measurement and bundle, in some hours.

WORK/prompts.jsonl, answers.jsonl    what the drafter learns from
WORK/target/                         a bundle of the target alone, which answers
WORK/trial-N/                        a short training of a drafter with N layers
WORK/run/                            the training (training/run.py)
WORK/fit.json                        the seconds spent, and what was decided

A call that finds these files continues with the seconds that are left.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from dflash_trt.building.build import build
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.bundle.workspace import check_out
from dflash_trt.checkpoint.draft_vocabulary import most_frequent
from dflash_trt.decoding.params import SamplingParams
from dflash_trt.engines.registry import best_here
from dflash_trt.errors import DecodingError, DFlashError, RequestError, UsageError
from dflash_trt.files.disk import write_object
from dflash_trt.files.reading import read_object
from dflash_trt.hardware import compute_capabilities
from dflash_trt.llm import LLM
from dflash_trt.models.configs import read_target_config
from dflash_trt.prompts import Prompt, read_prompts
from dflash_trt.text.tokenizer import Tokenizer
from dflash_trt.training.answers import hold_out, read_answers, summary
from dflash_trt.training.evaluation import ALL, average, measure, read_history
from dflash_trt.training.loop import same_as_before
from dflash_trt.training.own_prompts import script, user_turn, write_own_prompts
from dflash_trt.training.recipe import NEW_RATE, AnswerSampling, Design, Recipe
from dflash_trt.training.regenerate import regenerate_with_bundle, target_bundle
from dflash_trt.training.run import run

_EPOCHS = 6  # of SpecForge's example for Qwen3-8B, and of the drafter of smollm2-135m
_PROBE = 0.03  # of the time, after which the speed of answering is known
_PROBE_STEPS = 8
_PROMPTS = 0.25  # of the time for answers, at most, that their prompts take
_TRIALS = 0.15  # of the time, for choosing layers and vocabulary
_END = 0.08  # of the time, for the last measurement and the bundle
_LAYERS = (1, 2, 4)
_BLOCKS = (8, 16)
_VOCABULARIES = (8_192, 32_768)
_PATIENCE = 3  # evaluations in a row that are not better than the best end a training
_EVALUATIONS = 10  # of a training
_BATCH, _ANCHORS = 8, 32  # answers per step, and blocks of each
_ANSWER, _POSITIONS = 256, 2048  # tokens of an answer, and with its prompt
_REPEATS = 5  # of which the fastest counts: the others had company
_HELD_OUT, _EVALUATED = 32, 96  # prompts of a measurement, and tokens of each answer
_TOGETHER = 32, 256  # answers at a time on a CPU, and at most on a GPU, where memory decides

T = TypeVar("T")
Report = Callable[[float, str], None]  # the share of the time that is spent, and what is being done


class _Ended(Exception):
    """The training has learnt what it can, or the time is over."""


@dataclass
class State:
    """What WORK/fit.json keeps. rates: measured tokens per second of each phase; notes: what was decided and why.

    seconds: what `done` was planned for. until: when answering ends, in seconds spent; 0 before it was decided.
    """

    seconds: float
    target: str
    prompts: str | None
    start: str | None
    spent: float = 0.0
    done: list[str] = field(default_factory=list)
    checkpoint: str | None = None
    block_size: int | None = None
    draft_vocabulary: int | None = None
    step_seconds: float = 0.0
    answer_seconds: float = 0.0  # of a token
    until: float = 0.0
    steps: int | None = None
    dropped: dict[str, int] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """What the drafter gives on held-out prompts of a category."""

    category: str
    tokens_per_pass: float
    plain: float  # tokens per second
    drafted: float


@dataclass(frozen=True)
class Outcome:
    """rows: by category, the last for all. bundle: None if drafting was not faster; then `advice` says what would help.

    rates: tokens per second of each phase.
    """

    rows: list[Row]
    bundle: Bundle | None
    advice: list[str]
    notes: list[str]
    rates: dict[str, float]


class Fit:
    """One call of `fit`. seconds: of all calls for `out` together."""

    def __init__(
        self,
        target: Path,
        name: str,
        out: Path,
        seconds: float,
        *,
        prompts: Path | None = None,
        start: Path | None = None,
        threads: int | None = None,
        report: Report = lambda share, text: None,
    ) -> None:
        self.target, self.name, self.out, self.seconds = target, name, out, seconds
        self.prompts, self.start, self.threads, self.report = prompts, start, threads, report
        self.engine = best_here().engine
        self._requests = _TOGETHER[bool(compute_capabilities())]
        self.work = out.with_name(f"{out.name}.fit")
        self.work.mkdir(parents=True, exist_ok=True)
        self._file = self.work / "fit.json"
        asked = {
            "target": str(target.resolve()),
            "prompts": prompts and str(prompts.resolve()),
            "start": start and str(start.resolve()),
        }
        before = read_object(self._file) if self._file.exists() else {}
        same_as_before(self._file, before | asked)
        self.state = State(**{"seconds": seconds, **asked, **before})
        if seconds > self.state.seconds:  # more answers and steps, for the drafter that was chosen
            self.state.done = [name for name in self.state.done if name == "choose"]
        if seconds != self.state.seconds:
            self.state.seconds, self.state.until, self.state.steps = seconds, 0.0, None
        self._began, self._before = time.monotonic(), self.state.spent
        self.answers, self.run_folder = self.work / "answers.jsonl", self.work / "run"

    def run(self) -> Outcome:
        """All phases that are not done.

        Raises DFlashError, with all that was made so far on disk.
        """
        try:
            for phase in (self._answer, self._choose, self._train):
                name = phase.__name__[1:]
                if name not in self.state.done:
                    phase()
                    self.state.done.append(name)
                    self._save()
            return self._finish()
        finally:
            self._save()

    @property
    def spent(self) -> float:
        return self._before + time.monotonic() - self._began

    def _save(self) -> None:
        self.state.spent = self.spent
        write_object(self._file, asdict(self.state))

    def _say(self, text: str) -> None:
        self.report(min(1.0, self.spent / self.seconds), text)

    # Prompts and answers

    def _answer(self) -> None:
        """Answers until so much of the time is over that the rest suffices for training on them."""
        config = read_target_config(self.target)
        positions = min(config.max_position_embeddings, _POSITIONS)
        bundle = target_bundle(self.target, self.work / "target", positions)
        sampling = AnswerSampling(max_tokens=min(_ANSWER, positions // 2), temperatures=(0.0, 0.7, 1.0))
        state, began, before = self.state, self.spent, self._answered()
        if not state.answer_seconds:
            self._say("how fast it answers")
            self._answers(bundle, sampling, before["answers"] + 4 * _BATCH, began + _PROBE * self.seconds)
            new = self._answered()["answer_tokens"] - before["answer_tokens"]
            state.answer_seconds = (self.spent - began) / max(new, 1)
        state.until = state.until or self.spent + self._time_for_answers()
        answered = self._answered()
        room = max(1.0, state.until - self.spent) / state.answer_seconds
        count = answered["answers"] + int(room * answered["answers"] / answered["answer_tokens"])
        self._answers(bundle, sampling, count, state.until)
        new = self._answered()["answer_tokens"] - before["answer_tokens"]
        state.rates["answers"] = round(new / max(self.spent - began, 1e-9), 1)
        self._describe_answers()

    def _answered(self) -> dict[str, Any]:
        return summary(read_answers(self.answers) if self.answers.exists() else [])

    def _answers(self, bundle: Path, sampling: AnswerSampling, count: int, until: float) -> None:
        """Answers to `count` prompts, or as many as there are or the time allows; a few in any case."""

        def stopped() -> bool:
            return self.spent > until and self._finished >= 2 * _BATCH

        self._finished = self._answered()["answers"]
        file = self.prompts or self.work / "prompts.jsonl"
        if self.prompts is None:
            begin, share = self.spent, _PROMPTS * (until - self.spent)
            dropped = self._together(
                write_own_prompts,
                *(bundle, file, count),
                stopped=lambda written: written >= 2 * _BATCH and self.spent > begin + share,
                report=lambda done, of: self._say(f"prompt {done} of {of}"),
            )
            self.state.dropped = dict(Counter(self.state.dropped) + dropped)

        def report(done: int, of: int, tokens: int, seconds: float) -> None:
            self._finished = done
            self._say(f"answer {done} of {of}, {tokens / max(seconds, 1e-9):.0f} tokens/s")

        asked = bundle, read_prompts(file, count), self.answers, sampling
        self._together(regenerate_with_bundle, *asked, report=report, stopped=stopped)

    def _together(self, work: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """`work`, which continues what it began, with as many requests at a time as memory allows."""
        while True:
            try:
                return work(*arguments, threads=self.threads, concurrency=self._requests, **options)
            except DFlashError as error:
                refused = isinstance(error, RequestError) and not isinstance(error, DecodingError)
                if refused or self._requests == _TOGETHER[0]:
                    raise
                self._requests //= 2

    def _time_for_answers(self) -> float:
        """Seconds for answers, which leave what `_EPOCHS` over them take; measured by a few steps."""
        times: list[float] = []

        def report(line: dict[str, Any]) -> None:
            times.append(time.monotonic())
            self._say(f"trial step {line['step']}")

        if not self.state.step_seconds:
            self._say("how fast it trains")
            probe = self.work / "probe"
            shutil.rmtree(probe, ignore_errors=True)  # of a call that was interrupted there
            task = self.target, self.name, self.answers, probe, self._design(2), self._recipe(_PROBE_STEPS)
            run(*task, evaluate_every=None, report=report)
            self.state.step_seconds = median(b - a for a, b in pairwise(times))
        answered = self._answered()
        tokens = _BATCH * answered["answer_tokens"] / answered["answers"]
        training, answering = _EPOCHS * self.state.step_seconds / tokens, self.state.answer_seconds
        usable = self.seconds * (1 - _TRIALS - _END) - self.spent
        return max(0.0, usable) * answering / (answering + training)

    def _describe_answers(self) -> None:
        answers = read_answers(self.answers)
        counts = summary(answers)
        asked, answered = (
            median(map(len, ids))
            for ids in zip(*((a.prompt_ids, a.answer_ids) for a in answers), strict=True)
        )
        scripts = Counter(script(str(answer.content)) for answer in answers).most_common(3)
        self.state.notes.append(
            f"{counts['answers']} answers of {counts['answer_tokens']} tokens; prompts and answers of {asked:.0f} and "
            f"{answered:.0f} tokens in the median; scripts: {', '.join(f'{name.lower()} {n}' for name, n in scripts)}"
        )
        if self.state.dropped:
            reasons = ", ".join(f"{n} {reason}" for reason, n in self.state.dropped.items())
            self.state.notes.append(f"dropped prompts: {reasons}")

    # The drafter

    def _design(self, layers: int) -> Design:
        if self.start is not None:
            return Design(checkpoint=self.start)
        return Design(layers=layers, block_size=self.state.block_size or _BLOCKS[-1])

    def _recipe(self, steps: int) -> Recipe:
        return Recipe(
            steps=steps,
            batch_size=_BATCH,
            anchors=_ANCHORS,
            max_length=_POSITIONS,
            distill=0.8,
            learning_rate=NEW_RATE if self.start is None else None,  # also where a trial is continued
            limit=_HELD_OUT,
        )

    def _choose(self) -> None:
        """Block size, layers and draft vocabulary: by what rounds take here, and what a short training accepts."""
        state = self.state
        if self.start is None:
            seconds = self._round_seconds(self.work / "probe" / "checkpoint", (1, *_BLOCKS))
            # No published drafter gains a quarter by the second half of a block of 16.
            state.block_size = _BLOCKS[seconds[_BLOCKS[1]] < 1.25 * seconds[_BLOCKS[0]]]
            table = ", ".join(f"{n}: {1e3 * seconds[n]:.2f} ms" for n in seconds)
            state.notes.append(f"rounds by their tokens take {table}; so blocks of {state.block_size}")
        found: dict[str, tuple[float, Path, int | None]] = {}
        for layers in _LAYERS if self.start is None else (0,):
            drafter, reach = self._trial(layers)
            name = f"{layers} layers" if layers else "this drafter"
            found[name] = self._speed(drafter, reach, None), drafter, None
        best = max(found, key=lambda name: found[name][0])
        _, drafter, _ = found[best]
        for size in _VOCABULARIES:
            if 2 * size <= read_target_config(self.target).vocab_size:
                found[f"{best}, {size} tokens"] = self._speed(drafter, reach, size), drafter, size
        best = max(found, key=lambda name: found[name][0])
        _, drafter, state.draft_vocabulary = found[best]
        state.checkpoint = str(drafter)
        speeds = ", ".join(f"{name} {speed:.0f}" for name, (speed, *_) in found.items())
        state.notes.append(f"tokens/s after a short training: {speeds}")

    def _trial(self, layers: int) -> tuple[Path, list[float]]:
        """A drafter after a short training, and the share of passes that accept the draft at each place."""
        if self.start is not None:
            prompts = hold_out(read_answers(self.answers), None, self.answers)[1][:_HELD_OUT]
            figures = measure(self.target, self.start, prompts, self.work / "measured", max_tokens=_EVALUATED)
            return self.start, figures[ALL]["acceptance_by_place"]
        folder = self.work / f"trial-{layers}"
        steps = max(_PROBE_STEPS, int(_TRIALS * self.seconds / len(_LAYERS) / self.state.step_seconds))
        run(
            *(self.target, self.name, self.answers, folder, self._design(layers), self._recipe(steps)),
            evaluate_every=steps,
            report=lambda line: self._say(f"trial with {layers} layers, step {line['step']} of {steps}"),
        )
        history = read_history(folder / "evaluation.jsonl")
        return folder / "checkpoint", history[max(history)][ALL]["acceptance_by_place"]

    def _speed(self, drafter: Path, reach: Sequence[float], vocabulary: int | None) -> float:
        """Tokens per second at the best length of a round, if so many tokens are drafted."""
        answers = [answer.answer_ids for answer in read_answers(self.answers)]
        covered, file = 1.0, None
        if vocabulary is not None:
            config = read_target_config(self.target)
            half = len(answers) // 2
            ends = config.eos_token_ids
            known = set(most_frequent(answers[:half], vocabulary, config.vocab_size, ends))
            rest = [token for answer in answers[half:] for token in answer]
            covered = sum(token in known for token in rest) / len(rest)
            file = self.work / "vocabulary.json"
            write_object(file, {"tokens": most_frequent(answers, vocabulary, config.vocab_size, ends)})
        lengths = tuple(length for length in (2, 4, *_BLOCKS) if length <= len(reach) + 1)
        seconds = self._round_seconds(drafter, lengths, file)
        kept = [share * covered**place for place, share in enumerate(reach, start=1)]
        return max((1 + sum(kept[: length - 1])) / seconds[length] for length in lengths)

    def _round_seconds(
        self, drafter: Path, lengths: tuple[int, ...], vocabulary: Path | None = None
    ) -> dict[int, float]:
        """Seconds of a round, draft and verification, by its tokens; 1 is plain decoding."""
        self._say("what rounds take")
        fastest: dict[int, float] = {}
        place = self.work / "timed"
        options: dict[str, Any] = {
            "engine": self.engine,
            "max_seq_len": 512,
            "weights": "link",
            "force": True,
        }
        bundle = build(str(self.target), str(drafter), place, draft_vocabulary=vocabulary, **options)
        prompt = read_answers(self.answers)[0].prompt_ids[:256]
        params = SamplingParams(max_tokens=16, ignore_eos=True)
        with LLM(bundle.path, max_batch_size=1, threads=self.threads) as llm:
            for length in lengths * _REPEATS:
                done = llm.generate(prompt, params, block_length=length).statistics
                seconds = done.generation_time / sum(done.block_length_histogram)
                fastest[length] = min(seconds, fastest.get(length, seconds))
        shutil.rmtree(place)
        return fastest

    def _train(self) -> None:
        """The training, in the time that is left."""
        state = self.state
        answers = read_answers(self.answers)
        epochs = _EPOCHS * len(answers) // _BATCH
        left = (1 - _END) * self.seconds - self.spent
        file = self.run_folder / "state" / "state.json"
        trained = read_object(file)["step"] if file.exists() else 0
        state.steps = state.steps or max(1, min(epochs, trained + int(left / state.step_seconds)))
        begun, seen = self.spent, 0

        def report(line: dict[str, Any]) -> None:
            nonlocal seen
            seen += 1
            self._say(f"training, step {line['step']} of {state.steps}")
            lengths = [
                average(figures) for figures in read_history(self.run_folder / "evaluation.jsonl").values()
            ]
            if "figures" in line and len(lengths) - 1 - lengths.index(max(lengths)) >= _PATIENCE:
                state.notes.append(f"the training ended after step {line['step']}: drafts grew no longer")
                raise _Ended
            if lengths[1:] and self.spent > (1 - _END) * self.seconds:
                raise _Ended

        design = Design(checkpoint=Path(str(state.checkpoint)), draft_vocabulary=state.draft_vocabulary)
        with suppress(_Ended):
            ended = run(
                *(self.target, self.name, self.answers, self.run_folder, design, self._recipe(state.steps)),
                evaluate_every=max(1, state.steps // _EVALUATIONS),
                report=report,
            )
            if ended < state.steps:
                raise DFlashError(f"{self.work}: was asked to end; the same command continues")
        tokens = _BATCH * median(len(answer.answer_ids) for answer in answers)
        state.rates["training"] = round(seen * tokens / max(self.spent - begun, 1e-9), 1)

    # What it gives

    def _finish(self) -> Outcome:
        """Measure, and move the bundle to its place if drafts are faster."""
        best = self.run_folder / "best"
        place = self.work / "bundle"
        bundle = build(str(self.target), str(best), place, engine=self.engine, force=True)
        rows = self._compare(bundle.path)
        state, (*_, every) = self.state, rows
        if every.drafted > every.plain:
            place.rename(self.out)
            return Outcome(rows, Bundle.open(self.out, "size"), [], state.notes, state.rates)
        return Outcome(rows, None, self._advice(every), state.notes, state.rates)

    def _compare(self, bundle: Path) -> list[Row]:
        """Held-out prompts one by one, each without drafts and with them in turn."""
        prompts = read_prompts(self.run_folder / "held_out.jsonl", _HELD_OUT)
        with LLM(bundle, max_batch_size=1, prefix_cache_bytes=0, threads=self.threads) as llm:
            return compare(
                llm, prompts, lambda done: self._say(f"comparing, prompt {done} of {len(prompts)}")
            )

    def _advice(self, every: Row) -> list[str]:
        history = read_history(self.run_folder / "evaluation.jsonl")
        lengths = [average(figures) for _, figures in sorted(history.items())]
        advice = [f"the drafter is in {self.run_folder / 'best'}"]
        if lengths[-1] == max(lengths):
            advice.append(
                f"acceptance still rose: the same command with more --hours continues from {lengths[-1]:.2f}"
            )
        if self.prompts is None:
            advice.append(
                "the target wrote its own prompts: --prompts with what your users ask fits them better"
            )
        if self.start is None:
            advice.append("--from begins with a published drafter, if there is one for the base model")
        return advice


def compare(
    llm: LLM, prompts: Sequence[Prompt], report: Callable[[int], None] = lambda done: None
) -> list[Row]:
    """Tokens per target pass, and tokens per second without and with drafts, by category; the last row is all.

    The first two prompts are warm-up as well.
    """
    params = SamplingParams(max_tokens=_EVALUATED)
    sums: dict[str, list[list[float]]] = {}
    warm = min(2, len(prompts))
    for number, prompt in enumerate([*prompts[:warm], *prompts]):
        ids = prompt.token_ids(llm.tokenizer)[-(llm.max_seq_len - _EVALUATED) :]
        for speculate in (False, True) if number % 2 else (True, False):
            done = llm.generate(ids, params, speculate=speculate).statistics
            if number >= warm:
                for name in (prompt.category, ALL):
                    part = sums.setdefault(name, [[0.0] * 3, [0.0] * 3])[speculate]
                    part[0] += done.num_generation_tokens - 1
                    part[1] += done.generation_time
                    part[2] += sum(done.block_length_histogram)
        report(max(0, number + 1 - warm))
    rows = [
        Row(
            name,
            drafted[0] / max(drafted[2], 1),
            *(tokens / max(t, 1e-9) for tokens, t, _ in (plain, drafted)),
        )
        for name, (plain, drafted) in sums.items()
    ]
    return sorted(rows, key=lambda row: (row.category == ALL, row.category))


def fit(
    target: Path, name: str, out: Path, seconds: float, *, prompts: Path | None = None, **options: Any
) -> Outcome:
    """Make a drafter for the target within `seconds`, and a bundle in `out` if drafting with it is faster.

    name: of the target, for the drafter's card. The options are those of `Fit`.

    Raises DFlashError: the target cannot be run or trained for, its template has no user turn (and there are no
    prompts), or `out` is taken. What was made lies in OUT.fit, where the next call continues.
    """
    check_out(out)
    if out.exists():
        raise UsageError(f"{out}: exists; choose another --out")
    read_target_config(target)
    tokenizer = Tokenizer(target)
    if prompts is None:
        user_turn(tokenizer)
    for prompt in [] if prompts is None else read_prompts(prompts, 32):
        prompt.token_ids(tokenizer)
    return Fit(target, name, out, seconds, prompts=prompts, **options).run()

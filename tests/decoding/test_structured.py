"""Structured outputs: the text has its form, drafts change no token, and a bad form ends its request alone."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_trt import LLM, AsyncLLM, SamplingParams, StructuredOutputs
from dflash_trt.building.build import build
from dflash_trt.decoding.sampling import structure
from dflash_trt.decoding.sampling.structure import LONG_FORCED, Structure, Structures
from dflash_trt.errors import BusyError, RequestError
from tests.decoding.schemas import conform, schemas
from tests.decoding.test_faults import Panic

pytest.importorskip("llguidance")
PROMPT = "Tom has 12 apples. How many apples does Tom have now?\n"
SENTENCE = "The quick brown fox jumps over the lazy dog, and then it rests for 25 minutes."
# name: a form, and what its text matches.
FORMS = {
    "regex": (StructuredOutputs(regex="[0-9]{3}-[a-z]{2,5}"), "[0-9]{3}-[a-z]{2,5}"),
    "choice": (StructuredOutputs(choice=["maybe not", 'a "quoted" é\n', SENTENCE]), None),
    "lark": (StructuredOutputs(grammar='start: "<" WORD ("," WORD)~2 ">"\nWORD: /[a-z]{1,4}/'), "<[a-z,]+>"),
    "gbnf": (StructuredOutputs(grammar='root ::= "yes" | "no"'), "yes|no"),
    "true": (StructuredOutputs(json={"enum": [True]}), "true"),
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("tiny", None, tmp_path_factory.mktemp("structured") / "bundle", max_seq_len=512).path


@pytest.fixture(scope="module")
def llm(bundle: Path) -> Iterator[LLM]:
    with LLM(bundle, threads=1, max_batch_size=4) as llm:
        yield llm


def asks(form: StructuredOutputs, **options: Any) -> SamplingParams:
    return SamplingParams(structured_outputs=form, **{"max_tokens": 120, **options})


def test_generated_schemas_hold_with_and_without_drafts(llm: LLM) -> None:
    pytest.importorskip("jsonschema")
    assert conform(llm, schemas(8, seed=1), PROMPT, 400) == {}


@pytest.mark.parametrize("block_length", [None, 2, 8])
def test_every_form_holds_in_a_batch_with_others(llm: LLM, block_length: int | None) -> None:
    """Greedy and sampled requests with each form, and requests without one in between."""
    params = [
        asks(form, temperature=t, seed=i) for i, (form, _) in enumerate(FORMS.values()) for t in (0.0, 1.0)
    ]
    params += [SamplingParams(max_tokens=30), SamplingParams(max_tokens=30, temperature=0.8, seed=4)]
    params = params[::3] + params[1::3] + params[2::3]
    drafted = llm.generate(PROMPT, params, block_length=block_length)
    plain = llm.generate(PROMPT, params, speculate=False)
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
    matches = dict(FORMS.values())
    for given, found in zip(params, drafted, strict=True):
        form = given.structured_outputs
        if form is not None:
            assert found.finish_reason == "stop"
            pattern = matches[form]
            assert re.fullmatch(pattern, found.text) if pattern else found.text in (form.choice or ())


def test_only_drafts_that_fit_are_verified(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A form compiled anew accepts every draft that counts."""
    form, pair, seen = StructuredOutputs(json_object=True), llm.runtime.pair, list[int]()
    start = pair.start  # type: ignore[union-attr]

    def watched(active: Any, draft: Any) -> Any:
        (request,) = active
        fresh = llm.runtime.structures.compile(form)
        for token in request.output:
            fresh.add(token)
        tokens = draft.tokens_of(0)[: draft.length_of(0, request)]
        for token in tokens[1:]:
            assert fresh.allowed()[token]
            fresh.add(token)
        seen.append(len(tokens) - 1)
        return start(active, draft)

    monkeypatch.setattr(pair, "start", watched)
    llm.generate(PROMPT, asks(form, max_tokens=40, temperature=0.7, seed=3), block_length=8)
    assert 0 < sum(seen) < 7 * len(seen)


def test_forced_tokens_are_drafted_without_the_drafter(llm: LLM) -> None:
    """The drafter never expects this text. Yet all drafts are right, and none is lost."""
    params = asks(StructuredOutputs(choice=[SENTENCE]))
    done = llm.generate("1 + 1 =", params, block_length=8)
    assert done.text == SENTENCE
    rounds = sum(done.statistics.block_length_histogram)
    assert rounds < len(done.token_ids) / 3
    assert llm.generate("1 + 1 =", params, speculate=False).statistics.num_draft_tokens == 0


def test_a_form_goes_before_min_tokens_bad_words_and_bias(llm: LLM) -> None:
    params = asks(StructuredOutputs(choice=["yes"]), min_tokens=9, bad_words=["yes", "y"], temperature=1.0)
    assert llm.generate(PROMPT, params).text == "yes"
    short = llm.generate(PROMPT, asks(StructuredOutputs(choice=[SENTENCE]), max_tokens=5))
    assert (short.finish_reason, len(short.token_ids)) == ("length", 5)
    assert SENTENCE.startswith(short.text)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "no field"), ({"regex": "a", "json_object": True}, "regex and json_object"),
    ({"json": "{"}, "expected a JSON schema"), ({"json": [1]}, "expected a JSON schema"),
    ({"json": False}, "expected a JSON schema"), ({"json": {"enum": [object()]}}, "not a JSON schema"),
    ({"regex": ""}, "regex is ''"), ({"choice": []}, "choice is"), ({"choice": "yes"}, "choice is 'yes'"),
    ({"choice": ["a", 1]}, "choice contains 1"), ({"grammar": "x" * 65537}, "65537 characters"),
    ({"json_object": 1}, "json_object is 1"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "match"), WRONG)
def test_wrong_fields_are_named(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(RequestError, match=match):
        StructuredOutputs(**fields)


BAD = {
    "regex": StructuredOutputs(regex="[0-9"),
    "json": StructuredOutputs(json={"type": "nope"}),
    "reference": StructuredOutputs(json={"$ref": "http://localhost/x"}),
    "grammar": StructuredOutputs(grammar="start: nothing"),
}


def test_a_bad_form_ends_its_request_alone(bundle: Path) -> None:
    async def main() -> None:
        async with AsyncLLM(bundle, threads=1, block_length=4) as llm:
            good = [asyncio.create_task(llm.generate(PROMPT, asks(FORMS[n][0]))) for n in ("regex", "gbnf")]
            for form in BAD.values():
                with pytest.raises(RequestError, match=r"cannot be compiled|structured_outputs"):
                    await llm.generate(PROMPT, asks(form))
            assert [each.finish_reason for each in await asyncio.gather(*good)] == ["stop", "stop"]
            assert llm.in_flight == 0

    asyncio.run(main())


COSTLY = r"/[a-z ]{0,200}a[a-z ]{20}/ & ~/.*b[a-z ]{15}.*/"
STEPS = {"0": {}} | {f"{i + 1}": {"items": {"$ref": f"#/$defs/{i}"}} for i in range(1400)}
# What takes many seconds to compile: a terminal of a grammar, and the conversion of blank lines from GBNF, which holds
# the GIL. And references so deep that they overflow a thread's stack.
TOO_COSTLY = {
    "first": (StructuredOutputs(grammar=f"start: A\nA: {COSTLY}"), "more than 1 s of CPU time"),
    "blank": (StructuredOutputs(grammar="root ::=" + " \n" * 32_000 + '"'), "more than 1 s of CPU time"),
    "deep": (StructuredOutputs(json={"$defs": STEPS, "$ref": "#/$defs/1400"}), "more stack than it may: nest it less"),
    "rules": (
        StructuredOutputs(grammar="\n".join(["start: a0", *(f"a{i}: a{i + 1}" for i in range(4000)), 'a4000: "a"'])),
        "more stack than it may: nest it less",
    ),
}  # fmt: skip


def test_a_form_that_takes_too_much_is_refused_and_others_do_not_wait(bundle: Path) -> None:
    """More of them than there are processes, and the engine's own memory does not grow by them."""

    async def main() -> None:
        async with AsyncLLM(bundle, threads=1, max_batch_size=2) as llm:
            before = memory()
            costly = [
                asyncio.create_task(llm.generate(PROMPT, asks(form))) for form, _ in TOO_COSTLY.values()
            ]
            await asyncio.sleep(0)
            assert (await llm.generate(PROMPT, asks(StructuredOutputs(choice=["a"])))).text == "a"
            assert not any(task.done() for task in costly)
            errors = await asyncio.gather(*costly, return_exceptions=True)
            for error, (form, limit) in zip(errors, TOO_COSTLY.values(), strict=True):
                assert isinstance(error, RequestError)
                assert error.field == ("json" if form.json else "grammar")
                assert str(error).endswith(f" is too complex: to compile it takes {limit}")
            assert memory() - before < 64 << 20
            assert (await llm.generate(PROMPT, asks(FORMS["lark"][0]))).finish_reason == "stop"

    asyncio.run(main())


def test_forms_of_requests_in_flight_share_a_bound_of_memory(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many requests wait. A form alone may take what the sandbox lets it take."""
    names = {f"property{i}": {"type": "string"} for i in range(300)}
    form = asks(StructuredOutputs(json={"type": "object", "properties": names}), max_tokens=4)
    monkeypatch.setattr("dflash_trt.async_llm.MOST_MEMORY", 1)

    async def main() -> None:
        async with AsyncLLM(bundle, threads=1, max_batch_size=1) as llm:
            stream = llm.stream(PROMPT, form)
            await anext(stream)
            waiting = asyncio.create_task(llm.generate(PROMPT, asks(FORMS["true"][0], max_tokens=4)))
            with pytest.raises(BusyError, match=r"the forms of requests in flight take [1-9]"):
                await llm.generate(PROMPT, form)
            assert (await llm.generate(PROMPT, SamplingParams(max_tokens=4))).finish_reason
            await stream.aclose()
            with pytest.raises(BusyError):
                await waiting
            assert (await llm.generate(PROMPT, form)).finish_reason == "length"

    asyncio.run(main())


# What compiles at once: tokens that take longer and longer, and a mask, behind a few tokens, that takes 0.4 s.
LAZY = {
    r"the form is too complex: \d+ tokens take 0\.": 'start: a\na: a a a a a a | a a | "a" | "b" | "ab" |',
    r"Too many items \(limit 10000": "start: /a{9}/ " + "b? " * 900 + "\nb: /[b-z]/ | /[c-z]/",
}


@pytest.mark.parametrize("match", LAZY)
def test_a_form_whose_tokens_take_too_long_ends(
    llm: LLM, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structure, "TOKEN_SECONDS", 0.001)
    form = llm.runtime.structures.compile(StructuredOutputs(grammar=LAZY[match]))
    (token,) = llm.runtime.tokenizer.encode("a")

    def write() -> None:
        for _ in range(80):
            assert form.allowed()[token]
            form.add(token)

    with pytest.raises(RequestError, match=match):
        write()


def memory() -> int:
    """Bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_form_is_tried_once_for_each_salt_and_a_choice_never(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, run = list[str](), structure.SANDBOX.run
    monkeypatch.setattr(structure.SANDBOX, "run", lambda task: tried.append(task["kind"]) or run(task))
    forms = [
        StructuredOutputs(choice=["x"]), StructuredOutputs(json_object=True), StructuredOutputs(regex="[a-c]{3}"),
    ]  # fmt: skip
    assert [llm.runtime.waits_for_form(asks(form)) for form in forms] == [False, False, True]
    for form in forms * 2:
        llm.generate(PROMPT, asks(form, max_tokens=2))
    assert tried == ["regex"]
    assert not any(llm.runtime.waits_for_form(asks(form)) for form in forms)
    assert [llm.runtime.waits_for_form(asks(form), "another") for form in forms] == [False, False, True]
    llm.runtime.structures.compile(forms[2], "another")
    assert tried == ["regex"] * 2


def test_the_missing_package_is_named(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match="needs the package llguidance: pip install"):
        llm.generate(PROMPT, asks(FORMS["gbnf"][0]))


class Asked:
    """A matcher that counts what it is asked."""

    def __init__(self, matcher: Any) -> None:
        self._matcher, self.masks, self.forced = matcher, 0, list[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)

    def deep_copy(self) -> Asked:
        copy = Asked(self._matcher.deep_copy())
        copy.forced = self.forced
        return copy

    def unsafe_compute_mask_ptr(self, *place: int) -> Any:
        self.masks += 1
        return self._matcher.unsafe_compute_mask_ptr(*place)

    def compute_ff_tokens(self) -> list[int]:
        found: list[int] = self._matcher.compute_ff_tokens()
        self.forced.append(len(found))
        return found


def asked(llm: LLM, form: StructuredOutputs) -> tuple[Structure, Asked]:
    structure = llm.runtime.structures.compile(form)
    structure._matcher = matcher = Asked(structure._matcher)
    return structure, matcher


LONG = " ".join([SENTENCE] * 700)
PROPERTIES = {"a": {"enum": [LONG]}}
OBJECT = {"type": "object", "properties": PROPERTIES, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    "form",
    [
        StructuredOutputs(choice=[LONG]),
        StructuredOutputs(regex=LONG.replace(".", "[.]")),
        StructuredOutputs(json={"const": LONG}),
        StructuredOutputs(json=OBJECT),
    ],
    ids=["choice", "regex", "const", "enum"],
)
def test_a_long_forced_text_is_tokenized_once(llm: LLM, form: StructuredOutputs) -> None:
    """llguidance tokenizes all of it for each mask, so a mask would cost as much as the text is long."""
    structure, matcher = asked(llm, form)
    found = list[int]()
    for _ in range(80):
        drafts, _ = structure.follow([5] * 7, 7)
        allowed = structure.allowed()
        token = drafts[0] if drafts else int(allowed.argmax())
        assert allowed[token]
        structure.add(token)
        found.append(token)
    text = llm.runtime.tokenizer.decode(found)
    assert SENTENCE in text
    assert matcher.masks < 20
    assert sum(count > LONG_FORCED for count in matcher.forced) <= 2  # once behind drafts


def test_a_long_text_behind_drafts_is_not_asked_for_in_every_round(llm: LLM) -> None:
    """The drafts may be refused each time."""
    structure, matcher = asked(llm, StructuredOutputs(grammar=f'start: ("x" | "q" tail)*\ntail: "{LONG}"'))
    (draft,) = llm.runtime.tokenizer.encode("q")
    rounds = [structure.follow([draft] * 4, 7)[0] for _ in range(5)]
    assert len(rounds[0]) == 7
    assert rounds[1:] == [[draft]] * 4
    assert sum(count > LONG_FORCED for count in matcher.forced) == 1


WIDE = " | ".join(f'"q{i}"' for i in range(2100))
TOO_WIDE = StructuredOutputs(grammar=f'start: "A" "Z" | "A" "B" "7" tail\ntail: {WIDE}')


class Failing:
    """A matcher whose copies fail when their n-th method is called."""

    def __init__(self, matcher: Any, calls: int, copied: bool = False) -> None:
        self._matcher, self._calls, self._copied = matcher, calls, copied

    def deep_copy(self) -> Failing:
        return Failing(self._matcher.deep_copy(), self._calls, copied=True)

    def __getattr__(self, name: str) -> Any:
        self._calls -= self._copied
        if self._calls < 0:
            raise Panic(name)
        return getattr(self._matcher, name)


@pytest.mark.parametrize("calls", [None, 0, 1, 2, 3])
def test_what_drafts_meet_ends_the_drafts_alone(llm: LLM, calls: int | None) -> None:
    """Whether llguidance says so or panics: the answer, and that of a neighbour, is that of plain decoding."""
    structures = llm.runtime.structures
    ids = [llm.runtime.tokenizer.encode(letter)[0] for letter in "AB7q"]
    texts, mine = [ids * 4, PROMPT], [TOO_WIDE, FORMS["regex"][0]]
    params = [asks(form, logit_bias={llm.runtime.tokenizer.encode("Z")[0]: 100.0}) for form in mine]

    def compiled(form: StructuredOutputs, salt: str) -> Structure:
        structure = Structures.compile(structures, form, salt)
        if calls is not None:
            structure._matcher = Failing(structure._matcher, calls)
        return structure

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(structures, "compile", compiled)
        drafted = llm.generate(texts, params, block_length=8, draft_source="lookup")
    plain = llm.generate(texts, params, speculate=False)
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
    assert plain[0].text == "AZ"

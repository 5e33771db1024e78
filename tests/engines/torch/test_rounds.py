"""What rounds and prompts cost on a GPU's double: allocations, copies and waits of the engine on torch."""

from __future__ import annotations

import itertools
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from dflash_plugins import launch

from dflash_trt import LLM, SamplingParams, StructuredOutputs
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.decoding.length.policy import FixedLength
from dflash_trt.decoding.params import RequestOptions
from dflash_trt.engines.device.stream import on
from dflash_trt.engines.torch import opening
from tests.doubles import cuda_double
from tests.doubles.cuda_double import Cuda


def by_operators(use: Any, grid: Any, **given: Any) -> None:
    """Kernels between passes whose work is simple, because the interpreter is slow: none accepts a draft."""

    def work() -> None:
        match use.function:
            case "fill_tokens":
                launch.fill_tokens(
                    **{n: given[n] for n in ("block", "drafts", "drafted", "tokens", "rows")},
                    most=0,
                    run=None,
                )
            case "end_round":
                memory = {name: given[name] for name in ("finite", "unread", "counters")}
                launch.end_round(given["logits"], given["features"], given["places"], **memory, run=None)
            case "accept_block":
                given["accepted"].fill_(0)
                given["next_token"].fill_(7)

    Cuda.launch(work)


@pytest.fixture
def gpu(gpu: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    gpu.setattr(opening, "_kernels", lambda wanted: by_operators)
    return gpu


def counted(llm: LLM, gpu: pytest.MonkeyPatch) -> list[Any]:
    """What each step from now on allocates, copies and waits for that ends a round, starts another one, and reads no
    prompt.
    """
    rounds, prompts = list[Any](), list[Any]()
    scheduler = llm.runtime.scheduler
    pair = scheduler.pair
    step, prefill = scheduler.step, pair.prefill

    def counting(*given: Any) -> Any:
        before, read = Cuda.counts.copy(), len(prompts)
        made = step(*given)
        passes = [*pair.drafter.passes, pair._verified]
        assert len({id(event) for each in passes for event in each}) == 2 * len(passes)
        counts = Cuda.counts - before
        if len(prompts) == read and counts["copies to the host"]:
            rounds.append(counts)
        return made

    gpu.setattr(pair, "prefill", lambda *given, **named: prompts.append(0) or prefill(*given, **named))
    gpu.setattr(scheduler, "step", counting)
    return rounds


@pytest.mark.parametrize(
    ("temperature", "passes", "waits", "options"),
    [
        (0.0, 2, 1, {"block_length": 4, "draft_source": "drafter"}),
        (0.8, 2, 1, {"block_length": 4, "draft_source": "drafter"}),
        (0.8, 1, 1, {"speculate": False}),
        (0.0, 1, 1, {"draft_source": "lookup"}),
        (0.8, 2, 1, {"block_length": 4, "draft_source": "drafter,lookup"}),
        (0.8, 2, 2, {"tree_nodes": 4}),
    ],
    ids=["drafts", "sampled drafts", "plain", "drafts of the text", "both", "trees"],
)
def test_a_round_allocates_nothing_and_waits_for_its_tokens(
    temperature: float,
    passes: int,
    waits: int,
    options: dict[str, Any],
    wide: Bundle,
    gpu: pytest.MonkeyPatch,
) -> None:
    """Greedy or sampled by kernels, with limits and log-probabilities, and where the host reads logits, which come with
    the tokens. For trees and structures it waits for the drafts too, and sends what it made of them. It sends one block
    of numbers before the drafter's pass, and another before the target's if that has another size than the one before.
    """
    limits = {"top_k": 20, "top_p": 0.9, "min_p": 0.01} if temperature else {}
    wanted = [SamplingParams(temperature=temperature, max_tokens=9, seed=5, ignore_eos=True, **limits)]
    wanted.append(replace(wanted[0], logprobs=True, top_logprobs=2))
    form = StructuredOutputs(regex="[a-z ]{9}")
    wanted.append(replace(wanted[0], ignore_eos=False, presence_penalty=0.5, structured_outputs=form))
    prompt = [*range(9), *range(8), 4]  # repeats itself
    with LLM(wide.path, max_batch_size=1) as llm:
        for params in (wanted[1], *wanted):
            llm.generate(prompt, params, **options)
        rounds = counted(llm, gpu)
        for params in wanted:
            blocks = llm.generate(prompt, params, **options).statistics.block_length_histogram
            structured = params.structured_outputs is not None
            assert any(blocks[2:]) == ("speculate" not in options) or structured
            replayed = [each for each in rounds if each["graph launches"] == passes]
            assert replayed
            rounds.clear()
            for each in replayed:
                assert not each["allocations"] + each["copies of pageable memory"], each
                most = 2 if structured and passes == 2 else waits
                assert each["waits"] == each["copies to the host"] - structured == most, each
                assert each["copies to the device"] <= passes, each


def test_a_thread_enters_a_stream_once(gpu: pytest.MonkeyPatch) -> None:
    """And again in another stream. Another thread enters it, too."""
    entered, enter, streams = list[Any](), Cuda.stream, [Cuda.Stream(), Cuda.Stream()]
    gpu.setattr(Cuda, "stream", lambda stream: entered.append(stream) or enter(stream))
    first, second = streams

    def failing() -> None:
        with on(second), on(second):
            assert Cuda.current is second
            raise ZeroDivisionError

    def work() -> None:
        with on(first), on(first):
            with pytest.raises(ZeroDivisionError):
                failing()
            with on(first):
                assert Cuda.current is first
            with on(second), on(first):
                assert Cuda.current is first

    for _ in range(2):
        entered.clear()
        work()
        assert entered == [first, second, second, first]
    with on(first), ThreadPoolExecutor(1) as threads:
        threads.submit(work).result()
    assert entered[4:] == [first, first, second, second, first]


def test_a_prompt_waits_once(wide: Bundle, gpu: pytest.MonkeyPatch) -> None:
    """For its logits, and for whether its features are finite; also if it takes two passes, of which the second
    overwrites what the first one gave.
    """
    with LLM(wide.path, max_batch_size=1, prefill_chunk=16) as llm:
        pair = llm.runtime.pair
        for _ in range(3):  # the first two prepare their passes
            before = Cuda.counts["waits"]
            logits, *finite = pair.prefill([*range(12)], 10, 0, draft=True)
        assert Cuda.counts["waits"] == before + 1
        assert np.isfinite(logits).all()
        assert finite == [True, True]
        fill, spoilt = pair.target.run, [torch.nan]

        def run(*given: Any, **named: Any) -> Any:
            outputs = fill(*given, **named)
            with Cuda.stream(pair.target.stream):
                outputs["features"][0, 3, 1] = spoilt.pop() if spoilt else 1.0
            return outputs

        gpu.setattr(pair.target, "run", run)
        for value in (torch.nan, torch.inf, -torch.inf):
            spoilt[:] = [value]
            assert pair.prefill([*range(12)], 10, 0, draft=True)[1] is False
            pair.clear(0)
            assert pair.prefill([*range(12)], 10, 0, draft=True)[1] is True


def test_rounds_of_requests_that_join_and_of_a_drafter_that_catches_up(
    wide: Bundle, gpu: pytest.MonkeyPatch
) -> None:
    """Nothing is allocated: what sampling must know of a request goes with the first numbers of a round, and the
    drafter reads what waits in a pass of few sizes. Where a region begins goes with the launch that writes it there.
    """
    with LLM(wide.path, max_batch_size=3) as llm:
        runtime, rounds = llm.runtime, counted(llm, gpu)
        options = RequestOptions(draft_source="drafter")
        for _ in range(3):
            rounds.clear()
            for params in SamplingParams(temperature=0.8, max_tokens=14, seed=1, ignore_eos=True).samples(3):
                runtime.scheduler.submit(runtime.request([*range(9)], params, options))
                for length in (1, 1, 1, 1, 1, 4):
                    runtime.scheduler.step(FixedLength(length))
            while not runtime.scheduler.idle:
                runtime.scheduler.step(FixedLength(4))
        assert any(each["graph launches"] == each["copies to the device"] == 2 for each in rounds)
        for each in rounds:
            assert not each["allocations"] + each["copies of pageable memory"], each
            assert each["waits"] == each["copies to the host"] == 1, each
            assert each["copies to the device"] <= 2, each


def test_what_adjusts_the_logits_of_a_request_is_sent_while_a_round_runs(
    wide: Bundle, gpu: pytest.MonkeyPatch
) -> None:
    adjusted = {"presence_penalty": 0.5, "logit_bias": {3: 1.0, 7: -2.0}, "allowed_token_ids": [3, 5, 7]}
    adjusted |= {"max_tokens": 9}
    with LLM(wide.path, max_batch_size=2) as llm:
        asked = llm.runtime.request([4, 9], SamplingParams(**adjusted), RequestOptions())  # type: ignore[arg-type]
        asked.output.append(5)
        arrays, before = llm.runtime.pair.arrays, Cuda.counts.copy()
        with arrays.stream():
            arrays._adjusting.start([asked], [True])
        counts = Cuda.counts - before
        assert not counts["waits"] + counts["copies of pageable memory"]
        names = "bias", "factors", "texts", "counts"
        bias, factors, texts, seen = arrays.readable(*(arrays._adjusting.memory[name][0] for name in names))
    assert {i: x for i, x in enumerate(bias) if x > -np.inf} == {3: 1.0, 5: 0.0, 7: -2.0}
    assert factors[:3].tolist() == [1.0, 0.0, 0.5]
    assert texts[0] == 5
    assert np.flatnonzero(seen).tolist() == [4, 9]


def test_an_allocation_that_fails_ends_at_most_its_request(wide: Bundle, gpu: pytest.MonkeyPatch) -> None:
    """In each line that allocates once the engine is open: for a pass, its results, or what is known of a request."""
    allocate, refused = cuda_double._garbage, dict[Any, str]()
    adjusted = {"temperature": 0.8, "presence_penalty": 0.5, "logit_bias": {3: 1.0}}

    def once(shape: Any) -> Any:
        stack = [each for each in traceback.extract_stack() if "engines/device/" in each.filename]
        if not Cuda.running and (stack[-1].name, stack[-1].lineno) not in refused:
            refused[stack[-1].name, stack[-1].lineno] = stack[-1].name
            raise torch.OutOfMemoryError("CUDA out of memory. Tried")
        return allocate(shape)

    with LLM(wide.path, max_batch_size=2, cache_tokens=300) as llm:
        runtime, scheduler = llm.runtime, llm.runtime.scheduler

        def answers() -> list[Any]:
            params = [SamplingParams(max_tokens=3, ignore_eos=True, seed=i, **adjusted) for i in range(8)]
            options = RequestOptions(draft_source="drafter")
            asked = [runtime.request([i, 5, 9], each, options) for i, each in enumerate(params)]
            for each in asked:
                scheduler.submit(each)
            ends = dict[Any, Any]()
            while not scheduler.idle:
                ends |= {e.request: e.error for e in scheduler.step(FixedLength(2)) if e.finish_reason}
            return [(each.output[:3], ends[each]) for each in asked]

        whole = answers()
        gpu.setattr(cuda_double, "_garbage", once)
        found = answers()
    assert {"finite", "_load", "_ids"} <= set(refused.values())
    assert len([error for _, error in found if error]) <= len(refused) < 12
    for (tokens, error), (right, _) in zip(found, whole, strict=True):
        assert tokens == right[: len(tokens)]
        assert len(tokens) == 3 if error is None else "no memory" in str(error)


def test_a_round_of_chains_sends_its_numbers_once_after_one_of_another_length(
    wide: Bundle, gpu: pytest.MonkeyPatch
) -> None:
    """Of a pair that takes trees, too."""
    with LLM(wide.path, max_batch_size=1) as llm:
        runtime, rounds = llm.runtime, counted(llm, gpu)
        params, options = (
            SamplingParams(max_tokens=60, ignore_eos=True),
            RequestOptions(draft_source="drafter"),
        )
        runtime.scheduler.submit(runtime.request([*range(9)], params, options))
        for length in (4, 2) * 6:
            runtime.scheduler.step(FixedLength(length))
        replayed = [each["copies to the device"] for each in rounds if each["graph launches"] == 2]
        assert len(replayed) > 5
        assert set(replayed) == {1}


def test_views_of_a_round_have_the_shape_that_is_asked_for(wide: Bundle, gpu: pytest.MonkeyPatch) -> None:
    """Several lengths have one width, and several numbers of sequences one batch."""
    with LLM(wide.path, max_batch_size=8) as llm:
        arrays = llm.runtime.pair.arrays
        memory = arrays._round
        for _, n, length in itertools.product(range(2), range(1, 9), (2, 3, 4)):
            views = {"block": memory.blocks([5] * n, length, 9), "tokens": memory.tokens()}
            for name, view in views.items():
                assert (view.shape, view.stride()) == ((n, length), (memory._block[1], 1))
                assert view.data_ptr() == memory._device_parts[name].data_ptr()
            for name in ("tokens", "draft_tokens"):
                kept = memory.drafted(name, n, length)  # the next pass does not overwrite it
                read = memory.landing.read(name, n, length)
                assert read.shape == kept.shape == (n, length)
                assert not np.shares_memory(kept, read)
            given = {name: np.zeros(n, np.int64) for name in ("start", "n_features")}
            feeds = memory.drafter_feeds(given | {"block": views["block"]}, arrays._unread)
            assert {name: len(each) for name, each in feeds.items()} == dict.fromkeys(feeds, memory._block[0])


def test_features_of_accepted_nodes_are_copied_together(wide: Bundle, gpu: pytest.MonkeyPatch) -> None:
    """Their places reach the device with the next pass, however many they are, or at once if they are asked for."""
    with LLM(wide.path, max_batch_size=2) as llm:
        pair = llm.runtime.pair
        arrays, numbers = pair.arrays, torch.randn(2, 4, pair.arrays._unread.shape[2])
        with Cuda.stream(pair.target.stream):
            arrays._features = features = numbers.to("cuda")
        counts = list[Any]()
        for context in range(40, 44):  # the third pass is a graph
            if context == 43:
                arrays.add_unread(0, 0, features, [0, 2, 3])
                arrays.add_unread(1, 1, features, [0, 3])
            before = Cuda.counts.copy()
            pair.drafter.dummy_pass(2, 4, context)
            counts.append(Cuda.counts - before)
        assert [each["kernels"] for each in counts[2:]] == [0, 2]
        assert counts[2]["copies to the device"] == counts[3]["copies to the device"]
        kept = torch.from_numpy(arrays.readable(arrays.unread_features([3, 3]))[0])
        assert torch.equal(kept[0, :3], numbers[0, [0, 2, 3]])
        assert torch.equal(kept[1, 1:3], numbers[1, [0, 3]])

        def unread(slot: int) -> torch.Tensor:
            return torch.from_numpy(arrays.readable(arrays.unread_features_of(slot, 0, 2))[0])[0]

        arrays.add_unread(0, 0, features, [0, 3])
        assert torch.equal(unread(0), numbers[0, [0, 3]])
        arrays.add_unread(0, 0, features, [1, 3])
        arrays.copy_unread(0, 1, 2)
        assert torch.equal(unread(1), numbers[0, [1, 3]])
        arrays.add_unread(1, 0, features, [0, 3])
        arrays.clear_unread(1)
        assert not unread(1).any()

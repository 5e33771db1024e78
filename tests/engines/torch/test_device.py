"""The engine on torch, on a GPU's double: whose work is deferred.

docs/torch.md says what this leaves open.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dflash_plugins import compiled, launch, packed
from dflash_plugins import kernel_specs as uses
from dflash_plugins.launch import by_triton

from dflash_trt import LLM, SamplingParams, StructuredOutputs
from dflash_trt.building.build import build
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.decoding.length.policy import FixedLength
from dflash_trt.decoding.params import RequestOptions
from dflash_trt.engines.device.sizes import DECODE, PREFILL
from dflash_trt.engines.device.stream import on
from dflash_trt.engines.torch import engine, kernels, layers, opening
from dflash_trt.engines.torch.checks import random_weight
from dflash_trt.engines.torch.operators import OPERATORS
from dflash_trt.engines.torch.packed import _tile
from dflash_trt.errors import BuildError
from dflash_trt.formats.precision import Precision
from tests.doubles import triton_interpreter  # noqa: F401  # corrects it
from tests.doubles.checkpoints import make_drafter, make_target
from tests.doubles.cuda_double import Cuda
from tests.doubles.one_gpu import one_gpu
from tests.engines.torch.test_pairs import FLOAT32, prompts


@pytest.fixture
def gpu() -> Iterator[pytest.MonkeyPatch]:
    with one_gpu(on_host=False) as patch:
        patch.setattr(opening, "warm_up", lambda *_, **__: 0)
        yield patch


def bundle(
    directory: Path,
    make: Any,
    make_draft: Any,
    precision: Precision,
    tree_width: int = 1,
) -> Bundle:
    target = make(directory / "target", favourites=6)
    drafter = make_draft(directory / "drafter", target, block_size=4, layers=1)
    given: dict[str, Any] = {"engine": "torch", "precision": precision, "max_seq_len": 100}
    given["tree_width"] = tree_width
    return build(str(target), str(drafter), directory / "bundle", **given)


def params(temperature: float, *lengths: int) -> list[SamplingParams]:
    return [SamplingParams(temperature=temperature, max_tokens=n, seed=n, ignore_eos=True) for n in lengths]


def tokens(llm: LLM, temperature: float, count: int = 3, **options: Any) -> list[list[int]]:
    completions = llm.generate(prompts()[:count], params(temperature, 8, 5, 6)[:count], **options)
    return [c.token_ids for c in completions]


def test_graphs_of_every_shape_give_the_tokens_of_a_cpu(tmp_path: Path, gpu: pytest.MonkeyPatch) -> None:
    """In float32, where torch's operators take the kernels' place: a read too early, memory that is not the graph's or
    a number of the host that changes would give other tokens.
    """
    made = bundle(tmp_path, make_target, make_drafter, FLOAT32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cuda, "is_available", staticmethod(lambda: False))
        with LLM(made.path, max_batch_size=2, threads=1) as llm:
            expected = tokens(llm, 0.8, block_length=4)
    with LLM(made.path, max_batch_size=2) as llm:
        target = llm._runtime.pair.target
        assert target.device.type == "cuda"
        for length in (4, 2, 4):
            assert tokens(llm, 0.8, block_length=length) == expected
        assert len(target._captured) >= 2
        assert all(graph.replays for graph in Cuda.graphs)
        assert {slot for (profile, *_), slot in target._captured if profile == PREFILL} == {0, 1}


def test_a_prompt_s_pass_of_a_drafter_fills_its_caches_alone(tmp_path: Path) -> None:
    """No row is multiplied with the head, which has most of the weights that such a pass would read."""
    made = bundle(tmp_path, make_target, make_drafter, FLOAT32)
    with LLM(made.path, max_batch_size=1, threads=1) as llm:
        tokens(llm, 0.0, 1, block_length=4)
        engine = llm._runtime.pair.drafter.engine
        products = defaultdict[int, set[int]](set)
        for (profile, *_), program in engine._programs.items():
            products[profile].add(sum(step.function is OPERATORS["Gemm"] for step in program._steps))
    assert products[PREFILL].isdisjoint(products[DECODE])
    assert max(products[PREFILL]) <= min(products[DECODE]) - 2  # the head and the last MLP


def test_exact_mode_compares_passes_over_as_much_as_attention_divides(
    wide: Bundle, gpu: pytest.MonkeyPatch
) -> None:
    """It has fewer parts for several sequences, which changes no bit where each part has one stripe."""
    gpu.setattr(opening, "_kernels", lambda wanted: by_operators)
    with LLM(wide.path, max_batch_size=1) as llm:
        gpu.setattr(llm._runtime, "max_seq_len", 4096)
        longest = max(map(len, llm._runtime.measured_prompts()))
    assert longest > uses.ATTENTION_STRIPE * uses.ATTENTION_SPLITS


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


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A pair that verifies trees too."""
    with one_gpu():
        return bundle(tmp_path_factory.mktemp("wide"), make_target, make_drafter, FLOAT32, tree_width=2)


def counted(llm: LLM, gpu: pytest.MonkeyPatch) -> list[Any]:
    """What each round from now on allocates, copies and waits for."""
    rounds: list[Any] = []
    scheduler = llm._runtime.scheduler
    pair = scheduler.pair
    launch, decide = scheduler._launch, scheduler._decide

    def counting(*given: Any) -> Any:
        before = Cuda.counts.copy()
        return before, launch(*given)

    def counted(launched: Any, *given: Any) -> Any:
        before, round_ = launched
        made = decide(round_, *given)
        rounds.append(Cuda.counts - before)
        passes = [*pair.drafter._passes, pair._verified]
        assert len({id(event) for each in passes for event in each}) == 2 * len(passes)
        return made

    gpu.setattr(scheduler, "_launch", counting)
    gpu.setattr(scheduler, "_decide", counted)
    return rounds


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    ("passes", "waits", "options"),
    [
        (2, 1, {"block_length": 4, "draft_source": "drafter"}),
        (1, 1, {"speculate": False}),
        (1, 1, {"draft_source": "lookup"}),
        (2, 1, {"block_length": 4, "draft_source": "drafter,lookup"}),
        (2, 2, {"tree_nodes": 4}),
    ],
    ids=["drafts", "plain", "drafts of the text", "both", "trees"],
)
def test_a_round_allocates_nothing_and_waits_for_its_tokens(
    passes: int,
    waits: int,
    options: dict[str, Any],
    temperature: float,
    wide: Bundle,
    gpu: pytest.MonkeyPatch,
) -> None:
    """Greedy or sampled by kernels, with limits, and where the host reads logits, which come with the tokens. For trees
    and structures it waits for the drafts too, and sends what it made of them. It sends one block of numbers before
    the drafter's pass, and another before the target's if that has another size than the one before.
    """
    gpu.setattr(opening, "_kernels", lambda wanted: by_operators)
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
                read = params.logprobs or structured
                assert each["waits"] == each["copies to the host"] - read == most, each
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
    gpu.setattr(opening, "_kernels", lambda wanted: by_operators)
    with LLM(wide.path, max_batch_size=1, prefill_chunk=16) as llm:
        pair = llm._runtime.pair
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
    drafter reads what waits in a pass of few sizes.
    """
    gpu.setattr(opening, "_kernels", lambda wanted: by_operators)
    with LLM(wide.path, max_batch_size=3) as llm:
        runtime, rounds = llm._runtime, counted(llm, gpu)
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


def test_a_round_of_chains_sends_its_numbers_once_after_one_of_another_length(
    wide: Bundle, gpu: pytest.MonkeyPatch
) -> None:
    """Of a pair that takes trees, too."""
    gpu.setattr(opening, "_kernels", lambda wanted: by_operators)
    with LLM(wide.path, max_batch_size=1) as llm:
        runtime, rounds = llm._runtime, counted(llm, gpu)
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
    gpu.setattr(opening, "_kernels", lambda wanted: by_operators)
    with LLM(wide.path, max_batch_size=8) as llm:
        arrays = llm._runtime.pair.arrays
        memory = arrays._round
        for _, n, length in itertools.product(range(2), range(1, 9), (2, 3, 4)):
            views = {"block": memory.blocks([5] * n, length, 9), "tokens": memory.tokens()}
            for name, view in views.items():
                assert (view.shape, view.stride()) == ((n, length), (memory._block[1], 1))
                assert view.data_ptr() == memory._device_parts[name].data_ptr()
                read = memory.on_host(name, n, length)
                assert read.shape == (n, length)
                assert np.shares_memory(read, memory._host_parts[name])
                kept = memory.drafted(name, n, length)  # the next pass does not overwrite it
                assert not np.shares_memory(kept, memory._host_parts[name])
            given = {name: np.zeros(n, np.int64) for name in ("start", "n_features")}
            feeds = memory.drafter_feeds(given | {"block": views["block"]}, arrays._unread)
            assert {name: len(each) for name, each in feeds.items()} == dict.fromkeys(feeds, memory._block[0])


def test_features_of_accepted_nodes_are_copied_together(wide: Bundle, gpu: pytest.MonkeyPatch) -> None:
    """Their places reach the device with the next pass, however many they are, or at once if they are asked for."""
    gpu.setattr(opening, "_kernels", lambda wanted: by_operators)
    with LLM(wide.path, max_batch_size=2) as llm:
        pair = llm._runtime.pair
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
        arrays.add_unread(0, 0, features, [0, 3])
        assert torch.equal(
            torch.from_numpy(arrays.readable(arrays.unread_features_of(0, 0, 2))[0])[0], numbers[0, [0, 3]]
        )


def test_a_pass_that_cannot_be_captured_runs_without_graphs(
    tmp_path: Path, gpu: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """First a prompt, for which there is no memory: rounds have theirs."""
    made = bundle(tmp_path, make_target, make_drafter, FLOAT32)
    refused, capture = list[str](), Cuda.CUDAGraph.capture_begin

    def begin(self: Any, *given: Any, **named: Any) -> None:
        if refused:
            raise torch.OutOfMemoryError(refused.pop())
        capture(self, *given, **named)

    gpu.setattr(Cuda.CUDAGraph, "capture_begin", begin)
    with LLM(made.path, max_batch_size=1, prefix_cache_bytes=0) as llm:
        expected, pair = tokens(llm, 0.0, 1), llm._runtime.pair
        kept = set(pair.target._captured)
        assert kept
        assert not pair.target._prompts()
        refused += ["of the drafter", "no memory is left"]
        assert tokens(llm, 0.0, 1) == tokens(llm, 0.0, 1, block_length=2) == expected
        assert not pair.target._prompts() + pair.drafter.engine._prompts()
        assert set(pair.target._captured) > kept
        refused.append("operation not permitted")
        assert tokens(llm, 0.0, 1, block_length=3, draft_source="lookup") == expected
    assert "prompts run without CUDA graphs, because a capture failed: no memory is left" in caplog.text


def test_a_capture_needs_nothing_that_a_thread_makes_once(tmp_path: Path, gpu: pytest.MonkeyPatch) -> None:
    """An `AsyncLLM` is opened by another thread than that of its rounds, whose first pass would be a capture."""
    made = bundle(tmp_path, make_target, make_drafter, FLOAT32)
    with LLM(made.path, max_batch_size=1, prefix_cache_bytes=0) as llm:
        expected = tokens(llm, 0.0, 1)
        gpu.setattr(Cuda, "handle", False)
        assert tokens(llm, 0.0, 1) == expected
        assert llm._runtime.pair.target._prompts() == 1


def test_programs_and_captured_prompts_are_bounded(tmp_path: Path, gpu: pytest.MonkeyPatch) -> None:
    """As each slot has prompts of its own. No graph ends before the engine is closed."""
    gpu.setattr(engine, "MOST_PROGRAMS", 1)
    gpu.setattr(engine, "MOST_PROMPTS", 1)
    made = bundle(tmp_path, make_target, make_drafter, FLOAT32)
    with LLM(made.path, max_batch_size=2, prefix_cache_bytes=0) as llm:
        expected = tokens(llm, 0.8)
        for _ in range(2):
            assert tokens(llm, 0.8) == expected
        target, drafter = llm._runtime.pair.target, llm._runtime.pair.drafter.engine
        captured = {key for key, _ in target._captured}
        assert captured <= set(target._programs)
        assert len(set(target._programs) - captured) <= 1
        assert target._prompts() <= 1
        assert captured
        assert len(Cuda.graphs) == len(target._captured) + len(drafter._captured)


def test_tiles_that_do_not_compile_are_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    q = torch.randn(1, 2, 3, 64).half()
    cache, rows = torch.randn(1, 1, 16, 64).half(), torch.tensor([[0, 1, 2]])
    given = {"scale": 0.125}, q, cache, cache, rows * 0, rows
    tried: list[Any] = []

    def run(use: Any, *grid: Any, **arguments: Any) -> None:
        if use.function == "attend":
            tried.append(use)
            if use in tried[:2]:
                raise BuildError("it writes nothing")
        by_triton(use, *grid, **arguments)

    exact = layers.attend(*given)
    monkeypatch.setattr(kernels, "of", lambda x: kernels.LayerKernels(run))
    for _ in range(2):
        torch.testing.assert_close(layers.attend(*given), exact, atol=2e-3, rtol=0)
    assert tried[:3] == tried[3:], "the third tile stays the first one that compiles"
    assert len(set(map(str, tried))) == 3
    assert not caplog.text

    def never(*given: Any, **arguments: Any) -> None:
        raise BuildError("ptxas refused it")

    monkeypatch.setattr(kernels, "of", lambda x: kernels.LayerKernels(never))
    for _ in range(2):
        torch.testing.assert_close(layers.attend(*given), exact, atol=2e-3, rtol=0)
    assert caplog.text.count("no kernel of ours for attention on this GPU: ptxas refused it") == 1


def test_without_a_compiler_torchs_operators_and_the_host_do_the_work(
    gpu: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.setattr(compiled, "trial", lambda: "Triton cannot be imported")
    gpu.setattr(compiled, "no_compiler", lambda: "Triton cannot be imported")
    kernels._of_this_gpu.cache_clear()
    assert kernels._of_this_gpu() is None
    assert opening._kernels([]) is None
    kernels._of_this_gpu.cache_clear()
    assert "Triton cannot be imported; torch's operators take the place of all kernels" in caplog.text


@pytest.mark.parametrize(("wrong", "experts"), [("widen", 0), ("product", 0), ("experts_product", 3)])
def test_a_kernel_with_other_numbers_is_not_used(
    wrong: str, experts: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A layer is then widened, as where no kernel compiles. Of a stack, two experts are tried."""
    right = getattr(packed, wrong)
    stored, wide = random_weight(packed.Packing(32, 128, "int4", "bf16", group=32, experts=experts))
    dense = wide.to(torch.bfloat16).view(-1, 32, 128)
    layer, asked = kernels.LayerKernels(by_triton), list[int]()

    def widened(expert: int) -> torch.Tensor:
        asked.append(expert)
        return dense[expert]

    for each in (stored, replace(stored, codes=stored.codes * 0)):  # which is not tried: its form was
        assert _tile(layer, each, dense.dtype, widened) is not None
    assert asked == ([0, 2] if experts else [0])
    nothing = replace(stored, codes=stored.codes * 0)
    assert _tile(kernels.LayerKernels(by_triton), nothing, dense.dtype, lambda _: dense[0] * 0) is not None
    monkeypatch.setattr("dflash_trt.logs._warned", set())  # the error may be that of another case
    monkeypatch.setattr(packed, wrong, lambda *given: right(*given) * 1.05)
    assert _tile(kernels.LayerKernels(by_triton), stored, dense.dtype, dense.__getitem__) is None
    assert "no kernel of ours for packed weights on this GPU" in caplog.text

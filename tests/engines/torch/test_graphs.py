"""CUDA graphs and programs of the engine on torch, on a GPU's double: whose work is deferred.

docs/torch.md says what this leaves open.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_trt import LLM, SamplingParams
from dflash_trt.building.build import build
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.engines.device.sizes import DECODE, PREFILL
from dflash_trt.engines.torch import runner
from dflash_trt.engines.torch.operators import OPERATORS
from dflash_trt.graph import torch as torch_graph
from tests.doubles.checkpoints import make_drafter, make_target
from tests.doubles.cuda_double import Cuda
from tests.doubles.two_engines import FLOAT32
from tests.engines.torch.test_pairs import prompts


def params(temperature: float, *lengths: int) -> list[SamplingParams]:
    return [SamplingParams(temperature=temperature, max_tokens=n, seed=n, ignore_eos=True) for n in lengths]


def tokens(llm: LLM, temperature: float, count: int = 3, **options: Any) -> list[list[int]]:
    completions = llm.generate(prompts()[:count], params(temperature, 8, 5, 6)[:count], **options)
    return [c.token_ids for c in completions]


def test_graphs_of_every_shape_give_the_tokens_of_a_cpu(chains: Bundle, gpu: pytest.MonkeyPatch) -> None:
    """In float32, where torch's operators take the kernels' place: a read too early, memory that is not the graph's or
    a number of the host that changes would give other tokens.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cuda, "is_available", staticmethod(lambda: False))
        with LLM(chains.path, max_batch_size=2, threads=1) as llm:
            expected = tokens(llm, 0.8, block_length=4)
    with LLM(chains.path, max_batch_size=2) as llm:
        target, llm.runtime.pair.most_together = (
            llm.runtime.pair.target,
            1,
        )  # what reads several is not captured
        assert target.device.type == "cuda"
        for length in (4, 2, 4):
            assert tokens(llm, 0.8, block_length=length) == expected
        assert len(target._captured) >= 2
        assert all(graph.replays for graph in Cuda.graphs)
        assert {slot for _, slot in target._captured} == {0}  # each is for any slots


def test_rounds_that_start_ahead_move_the_rows_of_windows(tmp_path: Path, gpu: pytest.MonkeyPatch) -> None:
    """While the next round runs, for the one after it: of the target and of the drafter."""
    gpu.setattr(torch_graph, "STRIDE", 32)
    windowed = {"sliding_window": 20, "layer_types": ("sliding_attention", "full_attention"), "layers": 2}
    target = make_target(tmp_path / "target", favourites=6, **windowed)
    drafter = make_drafter(tmp_path / "drafter", target, block_size=4, taps=(0, 1), **windowed)
    made = {"engine": "torch", "precision": FLOAT32, "max_seq_len": 200}
    bundle = build(str(target), str(drafter), tmp_path / "bundle", **made)
    found, moved, followed = list[Any](), list[str](), list[int]()
    for on_gpu in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Cuda, "is_available", staticmethod(lambda on_gpu=on_gpu: on_gpu))
            llm = LLM(bundle.path, max_batch_size=4, prefill_chunk=32)  # three requests run as four
        with llm:
            pair = llm.runtime.pair
            follow = pair.follow
            for role, runner in (("target", pair.target), ("drafter", pair.drafter.runner)):
                for kind in runner.caches.kinds:
                    drop = kind.pool.drop
                    gpu.setattr(
                        kind.pool, "drop", lambda *at, f=drop, role=role: moved.append(role) or f(*at)
                    )
            gpu.setattr(pair, "follow", lambda *given, f=follow: followed.append(1) or f(*given))
            asked = params(0.0, 60, 75, 90)
            found.append([c.token_ids for c in llm.generate(prompts()[:3], asked, block_length=4)])
            rounds = sum(llm.metrics._block_lengths)
    assert found[0] == found[1]
    assert moved.count("target") > 4
    assert moved.count("drafter") > 4
    assert len(followed) > rounds / 2


def test_a_prompt_s_pass_of_a_drafter_fills_its_caches_alone(chains: Bundle) -> None:
    """No row is multiplied with the head, which has most of the weights that such a pass would read."""
    with LLM(chains.path, max_batch_size=1, threads=1) as llm:
        tokens(llm, 0.0, 1, block_length=4)
        engine = llm.runtime.pair.drafter.runner
        products = defaultdict[int, set[int]](set)
        for (profile, *_), program in engine._programs.items():
            products[profile].add(sum(step.function is OPERATORS["Gemm"] for step in program._steps))
    assert products[PREFILL].isdisjoint(products[DECODE])
    assert max(products[PREFILL]) <= min(products[DECODE]) - 2  # the head and the last MLP


def test_a_pass_that_cannot_be_captured_runs_without_graphs(
    chains: Bundle, gpu: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """First a prompt, for which there is no memory: rounds have theirs."""
    refused, capture = list[str](), Cuda.CUDAGraph.capture_begin

    def begin(self: Any, *given: Any, **named: Any) -> None:
        if refused:
            raise torch.OutOfMemoryError(refused.pop())
        capture(self, *given, **named)

    gpu.setattr(Cuda.CUDAGraph, "capture_begin", begin)
    with LLM(chains.path, max_batch_size=1, prefix_cache_bytes=0) as llm:
        expected, pair = tokens(llm, 0.0, 1, block_length=4), llm.runtime.pair
        kept = set(pair.target._captured)
        assert kept
        assert not pair.target._prompts()
        refused += ["of the drafter", "no memory is left"]
        assert tokens(llm, 0.0, 1, block_length=4) == tokens(llm, 0.0, 1, block_length=2) == expected
        assert not pair.target._prompts() + pair.drafter.runner._prompts()
        assert set(pair.target._captured) > kept
        refused.append("operation not permitted")
        assert tokens(llm, 0.0, 1, block_length=3, draft_source="lookup") == expected
    assert "prompts run without CUDA graphs, because a capture failed: no memory is left" in caplog.text


def test_a_first_capture_that_fails_takes_the_memory_of_none(
    chains: Bundle, gpu: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its graph ends, and torch takes no more graphs into the pool of one that was the last."""
    refused, end = ["no memory is left"], Cuda.CUDAGraph.capture_end

    def fails(self: Any) -> None:
        end(self)
        if refused:
            raise torch.OutOfMemoryError(refused.pop())

    gpu.setattr(Cuda.CUDAGraph, "capture_end", fails)
    with LLM(chains.path, max_batch_size=1, prefix_cache_bytes=0) as llm:
        assert tokens(llm, 0.0, 1) == tokens(llm, 0.0, 1)
        engines = llm.runtime.pair.target, llm.runtime.pair.drafter.runner
        assert not refused
        assert all(each._captured for each in engines)
    assert len([line for line in caplog.messages if "without CUDA graphs" in line]) == 1


def test_a_capture_needs_nothing_that_a_thread_makes_once(chains: Bundle, gpu: pytest.MonkeyPatch) -> None:
    """An `AsyncLLM` is opened by another thread than that of its rounds, whose first pass would be a capture."""
    with LLM(chains.path, max_batch_size=1, prefix_cache_bytes=0) as llm:
        expected = tokens(llm, 0.0, 1)
        gpu.setattr(Cuda, "handle", False)
        assert tokens(llm, 0.0, 1) == expected
        assert llm.runtime.pair.target._prompts() == 1


def test_programs_and_captured_prompts_are_bounded(chains: Bundle, gpu: pytest.MonkeyPatch) -> None:
    """As each slot has prompts of its own. No graph ends before the engine is closed."""
    gpu.setattr(runner, "MOST_PROGRAMS", 1)
    gpu.setattr(runner, "MOST_PROMPTS", 1)
    with LLM(chains.path, max_batch_size=2, prefix_cache_bytes=0) as llm:
        expected = tokens(llm, 0.8)
        for _ in range(2):
            assert tokens(llm, 0.8) == expected
        target, drafter = llm.runtime.pair.target, llm.runtime.pair.drafter.runner
        captured = {key for key, _ in target._captured}
        assert captured <= set(target._programs)
        assert len(set(target._programs) - captured) <= 1
        assert target._prompts() <= 1
        assert captured
        assert len(Cuda.graphs) == len(target._captured) + len(drafter._captured)

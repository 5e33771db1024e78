"""The engine that runs plans, behind `LLM`, over a stand-in for TensorRT (fake_tensorrt.py).

Tokens must equal those of the same pair on ONNX Runtime. No GPU is involved; docs/tensorrt.md says what that leaves
open.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dflash_plugins.launch import by_triton

from dflash_trt import LLM, Completion, SamplingParams, StructuredOutputs
from dflash_trt.building.build import build
from dflash_trt.bundle.manifest import Bundle, write_manifest
from dflash_trt.decoding.length.adaptive import AdaptiveLength
from dflash_trt.decoding.pair import PassRule
from dflash_trt.engines.device.sizes import DECODE
from dflash_trt.engines.tensorrt.options import TensorRTOptions
from dflash_trt.errors import BatchError, BuildError, BundleError, EngineError, NonFiniteError
from dflash_trt.formats.precision import Precision
from tests.decoding.test_isolation import SPOILT, spoil, spoilt_prompt
from tests.doubles import fake_tensorrt
from tests.doubles.checkpoints import make_drafter, make_target
from tests.doubles.cuda_double import Cuda
from tests.doubles.family_checkpoints import make_gpt_oss, make_gpt_oss_drafter
from tests.doubles.one_gpu import one_gpu

FLOAT32 = Precision(target="fp32", drafter="fp32")
BLOCK = 6


@pytest.fixture(scope="module")
def here() -> Any:
    """A machine with one GPU of compute capability 9.0 and TensorRT, as the project sees it."""
    with one_gpu(on_host=False) as patch:
        yield patch


@pytest.fixture(scope="module", params=["qwen3", "gpt-oss"])
def bundles(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, here: Any
) -> tuple[Bundle, Bundle]:
    """One pair, built for ONNX Runtime and for TensorRT."""
    directory = tmp_path_factory.mktemp("runtime")
    if request.param == "qwen3":
        target = make_target(directory / "target", favourites=6)
        drafter = make_drafter(directory / "drafter", target, block_size=BLOCK)
    else:
        target = make_gpt_oss(directory / "target", favourites=6, quantized=False)
        drafter = make_gpt_oss_drafter(directory / "drafter", target, block_size=BLOCK, layers=2)
    plain = build(str(target), str(drafter), directory / "onnxruntime", max_seq_len=100)
    options = TensorRTOptions(max_batch_size=3, prefill_chunk=16)
    return plain, build(
        str(target),
        str(drafter),
        directory / "tensorrt",
        engine="tensorrt",
        max_seq_len=100,
        precision=FLOAT32,
        options=options,
    )


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, 300, n).tolist() for n in (3, 40, 17, 1, 25)]


def params(temperature: float) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=temperature, max_tokens=n, seed=n, ignore_eos=True)
        for n in (30, 8, 50, 21, 12)
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_tokens_are_those_of_onnxruntime(bundles: tuple[Bundle, Bundle], temperature: float) -> None:
    """Five requests in three slots, with and without drafting, blocks of several lengths, prompts with common rows."""
    with LLM(bundles[0].path, threads=1) as reference:
        expected = [c.token_ids for c in reference.generate(prompts(), params(temperature))]
    with LLM(bundles[1].path, prefix_cache_bytes=1 << 20) as llm:
        for block_length in (BLOCK, 1, None, 3, BLOCK):
            completions = llm.generate(prompts(), params(temperature), block_length=block_length)
            assert [c.token_ids for c in completions] == expected
        accepted = sum(c.statistics.num_accepted_tokens for c in completions)
        assert accepted > 0
        mixed = llm.generate(prompts()[:2], params(temperature)[:2], speculate=False)
        assert [c.token_ids for c in mixed] == expected[:2]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_padded_passes_give_the_same_tokens(
    bundles: tuple[Bundle, Bundle], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In exact mode a pass has copies of its last rows, made on the device or on the host."""
    with LLM(bundles[0].path, threads=1) as reference:
        expected = [c.token_ids for c in reference.generate(prompts(), params(temperature))]
    with LLM(bundles[1].path, prefix_cache_bytes=1 << 20) as llm:
        pair, widths = llm._runtime.pair, set[int]()
        pair.arrays.samples = False
        llm._runtime.scheduler.follow(PassRule((4, BLOCK), any_cut=False))
        run = pair.target.run

        def watched(profile: int, feeds: Any, **given: Any) -> Any:
            widths.update({feeds["tokens"].shape[1]} if profile == DECODE else ())
            return run(profile, feeds, **given)

        monkeypatch.setattr(pair.target, "run", watched)
        for block_length in (BLOCK, None, 3):
            completions = llm.generate(prompts(), params(temperature), block_length=block_length)
            assert [c.token_ids for c in completions] == expected
        alone = llm.generate(prompts()[:2], params(temperature)[:2], speculate=False)
        assert [c.token_ids for c in alone] == expected[:2]
        form = StructuredOutputs(choice=["a", "b"])
        chosen = SamplingParams(max_tokens=4, structured_outputs=form)
        assert llm.generate("b", chosen).token_ids == llm.generate("b", chosen, speculate=False).token_ids
        assert pair.logits([[1, 2], [3, 4]], [0, 0]).shape[1] == 2
    assert widths == {4, BLOCK}


def test_a_rebuild_chooses_by_the_same_times(tmp_path: Path, here: Any) -> None:
    target = make_target(tmp_path / "target")
    drafter = make_drafter(tmp_path / "drafter", target, block_size=BLOCK)

    def built(name: str, cache: Path | None = None) -> Bundle:
        options = TensorRTOptions(timing_cache=cache)
        asked: dict[str, Any] = {"engine": "tensorrt", "max_seq_len": 64, "precision": FLOAT32}
        return build(str(target), str(drafter), tmp_path / name, options=options, **asked)

    first, again, other = built("first"), built("again", tmp_path / "first"), built("other")
    for role in ("target", "drafter"):
        name = f"plans/sm90/{role}.timing"
        times = [bundle.listed(name).read_bytes() for bundle in (first, again, other)]
        assert times[0] == times[1] != times[2]
        used = again.manifest["tensorrt"]["timing_cache"][f"sm90/{role}"]
        assert used == first.manifest["files"][name]["sha256"]
    (tmp_path / "other" / "plans" / "sm90" / "drafter.timing").write_bytes(b"of another GPU")
    with pytest.raises(BuildError, match="another GPU"):
        built("wrong", tmp_path / "other")
    with pytest.raises(BuildError, match="timing"):
        built("missing", tmp_path)


def test_outputs_that_nothing_reads_have_memory(tmp_path: Path, here: Any) -> None:
    """In FP16, as in BF16, a plan has the queries of each attention as outputs."""
    target = make_target(tmp_path / "target", favourites=6)
    drafter = make_drafter(tmp_path / "drafter", target, block_size=BLOCK)
    options = TensorRTOptions(plugins="none")
    settings: dict[str, Any] = {"engine": "tensorrt", "max_seq_len": 64, "options": options}
    half = Precision(target="fp16", drafter="fp16")
    bundle = build(str(target), str(drafter), tmp_path / "bundle", precision=half, **settings)
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    with LLM(bundle.path) as llm:
        engine = llm._runtime.pair.target
        assert [name for name in engine._unread if name in engine._shared] == engine._unread != []
        assert not {*engine._unread} & {*engine.outputs}
        expected = [c.token_ids for c in llm.generate(prompts()[:2], params, speculate=False)]
        assert [c.token_ids for c in llm.generate(prompts()[:2], params)] == expected


def test_rows_are_kept_where_a_whole_slot_would_not_fit(bundles: tuple[Bundle, Bundle]) -> None:
    prompt, params = prompts()[1], SamplingParams(max_tokens=20, ignore_eos=True)
    with LLM(bundles[1].path, max_batch_size=1, prefix_cache_bytes=0) as llm:
        cold = llm.generate(prompt, params, block_length=BLOCK)
        slot = llm._runtime.pair.kept_bytes(llm.bundle.capacity, draft=True)
    with LLM(bundles[1].path, max_batch_size=1, prefix_cache_bytes=int(0.9 * slot)) as llm:
        for other in (prompt, prompts()[2]):
            llm.generate(other, params, block_length=BLOCK)
        warm = llm.generate(prompt, params, block_length=BLOCK)
        kept = llm.metrics.snapshot()["prefix_cache"]
    assert warm.statistics.num_cached_tokens == kept["reused_tokens"] == len(prompt) - 1
    assert warm.token_ids == cold.token_ids
    assert warm.statistics.acceptance_histogram == cold.statistics.acceptance_histogram


def test_a_full_gpu_keeps_no_rows(bundles: tuple[Bundle, Bundle], monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(bundles[1].path) as llm:
        llm.generate(prompts()[1], SamplingParams(max_tokens=4))
        engine = llm._runtime.pair.target

        def full(*_: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(Cuda, "stream", full)
        with pytest.raises(MemoryError, match="CUDA out of memory"):
            engine.caches.keep(0, 0, 4, 1)
        monkeypatch.undo()


def test_sampling_on_the_device_gives_the_same(bundles: tuple[Bundle, Bundle]) -> None:
    """Its kernels run in Triton's interpreter. Sampled, greedy and penalized requests share a batch."""
    kinds: list[dict[str, Any]] = [{"temperature": 0.8}, {}, {"temperature": 1.0, "presence_penalty": 0.5}]
    wanted = [SamplingParams(max_tokens=7, seed=2**63 + i, ignore_eos=True, **k) for i, k in enumerate(kinds)]
    with LLM(bundles[1].path) as llm:
        arrays: Any = llm._runtime.pair.arrays
        expected = [c.token_ids for c in llm.generate(prompts()[:3], wanted, block_length=4)]
        arrays.run, arrays.samples = by_triton, True
        found = llm.generate(prompts()[:3], wanted, block_length=4)
        assert [c.token_ids for c in found] == expected
        assert arrays._sampling[1] is not None
        llm._runtime.scheduler.follow(PassRule((BLOCK,)))  # the copies of a row are no drafts
        assert llm.generate(prompts()[0], wanted[0], block_length=2).token_ids == expected[0]


@pytest.mark.parametrize("sampled_on_the_device", [False, True])
def test_numbers_that_are_not_finite_end_their_request_alone(
    sampled_on_the_device: bool, tmp_path: Path, here: Any
) -> None:
    """Greedy, sampled and penalized ones alike. Their slots are clear for the next requests."""
    target = make_target(tmp_path / "target", favourites=6)
    spoil(target)
    drafter = make_drafter(tmp_path / "drafter", target, block_size=BLOCK)
    options = TensorRTOptions(max_batch_size=3, prefill_chunk=16)
    settings: dict[str, Any] = {
        "engine": "tensorrt", "max_seq_len": 64, "precision": FLOAT32, "options": options,
    }  # fmt: skip
    bundle = build(str(target), str(drafter), tmp_path / "bundle", **settings)
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.8}, {"repetition_penalty": 1.2}]
    wanted = [SamplingParams(max_tokens=5, seed=9, ignore_eos=True, **kind) for kind in kinds]
    good, bad = [spoilt_prompt(9 + i, i) for i in range(3)], [spoilt_prompt(20 + i, i) for i in range(3)]
    good = [[token for token in each if token != SPOILT] for each in good]
    with LLM(bundle.path) as llm:
        pair: Any = llm._runtime.pair
        pair.arrays.run, pair.arrays.samples = by_triton, sampled_on_the_device
        expected = [llm.generate(*each, block_length=1).token_ids for each in zip(good, wanted, strict=True)]
        with pytest.raises(BatchError, match="3 of 6") as caught:
            llm.generate([*bad, *good], wanted * 2, block_length=4)
        assert all(isinstance(outcome, NonFiniteError) for outcome in caught.value.outcomes[:3])
        assert [c.token_ids for c in caught.value.outcomes[3:] if isinstance(c, Completion)] == expected
        caches = [*pair.target.caches.arrays.values(), *pair.drafter.caches.arrays.values()]
        pair.arrays.wait()
        assert all(torch.isfinite(rows).all() for rows in [*caches, pair.arrays._unread])


def test_a_draft_that_spoils_a_round_ends_no_request(tmp_path: Path, here: Any) -> None:
    """The same for a drafter whose numbers are not finite."""
    target = make_target(tmp_path / "target", favourites=6)
    spoil(target)
    drafter = make_drafter(tmp_path / "drafter", target, block_size=BLOCK)
    settings: dict[str, Any] = {"engine": "tensorrt", "max_seq_len": 64, "precision": FLOAT32}
    bundle = build(str(target), str(drafter), tmp_path / "bundle", **settings)
    params = [SamplingParams(max_tokens=20, seed=9, ignore_eos=True, temperature=t) for t in (0.0, 0.8)]
    asked = [[token for token in spoilt_prompt(9 + i, i) if token != SPOILT] for i in range(2)]
    with LLM(bundle.path) as llm:
        pair: Any = llm._runtime.pair
        pair.arrays.samples = False
        expected = [c.token_ids for c in llm.generate(asked, params, speculate=False)]
        drafter = pair.drafter.engine
        run = drafter.run

        def spoilt_draft(profile: int, feeds: Any, **slot: int) -> Any:
            out = run(profile, feeds, **slot)
            if profile == DECODE:
                with torch.cuda.stream(drafter.stream):
                    out["draft_tokens"][:, -1] = SPOILT
            return out

        def no_numbers(profile: int, feeds: Any, **slot: int) -> Any:
            out = run(profile, feeds, **slot)
            if profile == DECODE:
                with torch.cuda.stream(drafter.stream):
                    out["draft_logprobs"][:] = torch.nan
            return out

        for broken in (spoilt_draft, no_numbers):
            drafter.run = broken
            found = llm.generate(asked, params, block_length=4, draft_source="drafter")
            assert [c.token_ids for c in found] == expected
            pair.arrays.wait()
            assert all(torch.isfinite(c).all() for c in pair.target.caches.arrays.values())
        assert [c.statistics.num_drafts for c in found] == [1, 1]


@pytest.mark.parametrize(
    ("block_length", "kernels"), [(BLOCK, True), (None, False)], ids=["fixed", "adaptive"]
)
def test_a_round_waits_once_and_copies_once_each_way(
    bundles: tuple[Bundle, Bundle], block_length: int | None, kernels: bool
) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    others = len(Cuda.graphs)
    with LLM(bundles[1].path, prefix_cache_bytes=0) as llm:
        pair: Any = llm._runtime.pair
        expected = llm.generate(prompts()[0], params, block_length=block_length).token_ids
        pair.arrays._round.run = by_triton if kernels else None
        assert llm.generate(prompts()[0], params, block_length=block_length).token_ids == expected

        def counted(most: int) -> tuple[Counter[str], int]:
            Cuda.counts.clear()
            params = SamplingParams(max_tokens=most, ignore_eos=True)
            found = llm.generate(prompts()[0], params, block_length=block_length)
            # A pass takes a millisecond, by the double's event.
            return Counter(Cuda.counts), round(found.statistics.verify_time / 1e-3)

        prefill, _ = counted(1)
        all_rounds, rounds = counted(30)
        per_round = all_rounds - prefill
        assert per_round["waits"] == rounds
        assert per_round["copies to the host"] == rounds
        if kernels:  # else, after many rounds without drafts, the drafter has passes of its own
            assert per_round["copies of pageable memory"] == 0
            # One behind each pass: the target's tokens; its finite rows and the features for the drafter.
            assert per_round["copies to the device"] == rounds
            assert per_round["kernels"] == 2 * rounds
        # Without drafts, a round is one pass.
        assert rounds <= per_round["graph launches"] + per_round["passes"]
        assert per_round["graph launches"] > rounds / 2
        assert all(len(graph.runs) == 1 for graph in Cuda.graphs[others:])


def test_a_failed_capture_is_said_once_and_graphs_are_left_alone(
    bundles: tuple[Bundle, Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    with LLM(bundles[1].path) as llm:
        expected = llm.generate(prompts()[0], params).token_ids

    def refused(self: Any, **_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    with LLM(bundles[1].path) as llm:
        monkeypatch.setattr(Cuda.CUDAGraph, "capture_begin", refused)
        with pytest.warns(UserWarning, match=r"\.plan: runs without CUDA graphs, .*not permitted") as told:
            assert llm.generate(prompts()[0], params).token_ids == expected
        assert len(told) == 2  # once for each plan
        Cuda.counts.clear()
        assert llm.generate(prompts()[0], params).token_ids == expected
        assert Cuda.counts["graph launches"] == 0


def test_nothing_is_allocated_in_a_round(
    bundles: tuple[Bundle, Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No buffer of the engines moves, and none is allocated."""
    asked = prompts()[:2], SamplingParams(max_tokens=9, ignore_eos=True)
    with LLM(bundles[1].path) as llm:
        pair: Any = llm._runtime.pair
        pair.arrays._round.run = by_triton
        llm.generate(*asked, block_length=BLOCK)
        engines = (pair.target, pair.drafter.engine)
        before = [{k: b.data_ptr() for k, b in e._buffers.items()} for e in engines]
        for name in ("zeros", "empty"):
            monkeypatch.setattr(torch, name, None)
        llm.generate(*asked, block_length=BLOCK)
        assert [{k: b.data_ptr() for k, b in e._buffers.items()} for e in engines] == before


def test_a_shape_outside_of_the_profile_is_refused(bundles: tuple[Bundle, Bundle]) -> None:
    with LLM(bundles[1].path) as llm:
        target, block = llm._runtime.pair.target, np.zeros((1, BLOCK + 1), np.int64)
        feeds = {"tokens": block, "start": np.zeros(1, np.int64), "rows": block}
        feeds |= {name: np.zeros(1, np.int64) for name in target.rows.bases([])}
        with pytest.raises(ValueError, match=rf"(tokens|rows) \[1, {BLOCK + 1}\] is outside of profile 1"):
            target.run(DECODE, feeds)
        with pytest.raises(ValueError, match=r"needs \[.*'rows', 'start', 'tokens'\], not .*'parents'"):
            target.run(DECODE, feeds | {"parents": block})


@pytest.mark.parametrize(
    ("place", "name", "value", "says"),
    [
        (fake_tensorrt, "__version__", "11.5.0", r"built with TensorRT 11\.4\.0, but 11\.5\.0 is installed"),
        (Cuda, "capability", (12, 0), "capability 90, but this GPU has 120; .*--compute-capability 120"),
        (Cuda, "is_available", lambda: False, "needs an NVIDIA GPU"),
        (sys.modules, "tensorrt", None, "was built for --engine tensorrt, .*tensorrt-cu13"),
    ],
    ids=["another version", "another GPU", "no GPU", "TensorRT-RTX alone"],
)
def test_a_machine_that_cannot_run_the_plans_is_refused(
    bundles: tuple[Bundle, Bundle],
    monkeypatch: pytest.MonkeyPatch,
    place: Any,
    name: str,
    value: Any,
    says: str,
) -> None:
    if place is sys.modules:
        monkeypatch.setitem(place, name, value)
    else:
        monkeypatch.setattr(place, name, value)
    with pytest.raises(BundleError, match=says):
        LLM(bundles[1].path)


def test_a_plan_that_does_not_load_is_named(bundles: tuple[Bundle, Bundle], tmp_path: Path) -> None:
    path = tmp_path / "altered"
    shutil.copytree(bundles[1].path, path, copy_function=os.link)
    plan = path / "plans/sm90/target.plan"
    data = bytearray(plan.read_bytes())
    data[:4] = b"RTX!"
    plan.unlink()
    plan.write_bytes(data)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["plans/sm90/target.plan"]["sha256"] = hashlib.sha256(data).hexdigest()
    write_manifest(path, manifest)
    with pytest.raises(
        BundleError, match=r"target\.plan: .* cannot load this plan.*: Magic tag does not match"
    ):
        LLM(path)


def test_forced_tokens_of_rounds_without_a_draft_find_room(
    bundles: tuple[Bundle, Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their features wait for a drafter that is not asked. A slot has room for a block of them."""
    pytest.importorskip("llguidance")
    form = StructuredOutputs(grammar='start: ("abcdefghijklmnop" /[0-9]/)+')
    params = SamplingParams(max_tokens=40, structured_outputs=form)
    monkeypatch.setattr(AdaptiveLength, "draft", lambda *_: 1)
    with LLM(bundles[1].path, max_batch_size=2) as llm:
        plain = llm.generate(prompts()[:2], params, speculate=False)
        drafted = llm.generate(prompts()[:2], params)
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
    assert max(c.statistics.mean_acceptance_length for c in drafted) > 1


def test_structured_outputs_and_prompt_logprobs_are_those_of_onnxruntime(
    bundles: tuple[Bundle, Bundle],
) -> None:
    """The host cuts and extends the drafts of a batch that is on the device."""
    pytest.importorskip("llguidance")
    form = StructuredOutputs(grammar='start: "abcdefgh" /[a-z]{1,9}/ ("," /[0-9]{2}/)*')
    wanted = [
        SamplingParams(max_tokens=24, structured_outputs=form),
        SamplingParams(max_tokens=12, ignore_eos=True),
        SamplingParams(max_tokens=9, temperature=0.9, seed=3, structured_outputs=form),
        SamplingParams(max_tokens=2, prompt_logprobs=True, top_logprobs=2),
    ]
    found = []
    for bundle in bundles:
        with LLM(bundle.path, max_batch_size=3) as llm:
            found.append([llm.generate(prompts()[:4], wanted, block_length=n) for n in (BLOCK, 2, 1, None)])
    for ours, theirs in zip(*found, strict=True):
        assert [c.token_ids for c in theirs] == [c.token_ids for c in ours]
        assert theirs[0].text.startswith("abcdefgh")
        logprobs = [c[3].prompt_logprobs or [] for c in (ours, theirs)]
        assert logprobs[1][1:] == pytest.approx(logprobs[0][1:], abs=1e-3)
        tops = [
            [[token for token, _ in top] for top in c[3].prompt_top_logprobs or []] for c in (ours, theirs)
        ]
        assert tops[0] == tops[1]


def test_slots_begin_at_aligned_addresses(bundles: tuple[Bundle, Bundle]) -> None:
    """Whatever --max-seq-len is. A plan of former versions, whose capacity is not a multiple, is refused."""
    assert bundles[1].capacity % 16  # the sum of prompt and output, and of what passes write beyond it
    with LLM(bundles[1].path) as llm:
        for engine in (llm._runtime.pair.target, llm._runtime.pair.drafter.engine):
            for rows in engine.caches.arrays.values():
                assert rows.is_contiguous()
                assert rows.shape[2] == -(-bundles[1].capacity // 16) * 16
                assert {rows[slot].data_ptr() % 256 for slot in range(rows.shape[0])} == {0}


@pytest.mark.parametrize("call", ["set_tensor_address", "set_optimization_profile_async", "execute_async_v3"])
def test_a_call_that_tensorrt_refuses_raises_with_its_words(
    bundles: tuple[Bundle, Bundle], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Otherwise the pass would compute with the addresses of another slot."""

    def refusing(self: Any, *args: Any) -> bool:
        self._engine._logger.log(fake_tensorrt.ILogger.ERROR, "the GPU said no")
        return False

    monkeypatch.setattr(fake_tensorrt.Context, call, refusing)
    with (
        pytest.raises(
            (RuntimeError, EngineError), match=r"\.plan: TensorRT .*Its last messages: the GPU said no"
        ),
        LLM(bundles[1].path) as llm,
    ):
        llm.generate(prompts()[0], SamplingParams(max_tokens=1))

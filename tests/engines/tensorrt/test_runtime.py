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
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_trt import LLM, SamplingParams
from dflash_trt.building.build import build
from dflash_trt.bundle.manifest import Bundle, write_manifest
from dflash_trt.engines.device.sizes import DECODE
from dflash_trt.engines.tensorrt.options import TensorRTOptions
from dflash_trt.errors import BuildError, BundleError, EngineError
from dflash_trt.formats.precision import Precision
from tests.doubles import fake_tensorrt
from tests.doubles.checkpoints import make_drafter, make_target
from tests.doubles.cuda_double import Cuda
from tests.doubles.hybrid_checkpoints import make_hybrid
from tests.doubles.one_gpu import one_gpu
from tests.doubles.two_engines import FLOAT32, for_both, params, prompts

BLOCK = 6


@pytest.fixture(scope="module")
def here() -> Any:
    """A machine with one GPU of compute capability 9.0 and TensorRT, as the project sees it."""
    with one_gpu(on_host=False) as patch:
        yield patch


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory, here: Any) -> tuple[Bundle, Bundle]:
    """One pair, built for ONNX Runtime and for TensorRT."""
    directory = tmp_path_factory.mktemp("runtime")
    target = make_target(directory / "target", favourites=6)
    drafter = make_drafter(directory / "drafter", target, block_size=BLOCK)
    options = TensorRTOptions(max_batch_size=3, prefill_chunk=16)
    return for_both(directory, target, drafter, "tensorrt", options, max_seq_len=100)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_tokens_are_those_of_onnxruntime(bundles: tuple[Bundle, Bundle], temperature: float) -> None:
    """Five requests in three slots, with and without drafting, blocks of several lengths, prompts with common rows."""
    with LLM(bundles[0].path, threads=1) as reference:
        expected = [c.token_ids for c in reference.generate(prompts(), params(temperature))]
    with LLM(bundles[1].path, prefix_cache_bytes=1 << 20) as llm:
        for block_length in (BLOCK, 1, 3):
            completions = llm.generate(prompts(), params(temperature), block_length=block_length)
            assert [c.token_ids for c in completions] == expected
        accepted = sum(c.statistics.num_accepted_tokens for c in completions)
        assert accepted > 0
        mixed = llm.generate(prompts()[:2], params(temperature)[:2], speculate=False)
        assert [c.token_ids for c in mixed] == expected[:2]


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
        engine = llm.runtime.pair.target
        assert [name for name in engine._unread if name in engine._shared] == engine._unread != []
        assert not {*engine._unread} & {*engine.outputs}
        expected = [c.token_ids for c in llm.generate(prompts()[:2], params, speculate=False)]
        assert [c.token_ids for c in llm.generate(prompts()[:2], params)] == expected


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


def test_a_shape_outside_of_the_profile_is_refused(bundles: tuple[Bundle, Bundle]) -> None:
    with LLM(bundles[1].path) as llm:
        target, block = llm.runtime.pair.target, np.zeros((1, BLOCK + 1), np.int64)
        feeds = {"tokens": block, "start": np.zeros(1, np.int64), "rows": block}
        feeds |= {name: np.zeros(1, np.int64) for name in target.caches.bases([])}
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
    with pytest.raises(BundleError, match=r"target\.plan: .*: Magic tag does not match"):
        LLM(path)


def test_slots_begin_at_aligned_addresses(bundles: tuple[Bundle, Bundle]) -> None:
    """Whatever --max-seq-len is. A plan of former versions, whose capacity is not a multiple, is refused."""
    assert bundles[1].capacity % 16  # the sum of prompt and output, and of what passes write beyond it
    with LLM(bundles[1].path) as llm:
        for engine in (llm.runtime.pair.target, llm.runtime.pair.drafter.runner):
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
        pytest.raises((RuntimeError, EngineError), match=r"\.plan: .*the GPU said no"),
        LLM(bundles[1].path) as llm,
    ):
        llm.generate(prompts()[0], SamplingParams(max_tokens=1))


def test_states_that_do_not_fill_whole_units_are_refused_at_any_batch(tmp_path: Path, here: Any) -> None:
    """One slot's states follow those of the layer before."""
    layers = ["linear_attention", "full_attention", "linear_attention"]
    heads = {"linear_num_key_heads": 1, "linear_num_value_heads": 1}
    target = make_hybrid(tmp_path / "target", favourites=6, num_hidden_layers=3, layer_types=layers, **heads)
    drafter = make_drafter(tmp_path / "drafter", target, block_size=3, layers=1, taps=(0, 1))
    settings: dict[str, Any] = {"engine": "tensorrt", "max_seq_len": 64, "precision": FLOAT32}
    bundle = build(str(target), str(drafter), tmp_path / "bundle", **settings)
    for batch in (1, 2):
        with pytest.raises(BundleError, match=r"conv_state\.0 .* 576 bytes .* 256 bytes"):
            LLM(bundle.path, max_batch_size=batch)

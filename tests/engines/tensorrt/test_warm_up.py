"""Loading a bundle: warm-up, CUDA graphs and the kept kernels, over stand-ins for TensorRT and TensorRT-RTX."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_trt import LLM, SamplingParams, logs
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.engines.device.sizes import PREFILL
from dflash_trt.engines.tensorrt.options import TensorRTOptions
from dflash_trt.engines.tensorrt.runner import TensorRTRunner
from tests.doubles import fake_tensorrt_rtx
from tests.doubles.checkpoints import make_drafter, make_target
from tests.doubles.cuda_double import Cuda
from tests.doubles.one_gpu import one_gpu
from tests.doubles.two_engines import for_both

BLOCK, CHUNK, SLOTS = 6, 40, 4


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Bundle]]:
    """One pair for ONNX Runtime, TensorRT and TensorRT-RTX."""
    directory = tmp_path_factory.mktemp("warm_up")
    target = make_target(directory / "target", layers=2, favourites=6)
    drafter = make_drafter(directory / "drafter", target, layers=1, taps=(0, 1), block_size=BLOCK)
    options, made = TensorRTOptions(max_batch_size=SLOTS, prefill_chunk=CHUNK), dict[str, Bundle]()
    with one_gpu(120, warm_up=True):
        for engine in ("tensorrt", "tensorrt-rtx"):
            both = for_both(directory, target, drafter, engine, options, max_seq_len=100)
            made["onnxruntime"], made[engine] = both
        yield made


@pytest.fixture(autouse=True)
def nothing_kept(bundles: dict[str, Bundle]) -> None:
    """Each test starts without kernels."""
    folder = kept(bundles)
    if folder.is_dir():
        folder.chmod(0o755)
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()


def kept(bundles: dict[str, Bundle]) -> Path:
    path = bundles["tensorrt-rtx"].path
    return path.with_name(f"{path.name}.kernels")


def tokens(llm: LLM, **options: Any) -> list[list[int]]:
    """Answers of several lengths, so that batches of every size run."""
    rng, params = (
        np.random.default_rng(1),
        [SamplingParams(max_tokens=n, ignore_eos=True) for n in (9, 24, 14, 19, 12)],
    )
    prompts = [rng.integers(0, 300, n).tolist() for n in (3, 40, 17, 1, 75)]
    return [completion.token_ids for completion in llm.generate(prompts, params, **options)]


@pytest.mark.parametrize("engine", ["tensorrt", "tensorrt-rtx"])
def test_no_request_meets_a_shape_that_was_not_prepared(bundles: dict[str, Bundle], engine: str) -> None:
    """Neither a compilation nor a capture falls on a request, whatever its length, the batch, and the block length,
    which changes from one round to the next.
    """
    with LLM(bundles["onnxruntime"].path) as llm:
        expected = tokens(llm)
    with LLM(bundles[engine].path, prefix_cache_bytes=0) as llm:
        engines: list[TensorRTRunner] = [llm.runtime.pair.target, llm.runtime.pair.drafter.runner]
        pair: Any = llm.runtime.pair
        caches = [rows for each in engines for rows in each.caches.arrays.values()]
        pair.arrays.wait()
        assert all(not rows.any() for rows in caches)
        Cuda.counts.clear()
        sizes = [dict(each._captured) for each in engines]
        contexts = [len(each._of_shapes) for each in engines]
        for length in (None, 3, 5, BLOCK):
            assert tokens(llm, block_length=length) == expected
        assert Cuda.counts["compilations"] == Cuda.counts["captures"] == 0
        assert [each._captured for each in engines] == sizes
        assert Cuda.counts["graph launches"] > 0
        if engine == "tensorrt-rtx":
            assert Cuda.counts["graph launches"] == Cuda.counts["decoding passes"]
        # Four widths of the target, and three of the drafter, by three batches.
        assert [len(each) for each in sizes] == [12, 9]
        assert [len(each._of_shapes) for each in engines] == contexts
        assert contexts == [12, 9]
        lengths = {
            shapes[engines[0].inputs.index("tokens")][1]
            for profile, *shapes in engines[0]._views
            if profile == PREFILL
        }
        assert lengths <= {16, 32, CHUNK}


def test_kernels_are_compiled_once_for_a_gpu_and_driver(bundles: dict[str, Bundle]) -> None:
    path = bundles["tensorrt-rtx"].path
    counts = []
    for _ in range(2):
        Cuda.counts.clear()
        LLM(path).close()
        counts.append(Cuda.counts["compilations"])
    assert counts[0] > 0 == counts[1]
    (file,) = kept(bundles).iterdir()
    assert file.name == "A_GPU_double_-1.7.1.116.cache"
    Bundle.open(path)  # the cache is no file of the bundle


def test_a_damaged_cache_costs_a_warning(
    bundles: dict[str, Bundle], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = bundles["tensorrt-rtx"].path
    LLM(path, max_batch_size=1).close()
    (file,) = kept(bundles).iterdir()
    whole = file.read_bytes()
    for content in (b"", b"RTXCACHE[", b"\0" * 100):
        logs.warn_once.cache_clear()
        caplog.clear()
        file.write_bytes(content)
        LLM(path, max_batch_size=1).close()
        assert len([r for r in caplog.records if "does not take these kernels" in r.message]) == 1
        assert file.read_bytes() == whole


def test_a_place_that_cannot_be_written_costs_a_warning(
    bundles: dict[str, Bundle], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refused)
    LLM(bundles["tensorrt-rtx"].path, max_batch_size=1).close()
    told = [r.message for r in caplog.records if "cannot be written" in r.message]
    assert len(told) == 1, caplog.text
    assert "Read-only file system" in told[0]
    assert not kept(bundles).exists()


def test_a_plan_that_cannot_be_captured_runs_plainly_and_says_so_once(
    bundles: dict[str, Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_tensorrt_rtx.IExecutionContext, "capturable", False)
    with pytest.warns(UserWarning, match="without CUDA graphs, because TensorRT says") as told:
        llm = LLM(bundles["tensorrt-rtx"].path)
    assert len(told) == 2  # once for each plan
    with llm:
        Cuda.counts.clear()
        assert len(tokens(llm)) == 5
    assert Cuda.counts["graph launches"] == 0


def test_the_double_has_the_names_of_tensorrt_rtx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every public name of the double's classes is one of the installed package."""
    monkeypatch.delitem(sys.modules, "tensorrt_rtx", raising=False)
    pytest.importorskip("tensorrt_rtx", exc_type=ImportError)
    real = importlib.import_module("tensorrt_rtx")
    assert fake_tensorrt_rtx.__version__.split(".")[:2] == real.__version__.split(".")[:2]
    for name in (
        "BuilderFlag",
        "CudaGraphStrategy",
        "DynamicShapesKernelSpecializationStrategy",
        "IRuntimeCache",
        "IRuntimeConfig",
    ):
        double: Any = getattr(fake_tensorrt_rtx, name)
        members = {*vars(double), *(vars(double()) if name.startswith("I") else ())}
        own = {"kernels"}
        missing = {m for m in members if not m.startswith("_") and not hasattr(getattr(real, name), m)} - own
        assert not missing, name
    assert hasattr(real.ICudaEngine, "create_runtime_config")
    assert hasattr(real.IExecutionContext, "is_stream_capturable")

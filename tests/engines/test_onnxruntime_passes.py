"""The embedded engine: passes that read a prompt, and where a pool of caches puts its slots."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from dflash_trt import LLM, SamplingParams
from dflash_trt.building.build import build
from dflash_trt.engines import onnxruntime
from dflash_trt.engines.onnxruntime.caches import STEP, CachePool
from dflash_trt.engines.onnxruntime.runner import OnnxRuntimeRunner
from dflash_trt.errors import BundleError
from dflash_trt.graph.builder import FLOAT, GraphBuilder
from dflash_trt.graph.dialect import Dialect
from dflash_trt.graph.onnxruntime import OnnxRuntime

PASS, PROMPT, PREFIX = 16, 70, 37


def test_passes_of_a_prompt_end_at_multiples_and_keep_its_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = build("tiny", None, tmp_path / "bundle", max_seq_len=256).path
    prompt = np.random.default_rng(0).integers(10, 500, PROMPT).tolist()
    with LLM(bundle, threads=1) as llm:
        whole = llm.logits(prompt)
    monkeypatch.setattr(onnxruntime, "PROMPT_PASS", PASS)
    passes: list[tuple[int, int]] = []
    run = OnnxRuntimeRunner.run

    def noted(self: OnnxRuntimeRunner, feeds: Any, **options: Any) -> Any:
        if "tokens" in feeds:
            passes.append((int(feeds["start"][0]), feeds["tokens"].shape[1]))
        return run(self, feeds, **options)

    monkeypatch.setattr(OnnxRuntimeRunner, "run", noted)
    with LLM(bundle, threads=1) as llm:
        np.testing.assert_array_equal(llm.logits(prompt), whole)
        one = SamplingParams(max_tokens=1)
        llm.generate(prompt[:PREFIX], one)
        passes.clear()
        again = llm.generate(prompt, one)
    assert again.statistics.num_cached_tokens == PREFIX
    assert [start for start, _ in passes] == [PREFIX, 48, 64]
    assert sum(count for _, count in passes) == PROMPT - PREFIX


def test_the_residual_sum_and_the_norm_of_it_are_one_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for each half of a layer, but for the very first norm. The numbers are those of the two nodes."""
    logits, nodes = [], []
    for name in ("joined", "apart"):
        bundle = build("tiny", None, tmp_path / name, max_seq_len=256)
        graph = ir.load(bundle.path / "target.onnx").graph
        nodes.append([node.op_type for node in graph].count("SkipSimplifiedLayerNormalization"))
        with LLM(bundle.path, threads=1) as llm:
            logits.append(llm.logits(list(range(10, 60))))
        monkeypatch.setattr(OnnxRuntime, "add_norm", Dialect.add_norm)
    assert nodes == [2 * bundle.manifest["target"]["num_hidden_layers"] - 1, 0]
    np.testing.assert_allclose(*logits, rtol=0, atol=1e-3)


SLOTS, CAPACITY, WIDTHS = 4, 500, {"k_cache.0": (3, np.float32), "v_cache.0": (2, np.float32)}


def test_a_slot_alone_does_not_move() -> None:
    """However long it grows, and while the others are packed. A slot has whole steps of rows."""
    pool = CachePool(WIDTHS, SLOTS, CAPACITY)
    assert [pool.place(3, [n]) for n in (1, 129, 499)] == [(1536, STEP), (1536, 2 * STEP), (1536, 512)]
    assert pool.place(0, [100, 30]) == (0, 128)
    assert pool.place(0, [90, 100]) == (0, 128)
    assert pool.place(1, [64]) == (128, 128)
    assert pool.place(3, [499]) == (1536, 512)
    assert pool.place(1, [129]) == (512, 256)  # more than its share: it goes back
    with pytest.raises(ValueError, match=r"slots 3\.\.4 of 4"):
        pool.place(3, [1, 1])


def test_a_graph_with_caches_by_head_is_refused(tmp_path: Path) -> None:
    g = GraphBuilder("target")
    cache = g.input("k_cache.0", FLOAT, ["B", 2, "C", 16])
    g.output(g.op("Identity", cache), "k_cache_out.0", FLOAT, ["B", 2, "C", 16])
    ir.save(g.model(), tmp_path / "target.onnx")
    with pytest.raises(BundleError, match=r"k_cache\.0 has 4 axes, expected 3: .* build it again"):
        OnnxRuntimeRunner(tmp_path / "target.onnx", slots=1, capacity=64)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux says what is resident")
def test_loading_keeps_no_memory_that_it_freed(tmp_path: Path) -> None:
    """The experts of this pair take 24 MB in float32; on the way there the session makes 100 MB."""
    bundle = build("tiny-gpt-oss", None, tmp_path / "bundle", max_seq_len=256).path
    program = (
        "import re; from pathlib import Path; from dflash_trt.engines.onnxruntime.runner import OnnxRuntimeRunner\n"
        "def anon(): return int(re.search(r'RssAnon:\\s+(\\d+)', Path('/proc/self/status').read_text())[1])\n"
        f"before = anon(); engine = OnnxRuntimeRunner(Path({str(bundle / 'target.onnx')!r}), slots=1, capacity=256)\n"
        "print(anon() - before)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 60_000  # kB


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's account of memory")
def test_only_rows_that_are_written_take_memory(tmp_path: Path) -> None:
    """Also with huge pages: a few rows of each slot, megabytes apart."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    bundle = build("tiny", None, tmp_path / "bundle", max_seq_len=256).path
    engine = OnnxRuntimeRunner(bundle / "target.onnx", slots=64, capacity=1 << 15, threads=1)
    caches = [cache.reshape(64, 1 << 15, -1) for cache in engine.caches.arrays.values()]
    assert not any(cache[-1, -1].any() for cache in caches)
    before = resident()
    for cache in caches:
        cache[:, :20] = 1.0
    written = sum(cache[:, :20].nbytes for cache in caches)
    assert resident() - before < 4 * written + (8 << 20) < 0.1 * sum(cache.nbytes for cache in caches)
    engine.close()

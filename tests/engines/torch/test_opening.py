"""Opening a pair on a GPU's double: weights are read, passes prepared, and too little memory is said."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from dflash_trt import LLM, SamplingParams, logs
from dflash_trt.building.build import build
from dflash_trt.building.exactness import threads_of
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.engines.device.sizes import DECODE
from dflash_trt.engines.registry import find
from dflash_trt.engines.torch import opening, weights
from dflash_trt.engines.torch.runner import TorchRunner
from dflash_trt.engines.torch.weights import WeightFiles
from dflash_trt.errors import BundleError, DFlashError
from dflash_trt.formats.precision import Precision
from tests.doubles import triton_interpreter  # noqa: F401  # corrects it
from tests.doubles.checkpoints import make_drafter, make_target
from tests.doubles.cuda_double import Cuda
from tests.doubles.one_gpu import one_gpu

BLOCK, SLOTS = 4, 3
SAID = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.64 GiB of which 1.03 GiB is "
    "free. Process 7 has 4.10 GiB memory in use. Including non-PyTorch memory, this process has 18.5 GiB memory in "
    "use. If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF."
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("opening")
    target = make_target(folder / "target", favourites=6)
    drafter = make_drafter(folder / "drafter", target, block_size=BLOCK, layers=1)
    precision = Precision(target="fp32", drafter="fp32")
    given: dict[str, Any] = {"engine": "torch", "precision": precision, "max_seq_len": 60}
    return build(str(target), str(drafter), folder / "bundle", **given)


@pytest.fixture
def gpu() -> Iterator[pytest.MonkeyPatch]:
    with one_gpu(warm_up=True) as patch:
        yield patch


def decoding(engine: Any, name: str) -> set[tuple[int, int]]:
    """The sequences and rows of the decoding passes that are captured."""
    at = engine.inputs.index(name)
    return {tuple(sizes[at]) for (profile, *sizes), _ in engine._captured if profile == DECODE}


@pytest.mark.parametrize("seconds", [1e6, 0.0])
def test_rounds_of_all_sizes_are_captured_within_a_time(
    seconds: float, made: Bundle, gpu: pytest.MonkeyPatch
) -> None:
    """The longest ones and those of one request in any case: so memory for all others is there, every kernel is
    compiled, and a request that comes alone waits for neither.
    """
    gpu.setattr(opening, "_WARM_UP_SECONDS", seconds)
    with LLM(made.path, max_batch_size=SLOTS, prefix_cache_bytes=0) as llm:
        pair = llm.runtime.pair
        target, drafter = pair.target, pair.drafter.runner
        alone = {(1, n) for n in (1, 2, BLOCK)}
        longest = {(n, BLOCK) for n in (1, 2, SLOTS)}
        sizes = set(product((1, 2, SLOTS), (1, 2, BLOCK))) if seconds else alone | longest
        assert decoding(target, "tokens") == sizes
        assert decoding(drafter, "block") == {size for size in sizes if size[1] > 1}
        pair.arrays.wait()
        assert not any(rows.any() for each in (target, drafter) for rows in each.caches.arrays.values())
        assert target._prompts() == drafter._prompts() == 1
        before = len(Cuda.graphs)
        params = SamplingParams(max_tokens=9, ignore_eos=True)
        llm.generate([1 + i % 7 for i in range(pair.prefill_chunk)][:50], params, block_length=3)
        assert len(Cuda.graphs) == before


def test_rounds_for_which_caches_have_no_memory_are_not_captured(
    made: Bundle, gpu: pytest.MonkeyPatch
) -> None:
    gpu.setattr(opening, "_WARM_UP_SECONDS", 0.0)
    with LLM(made.path, max_batch_size=64, cache_tokens=600) as llm:
        pair = llm.runtime.pair
        assert 1 < max(n for n, _ in decoding(pair.target, "tokens")) < 64
        params = SamplingParams(max_tokens=5, ignore_eos=True)
        assert [len(done.token_ids) for done in llm.generate([[3, 4, 5]] * 9, params)] == [5] * 9


@pytest.mark.parametrize(
    "said", [SAID, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"]
)
def test_a_gpu_without_memory_for_the_caches_is_an_error_with_advice(
    said: str, made: Bundle, gpu: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError(said)

    gpu.setattr(opening, "pair_of", full)
    with pytest.raises(DFlashError) as caught:
        LLM(made.path, max_batch_size=SLOTS)
    text = str(caught.value)
    assert f"no memory is left for {SLOTS} sequences of 60 tokens, whose caches take 0.00 GiB (CUDA" in text
    assert "; lower max_batch_size, or build with a smaller --max-seq-len" in text
    assert "ALLOC_FAILED" in text or "1.03 GiB is free. Process 7 has 4.10 GiB memory in use)" in text


def test_a_batch_that_was_not_asked_for_is_halved_until_it_fits(
    made: Bundle, gpu: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried, made_of = list[int](), opening.pair_of

    def small(*given: Any, slots: int, **named: Any) -> Any:
        tried.append(slots)
        if slots > most:
            raise torch.OutOfMemoryError(SAID)
        return made_of(*given, slots=slots, **named)

    gpu.setattr(opening, "_WARM_UP_SECONDS", 0.0)
    gpu.setattr(opening, "pair_of", small)
    most = 3
    with LLM(made.path) as llm:
        assert ([*dict.fromkeys(tried)], llm.runtime.max_batch_size) == ([8, 4, 2], 2)
        told = llm.generate([[1, 2, 3]] * 3, SamplingParams(max_tokens=3, ignore_eos=True))
        assert [len(each.token_ids) for each in told] == [3] * 3
    assert "max_batch_size is 4: no memory is left for 8 sequences" in caplog.text
    assert "max_batch_size is 2: no memory is left for 4 sequences" in caplog.text
    most = 0
    with pytest.raises(DFlashError, match=r"left for one sequence of .*\); build with a smaller"):
        LLM(made.path)


def test_caches_share_the_memory_that_is_free(
    made: Bundle, gpu: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At most what one slot more can use, fewer where passes find too little, and as many as were asked for."""
    prompts, params = [[i, 2, 3] for i in range(5)], SamplingParams(max_tokens=30, ignore_eos=True)
    kinds = [kind for role in made.roles for kind in made.cache_kinds(role)]
    vocab, pair_of = made.manifest["vocab_size"], opening.pair_of
    free = 100 * sum(kind.row_bytes for kind in kinds) + 8 * SLOTS * BLOCK * vocab + opening._ALLOWANCE
    free += opening.sampling_bytes(SLOTS, BLOCK, vocab, made.capacity)
    refused = list[Exception]()

    def refusing(*arguments: Any, **options: Any) -> Any:
        if refused:
            raise refused.pop()
        return pair_of(*arguments, **options)

    def answers(**options: Any) -> tuple[int, list[Any]]:
        with LLM(made.path, max_batch_size=SLOTS, **options) as llm:
            return llm.metrics.cache_tokens, [done.token_ids for done in llm.generate(prompts, params)]

    gpu.setattr(opening, "_WARM_UP_SECONDS", 0.0)
    gpu.setattr(opening, "pair_of", refusing)
    gpu.setattr(opening, "USUAL_CONTEXT", 8)
    most, expected = answers()
    assert most == (SLOTS + 1) * made.capacity
    with LLM(made.path, max_batch_size=1) as llm:  # a conversation goes on from its rows
        first = llm.generate([3, 4, 5] * 10, params)
        second = llm.generate([3, 4, 5] * 10 + first.token_ids[:20], SamplingParams(max_tokens=5))
        assert second.statistics.num_cached_tokens == 49
    gpu.setattr(Cuda, "mem_get_info", lambda: (free, 80 << 30))
    assert answers() == (100, expected)
    assert answers(cache_tokens=150) == (150, expected)
    refused.append(torch.OutOfMemoryError(SAID))
    assert answers() == (75, expected)
    assert "caches get memory for 75 tokens, not 100: CUDA out of memory." in caplog.text


def test_memory_that_the_largest_round_lacks_is_missed_at_opening(
    made: Bundle, gpu: pytest.MonkeyPatch
) -> None:
    run = TorchRunner._first

    def first(self: TorchRunner, shapes: Any, first_slot: int) -> Any:
        if shapes[0] == DECODE and (SLOTS, BLOCK) in shapes[1:]:
            raise torch.OutOfMemoryError(SAID)
        return run(self, shapes, first_slot)

    gpu.setattr(TorchRunner, "_first", first)
    with pytest.raises(DFlashError, match=r"3 sequences .* 1\.03 GiB is free") as caught:
        LLM(made.path, max_batch_size=SLOTS)
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is TorchRunner], caught


def test_another_error_of_torch_stays_what_it_is(made: Bundle, gpu: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    gpu.setattr(opening, "pair_of", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        LLM(made.path)


def test_what_was_built_for_a_cpu_says_so_on_a_gpu(
    made: Bundle, gpu: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.setattr(opening, "warm_up", lambda *_, **__: 0)
    LLM(made.path, max_batch_size=1).close()
    assert "is in float32, as a build is where no GPU is" in caplog.text
    caplog.clear()
    logs.warn_once.cache_clear()
    gpu.setitem(made.manifest["precision"], "target", "bfloat16")
    opening.open_pair(made, slots=1, prefill_chunk=16, threads=None, progress=lambda *_: None).close()
    assert "float32" not in caplog.text


def test_a_gpu_that_torch_has_no_code_for_is_left_to_others(
    made: Bundle, gpu: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.setattr(Cuda, "get_arch_list", staticmethod(lambda: ["sm_80"]))
    problem = "torch 2 has no code for compute capability 9.0"
    gpu.setattr(opening.hardware, "torch_problem", lambda: problem)
    with LLM(made.path, max_batch_size=1) as llm:
        assert llm.runtime.pair.target.device.type == "cpu"
    assert f"runs on the CPU, because {problem}" in caplog.text


def test_a_measurement_is_for_the_threads_that_torch_has_got() -> None:
    """Not those that were asked for: the environment, or another bundle of the process, may say otherwise."""
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert [threads_of(find("torch"), asked) for asked in (None, 7)] == [threads, threads]
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def plain_gpu() -> Iterator[pytest.MonkeyPatch]:
    with one_gpu() as patch:
        yield patch


@pytest.mark.parametrize("size", [0, 2, 24, 4096])
def test_weights_reach_a_gpu_through_pieces_of_pinned_memory(
    size: int, tmp_path: Path, plain_gpu: pytest.MonkeyPatch
) -> None:
    """A piece that is filled again before its last copy has ended would give other bytes: copies run late here."""
    plain_gpu.setattr(weights, "PIECE_BYTES", 16)
    plain_gpu.setattr(weights, "PIECES", 3)
    kinds, rng = (ir.DataType.BFLOAT16, ir.DataType.FLOAT, ir.DataType.INT4), np.random.default_rng(0)
    file = tmp_path / "weights"
    file.write_bytes(rng.bytes(4 * 4096 + 3))  # the last ones begin at an odd byte
    tensors = [
        ir.ExternalTensor("weights", at, None, kind, name=f"w{at}", shape=ir.Shape([size]), base_dir=tmp_path)
        for at in (0, 3)
        for kind in kinds
    ]
    host = WeightFiles(tmp_path / "graph", torch.device("cpu"))
    expected = host.read(tensors)
    stream = Cuda.Stream()
    with Cuda.stream(stream):
        there = WeightFiles(tmp_path / "graph", torch.device("cuda"))
        pageable = Cuda.counts["copies of pageable memory"]
        read = there.read(tensors)
        there.close()
        assert Cuda.counts["copies of pageable memory"] == pageable
        for mine, right in zip(read, expected, strict=True):
            assert mine.device.type == "cuda"
            assert (mine.dtype, mine.shape) == (right.dtype, right.shape)
            assert torch.equal(mine.cpu().view(torch.uint8), right.view(torch.uint8))


def test_a_file_that_ends_within_a_weight_is_refused(tmp_path: Path, plain_gpu: pytest.MonkeyPatch) -> None:
    plain_gpu.setattr(weights, "PIECE_BYTES", 16)
    (tmp_path / "weights").write_bytes(bytes(100))
    tensor = ir.ExternalTensor(
        "weights", 60, None, ir.DataType.FLOAT, name="w", shape=ir.Shape([12]), base_dir=tmp_path
    )
    for device in ("cpu", "cuda"):
        files = WeightFiles(tmp_path / "graph", torch.device(device))
        with pytest.raises(BundleError, match="weights: ends within w; build the bundle again"):
            files.read([tensor])
        files.close()
        (tmp_path / "weights").rename(tmp_path / "other")
        files = WeightFiles(tmp_path / "graph", torch.device(device))
        with pytest.raises(BundleError, match=r"graph: its weights cannot be read: .*weights"):
            files.read([tensor])
        files.close()
        (tmp_path / "other").rename(tmp_path / "weights")

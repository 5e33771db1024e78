"""Weights are read from their files into the memory of a CPU, or of a GPU's double."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch

from dflash_trt.engines.torch import weights
from dflash_trt.engines.torch.weights import WeightFiles
from dflash_trt.errors import BundleError
from tests.doubles.cuda_double import Cuda
from tests.doubles.one_gpu import one_gpu


@pytest.fixture
def gpu() -> Iterator[pytest.MonkeyPatch]:
    with one_gpu() as patch:
        yield patch


@pytest.mark.parametrize("size", [0, 2, 24, 4096])
def test_weights_reach_a_gpu_through_pieces_of_pinned_memory(
    size: int, tmp_path: Path, gpu: pytest.MonkeyPatch
) -> None:
    """A piece that is filled again before its last copy has ended would give other bytes: copies run late here."""
    gpu.setattr(weights, "PIECE_BYTES", 16)
    gpu.setattr(weights, "PIECES", 3)
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


def test_a_file_that_ends_within_a_weight_is_refused(tmp_path: Path, gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(weights, "PIECE_BYTES", 16)
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

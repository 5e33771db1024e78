"""GPUs by any spelling of their names, or by their figures."""

from __future__ import annotations

import pytest

from dflash_trt.errors import BuildError
from dflash_trt.planning.estimate import GIB
from dflash_trt.planning.gpus import find_gpu, gpus


def test_every_figure_of_the_table_has_a_source() -> None:
    assert {"h100", "b200", "rtx-4090", "dgx-spark"} <= set(gpus())
    for gpu in gpus().values():
        assert set(gpu.sources) == {"memory_mib", "gpus_per_node"}
        assert all(len(text) > 5 for text in gpu.sources.values())
        assert gpu.sm in (80, 86, 89, 90, 100, 103, 120, 121)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 5090", "rtx-5090"),
        ("A100_40GB", "a100-40gb"),
        ("H100", "h100"),
    ],
)
def test_a_gpu_is_found_in_any_spelling(written: str, name: str) -> None:
    assert find_gpu(written).name == name


def test_a_gpu_of_its_figures() -> None:
    gpu = find_gpu("memory=24, sm=8.9")
    assert (gpu.memory_bytes, gpu.sm) == (24 * GIB, 89)
    for wrong, said in (
        ("memory=24", "sm is missing"),
        ("memory=large,sm=89", "memory is 'large', not a number"),
        ("memory=0,sm=89", "memory is 0, expected a number above 0"),
        ("ram=24", "'ram' is unknown"),
        ("memory=24,sm=4000", "expected a compute capability"),
    ):
        with pytest.raises(BuildError, match=said):
            find_gpu(wrong)

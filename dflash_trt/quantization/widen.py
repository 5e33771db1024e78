"""Checkpoints in FP8 with a scale for each block of weights, as Qwen and DeepSeek publish them, widened to BF16.

A weight [out, in] in E4M3 has `weight_scale_inv` [ceil(out / rows), ceil(in / columns)], which multiplies its blocks.
Transformers reads them so (`Fp8Dequantize`). Activations stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dflash_trt.bundle.workspace import Progress
from dflash_trt.checkpoint.tensors import Checkpoint, TensorInfo
from dflash_trt.checkpoint.writer import Entry
from dflash_trt.errors import CheckpointError
from dflash_trt.files.reading import read_object
from dflash_trt.quantization.convert import write_json
from dflash_trt.quantization.repack import rewritten, steps

_CODES, _SCALE = "F8_E4M3", "_scale_inv"


def blocks_in_bf16(checkpoint: Checkpoint, out: Path, progress: Progress) -> Path:
    """Write the checkpoint to `out` with its layers in FP8 widened to BF16; returns `out`.

    Raises:
        CheckpointError: a weight in FP8 has no scales, or their number is not that of its blocks.
    """
    blocks = checkpoint.quantization.blocks
    assert blocks is not None

    def widened(info: TensorInfo) -> list[Entry] | None:
        if info.name.endswith(f".weight{_SCALE}"):
            return []
        if info.dtype != _CODES:
            return None
        return [Entry(info.name, "BF16", info.shape, _pieces(checkpoint, info, blocks))]

    made = rewritten(checkpoint, out, widened, progress)
    config = read_object(made / "config.json")
    config.pop("quantization_config", None)
    write_json(made / "config.json", config)
    return made


def _pieces(
    checkpoint: Checkpoint, info: TensorInfo, blocks: tuple[int, int]
) -> Iterator[tuple[str, NDArray[Any]]]:
    scale = checkpoint.tensors.get(f"{info.name}{_SCALE}")
    if len(info.shape) != 2 or scale is None:
        raise CheckpointError(
            f"{info.file}: tensor {info.name!r} is {_CODES} {list(info.shape)}, expected a matrix with "
            f"{info.name}{_SCALE}"
        )
    expected = tuple(-(-size // block) for size, block in zip(info.shape, blocks, strict=True))
    if scale.shape != expected:
        raise CheckpointError(
            f"{scale.file}: tensor {scale.name!r} is {list(scale.shape)}, expected {list(expected)}: one number for "
            f"each block of {list(blocks)} of {info.name}"
        )
    by_column = np.repeat(checkpoint.array(scale.name).astype(np.float32), blocks[1], axis=1)[
        :, : info.shape[1]
    ]
    done = 0
    for codes in steps(checkpoint, info, 4 * info.shape[1]):
        row = np.arange(done, done + len(codes)) // blocks[0]
        done += len(codes)
        yield info.name, (codes.astype(np.float32) * by_column[row]).astype(ml_dtypes.bfloat16)

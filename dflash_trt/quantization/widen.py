"""A quantized checkpoint in BF16, to be quantized to another format."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
from numpy.typing import NDArray

from dflash_trt.bundle.workspace import Progress
from dflash_trt.checkpoint.linears import StoredLinear, quantized_layers, shape_of, stored_linear
from dflash_trt.checkpoint.quantization import QUANT_CONFIG
from dflash_trt.checkpoint.rules import CACHE_SCALES
from dflash_trt.checkpoint.tensors import Checkpoint, TensorInfo
from dflash_trt.checkpoint.widening import widened_pieces
from dflash_trt.checkpoint.writer import Entry
from dflash_trt.files.reading import read_object
from dflash_trt.quantization.convert import STEP_BYTES, write_json
from dflash_trt.quantization.repack import rewritten


def in_bf16(checkpoint: Checkpoint, out: Path, progress: Progress) -> Path:
    """Write the checkpoint to `out` with its quantized layers widened to BF16; returns `out`.

    Rounding of inputs is left out. Raises CheckpointError where a layer lacks a tensor or has it in another form.
    """
    layers: dict[str, tuple[str, StoredLinear]] = {}
    ending = CACHE_SCALES if checkpoint.quantization.kv_cache else ()
    dropped = {name for name in checkpoint.tensors if name.endswith(ending)}
    for layer, algorithm, info in quantized_layers(checkpoint):
        rows, columns = shape_of(checkpoint, algorithm, layer, info)
        stored = stored_linear(checkpoint, layer, columns, rows)
        if stored is not None:
            layers[info.name] = layer, stored
            dropped.update(tensor.name for tensor in stored.tensors)

    def widened(info: TensorInfo) -> list[Entry] | None:
        if info.name not in layers:
            return [] if info.name in dropped else None
        layer, stored = layers[info.name]
        shape = shape_of(checkpoint, stored.algorithm, layer, info)
        name = f"{layer}.weight"
        return [Entry(name, "BF16", shape, _pieces(checkpoint, name, stored, shape[1]))]

    made = rewritten(checkpoint, out, widened, progress)
    config = read_object(made / "config.json")
    for key in ("quantization_config", "compression_config"):
        config.pop(key, None)
    write_json(made / "config.json", config)
    (made / QUANT_CONFIG).unlink(missing_ok=True)
    return made


def _pieces(
    checkpoint: Checkpoint, name: str, stored: StoredLinear, columns: int
) -> Iterator[tuple[str, NDArray[Any]]]:
    for rows in widened_pieces(checkpoint, stored, STEP_BYTES // (4 * columns)):
        yield name, rows.astype(ml_dtypes.bfloat16)

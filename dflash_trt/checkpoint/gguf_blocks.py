"""The quantized tensors of GGUF files as blocks of integers that ONNX Runtime multiplies, with the same numbers.

A number of a block is scale * code + least. The codes lie around their middle there (layout `blocks`), so what
is added to the product for a block is least + scale * middle, times the sum of its inputs.
Format: github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dflash_trt.checkpoint.layouts import GGUF
from dflash_trt.checkpoint.writer import Entry
from dflash_trt.formats import FORMATS
from dflash_trt.formats.base import BLOCK
from dflash_trt.formats.numbers import Bytes, Floats, pack_pairs


class Blocks(NamedTuple):
    """Some rows of a tensor: unsigned codes [rows, in], and a scale and a least number for each block [rows, in/32].

    Without least numbers the zero is the codes' middle.
    """

    codes: Bytes
    scale: Floats
    least: Floats | None = None


def _nibbles(packed: Bytes) -> Bytes:
    """[..., 16] -> [..., 32]: the low halves come first."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _numbers(data: Bytes, *columns: int) -> list[Floats]:
    """The float16 numbers that begin at these bytes of each block."""
    return [data[..., c : c + 2].copy().view(np.float16)[..., 0].astype(np.float32) for c in columns]


def _k_scales(data: Bytes) -> tuple[Floats, Floats]:
    """Of the eight blocks in a large one, whose twelve bytes have six bits of each scale and of each least number."""
    d, least_d = _numbers(data, 0, 2)
    a, b, both = (data[..., 4 + 4 * i : 8 + 4 * i] for i in range(3))
    scale = np.concatenate([a & 63, both & 15 | a >> 2 & 48], axis=-1)
    least = np.concatenate([b & 63, both >> 4 | b >> 2 & 48], axis=-1)
    return d[..., None] * scale, -least_d[..., None] * least


def _q4_k(data: Bytes) -> Blocks:
    codes = _nibbles(data[..., 16:].reshape(*data.shape[:-1], 4, BLOCK))
    return Blocks(codes.reshape(*data.shape[:-1], 8, BLOCK), *_k_scales(data))


def _q5_k(data: Bytes) -> Blocks:
    """With eight bits for each number."""
    low = _nibbles(data[..., 48:].reshape(*data.shape[:-1], 4, BLOCK)).reshape(*data.shape[:-1], 8, BLOCK)
    high: Bytes = data[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)
    codes: Bytes = low | high << np.uint8(4)
    return Blocks(codes, *_k_scales(data))


# The bytes of a block of each type, and what reads some of them.
_TYPES: Mapping[str, tuple[int, Callable[[Bytes], Blocks]]] = {
    "Q4_0": (18, lambda data: Blocks(_nibbles(data[..., 2:]), *_numbers(data, 0))),
    "Q4_1": (20, lambda data: Blocks(_nibbles(data[..., 4:]), *_numbers(data, 0, 2))),
    "Q8_0": (34, lambda data: Blocks(data[..., 2:] ^ np.uint8(128), *_numbers(data, 0))),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
}


def _tensors(kind: str, rows: int, columns: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of the tensors of a layer of this type, by the ends of their names."""
    bits, count = FORMATS[GGUF[kind].scheme].integer_bits, columns // BLOCK
    assert bits is not None
    scales = ("F32", (rows, count))
    return {
        "weight": ("U8", (rows, count, BLOCK * bits // 8)),
        "weight_scale": scales if kind.endswith("_K") else ("F16", (rows, count)),
        **({} if kind in ("Q4_0", "Q8_0") else {"weight_zero_term": scales}),
    }


def pieces(kind: str, data: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """The tensors of some rows, from their bytes [rows, bytes] in the file."""
    (size, read), rows = _TYPES[kind], len(data)
    codes, scale, least = read(data.view(np.uint8).reshape(rows, -1, size))
    codes, scale = codes.reshape(rows, -1, BLOCK), scale.reshape(rows, -1)
    four = GGUF[kind].scheme == "int4"
    if least is not None and not four:  # numbers of five bits, around the middle of eight
        codes = codes + np.uint8(112)
    tensors: dict[str, NDArray[Any]] = {"weight": pack_pairs(codes) if four else codes, "weight_scale": scale}
    if least is not None:
        tensors["weight_zero_term"] = least.reshape(rows, -1) + scale * np.float32(8 if four else 16)
    return tensors | ({} if kind.endswith("_K") else {"weight_scale": scale.astype(np.float16)})


def entries(layer: str, kind: str, shape: Sequence[int], rows: Iterable[NDArray[Any]]) -> list[Entry]:
    """A layer [out, in] of this type, from its rows as the file has them."""
    forms = _tensors(kind, *shape)

    def written() -> Iterator[tuple[str, NDArray[Any]]]:
        for some in rows:
            for end, array in pieces(kind, some).items():
                yield f"{layer}.{end}", array

    found = [Entry(f"{layer}.{end}", *form) for end, form in forms.items()]
    return [replace(found[0], pieces=written()), *found[1:]]


def together(entries: Iterable[Entry]) -> list[Entry]:
    """Scales after all weights, and then what is added: those of adjacent layers are adjacent, too."""
    ends = ("weight_scale", "weight_zero_term")
    return sorted(entries, key=lambda e: (e.name.endswith(ends[0]), e.name.endswith(ends[1])))

"""Safetensors files, single or sharded. Headers are checked before use, and data is memory-mapped.

Format: 8 bytes header length (little endian), JSON header, data; github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import difflib
import math
import mmap
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dflash_trt.checkpoint.fields import Fields
from dflash_trt.checkpoint.layouts import WEIGHTS
from dflash_trt.checkpoint.quantization import read_quantization
from dflash_trt.checkpoint.rules import Quantization, text_name
from dflash_trt.errors import CheckpointError, quoted, show
from dflash_trt.files.disk import own_file, stamp
from dflash_trt.files.reading import open_file, parse_object
from dflash_trt.formats.base import BLOCK

DTYPES: Mapping[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
CODE_DTYPES = ("U8", "I8", "I32", "F8_E4M3")  # of weights in fewer bits
# Space for 250,000 tensors. The library accepts 100 MB, which may take 2.5 GB when parsed.
_HEADER_BYTES = 32 << 20
_INDEX_BYTES = 64 << 20
# Limits of the search for similar names: comparing takes quadratic time in both.
_NEAR_NAMES, _NEAR_CHARACTERS = 1000, 200
_PIECE = 8 << 20
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The place of a tensor. `offset` and `nbytes` count bytes of `file`; `dtype` is its safetensors name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


class Checkpoint:
    """The tensors of one checkpoint directory.

    Opening reads only the headers. `array` maps a file when one of its tensors is first needed. `quantization`
    describes the quantized layers.

    Raises:
        CheckpointError: no safetensors, a header that is malformed or does not match its file, an index that does not
            match its shards, a duplicate tensor, or an unsupported quantization.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        if not directory.is_dir():
            raise CheckpointError(
                f"{directory}: no such directory; expected one with config.json and {SINGLE}"
            )
        weight_map = read_index(directory) if (directory / INDEX).is_file() else None
        if weight_map is not None:
            _check_shards(directory, weight_map)
        self.files: tuple[Path, ...] = _files(directory, weight_map)
        self._stamps = {file: stamp(own_file(directory, file).stat()) for file in self.files}
        tensors: dict[str, TensorInfo] = {}
        elsewhere: dict[str, Path] = {}  # copies that the index does not name, as of an earlier sharding
        for file in self.files:
            for stored in read_header(file):
                tensor = replace(stored, name=text_name(stored.name))
                if (weight_map or {}).get(stored.name, file.name) != file.name:
                    elsewhere[tensor.name] = file
                    continue
                if tensor.name in tensors:
                    first = tensors[tensor.name].file.name
                    raise CheckpointError(
                        f"{directory}: tensor {quoted(tensor.name)} is in both {first} and {file.name}"
                    )
                tensors[tensor.name] = tensor
        for stored_name, shard in (weight_map or {}).items():
            name = text_name(stored_name)
            if name not in tensors:
                place = f"in {elsewhere[name].name}" if name in elsewhere else "in no shard"
                raise CheckpointError(
                    f"{directory / INDEX}: tensor {quoted(name)} should be in {shard}, but is {place}; "
                    "fetch the index and the shards again, from one revision"
                )
        self.tensors: Mapping[str, TensorInfo] = tensors
        self.quantization = read_quantization(directory)
        self._maps: dict[Path, mmap.mmap] = {}

    def __getitem__(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            like = (n for n in self.tensors if abs(len(n) - len(name)) < 8 and len(n) < _NEAR_CHARACTERS)
            near = difflib.get_close_matches(name, list(islice(like, _NEAR_NAMES)), n=3)
            hint = f"; near names: {', '.join(near)}" if near else ""
            raise CheckpointError(
                f"{self.directory}: has no tensor {quoted(name)}{hint}; "
                "config.json and the safetensors must come from one checkpoint, whole"
            )
        return self.tensors[name]

    def expect(self, name: str, shape: tuple[int, ...], dtypes: Sequence[str]) -> TensorInfo:
        """The tensor. Raises CheckpointError if it does not have this shape and one of these dtypes."""
        layer, _, end = name.rpartition(".")
        floats = end == "weight" and "BF16" in dtypes and self.quantization.name is not None
        if floats and (stored := self.codes(layer)) is not None:
            raise CheckpointError(
                f"{stored.file}: {quoted(layer)} is quantized (tensor {quoted(stored.name)} is {stored.dtype}), but is "
                "read in floating point only, as embeddings, routers and gates are; fetch a quantization that leaves "
                "it as it is, or make one with: dflash-trt quantize"
            )
        tensor = self[name]
        if tensor.shape != shape:
            raise CheckpointError(
                f"{tensor.file}: tensor {quoted(name)} has shape {list(tensor.shape)}, but by config.json it has "
                f"{list(shape)}; the files are of different models"
            )
        if tensor.dtype not in dtypes:
            raise CheckpointError(
                f"{tensor.file}: tensor {quoted(name)} is {tensor.dtype}, supported are {', '.join(dtypes)}; "
                "save the checkpoint again in one of these"
            )
        return tensor

    def codes(self, layer: str) -> TensorInfo | None:
        """The tensor with a layer's weight in fewer bits, if it is stored so."""
        found = [self.tensors.get(f"{layer}.{end}") for end in WEIGHTS]
        first = next(filter(None, found), None)
        return first if first is not None and first.dtype in CODE_DTYPES else None

    def array(self, name: str) -> NDArray[Any]:
        """A read-only view of the mapped file, in the tensor's shape and dtype (from ml_dtypes for BF16 and FP8)."""
        tensor = self[name]
        dtype = DTYPES[tensor.dtype]
        if tensor.nbytes == 0:
            empty: NDArray[Any] = np.empty(tensor.shape, dtype)
            empty.flags.writeable = False
            return empty
        if tensor.file not in self._maps:
            with tensor.file.open("rb") as file:
                if stamp(os.fstat(file.fileno())) != self._stamps[tensor.file]:
                    raise CheckpointError(
                        f"{tensor.file}: was changed since its header was read; try again when nothing writes to it"
                    )
                self._maps[tensor.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        count = tensor.nbytes // dtype.itemsize
        return np.frombuffer(self._maps[tensor.file], dtype, count, tensor.offset).reshape(tensor.shape)


def same_bytes(first: TensorInfo, second: TensorInfo) -> bool:
    """Whether two tensors have the same dtype, shape and bytes. Reads in pieces, because they may be large."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    with first.file.open("rb") as one, second.file.open("rb") as other:
        one.seek(first.offset)
        other.seek(second.offset)
        for done in range(0, first.nbytes, _PIECE):
            size = min(_PIECE, first.nbytes - done)
            if one.read(size) != other.read(size):
                return False
    return True


def adjacent(tensors: Sequence[TensorInfo]) -> TensorInfo | None:
    """Adjacent tensors as one tensor, joined along the first axis; None if they are not adjacent."""
    first, *others = tensors
    end, rows = first.offset + first.nbytes, first.shape[0]
    for other in others:
        alike = (other.file, other.dtype, other.shape[1:]) == (first.file, first.dtype, first.shape[1:])
        if not alike or other.offset != end:
            return None
        end, rows = end + other.nbytes, rows + other.shape[0]
    name = "+".join(tensor.name for tensor in tensors)
    return replace(first, name=name, shape=(rows, *first.shape[1:]), nbytes=end - first.offset)


class Outline:
    """A checkpoint known by its configuration only: it has whatever tensor is expected of it, and no bytes.

    Tensors get the first of the dtypes they may have, and places in one imagined file, in the order of asking.
    `in_blocks`: quantized layers are in the blocks that ONNX Runtime multiplies, where their format can be.
    """

    def __init__(
        self, directory: Path, quantization: Quantization | None = None, *, in_blocks: bool = False
    ) -> None:
        self.directory, self.in_blocks = directory, in_blocks
        self.quantization = quantization or read_quantization(directory)
        self.files: tuple[Path, ...] = ()
        self.tensors: dict[str, TensorInfo] = {}
        self._end = 0

    def expect(self, name: str, shape: tuple[int, ...], dtypes: Sequence[str]) -> TensorInfo:
        """The tensor, which has this shape and the first of these dtypes if it was not asked for before."""
        if name not in self.tensors:
            size = math.prod(shape) * DTYPES[dtypes[0]].itemsize
            self.tensors[name] = TensorInfo(name, dtypes[0], shape, self.directory / SINGLE, self._end, size)
            self._end += size
        return self.tensors[name]


def tensor_names(directory: Path) -> Collection[str]:
    """The names of a checkpoint's tensors, of headers or the index alone; none where it has no weights yet."""
    if (directory / INDEX).is_file():
        return read_index(directory)
    file = directory / SINGLE
    return {tensor.name for tensor in read_header(file)} if file.is_file() else ()


def read_header(file: Path) -> list[TensorInfo]:
    """The tensors of one safetensors file, in file order.

    Every value of the header is checked against the file's size before use. The tensors must cover the data exactly
    once. Only the header is read.
    """
    try:
        size = file.stat().st_size
        with open_file(file) as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(_HEADER_BYTES, size - 8):
                limit = f"at most {_HEADER_BYTES} and {max(size - 8, 0)}"
                raise CheckpointError(
                    f"{file}: {size} bytes; its header claims a length of {length} bytes, expected {limit}"
                )
            header = parse_object(stream.read(length), f"{file}: header")
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from None
    notes = header.pop("__metadata__", None)
    if notes is None:
        notes = {}
    if not isinstance(notes, dict):
        raise CheckpointError(f"{file}: __metadata__ is {show(notes)}, expected an object of strings")
    for name in notes:
        Fields(file, notes, "__metadata__.").string(name)
    tensors = [_read_entry(file, name, entry, 8 + length) for name, entry in header.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    end = 8 + length
    for tensor in tensors:
        if tensor.offset != end:
            problem = "overlaps the tensor before it" if tensor.offset < end else "leaves a gap before it"
            raise CheckpointError(
                f"{file}: tensor {quoted(tensor.name)} starts at byte {tensor.offset}, expected {end}: it {problem}"
            )
        end += tensor.nbytes
    if end != size:
        cut = next((tensor.name for tensor in tensors if tensor.offset + tensor.nbytes > size), None)
        state = "longer than its header says" if cut is None else f"truncated, from tensor {quoted(cut)} on"
        raise CheckpointError(
            f"{file}: {size} bytes, but its header describes {end}: the file is {state}; fetch it again"
        )
    return tensors


def _read_entry(file: Path, name: str, entry: object, data: int) -> TensorInfo:
    if not isinstance(entry, dict):
        raise CheckpointError(f"{file}: header entry {show(name)} is {show(entry)}, expected an object")
    fields = Fields(file, entry, f"{name}.")
    dtype = fields.string("dtype", among=DTYPES)
    shape = fields.integers("shape", most=8)
    offsets = fields.integers("data_offsets", most=2, maximum=2**63 - 1)
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise fields.error("data_offsets", f"is {list(offsets)}, expected a start and an end not before it")
    expected, nbytes = math.prod(shape) * DTYPES[dtype].itemsize, offsets[1] - offsets[0]
    if nbytes != expected:
        raise fields.error("data_offsets", f"span {nbytes} bytes, but {dtype} {list(shape)} takes {expected}")
    return TensorInfo(name, dtype, shape, file, data + offsets[0], nbytes)


def read_index(directory: Path) -> dict[str, str]:
    """Tensor name -> shard file name, as the index has them. Shards need not be there yet."""
    path = directory / INDEX
    section = Fields.read(path, _INDEX_BYTES).section("weight_map")
    if section is None or not section.values:
        raise CheckpointError(
            f"{path}: weight_map is missing or empty, expected tensor names and their files"
        )
    weight_map = {name: section.string(name) for name in section.values}
    for name, shard in weight_map.items():
        if shard != Path(shard).name or "\\" in shard or "\0" in shard or not shard.endswith(".safetensors"):
            raise section.wrong(name, "expected the name of a .safetensors file in the same directory")
    return weight_map


def _check_shards(directory: Path, weight_map: Mapping[str, str]) -> None:
    if (directory / SINGLE).exists():
        raise CheckpointError(
            f"{directory}: has both {SINGLE} and {INDEX}; remove the one that does not belong"
        )
    for name, shard in weight_map.items():
        if not os.path.isfile(directory / shard):  # Path.is_file raises OSError for a name that is too long
            raise Fields(directory / INDEX, weight_map, "weight_map.").error(
                name, f"is {show(shard)}, but {directory} has no such file; fetch it"
            )


def _files(directory: Path, weight_map: Mapping[str, str] | None) -> tuple[Path, ...]:
    if weight_map is not None:
        return tuple(directory / shard for shard in sorted(set(weight_map.values())))
    if (directory / SINGLE).is_file():
        return (directory / SINGLE,)
    others = sorted(
        path.name for path in directory.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".gguf", ".ckpt")
    )
    hint = f"; {others[0]} is there, but only safetensors is read" if others else ""
    raise CheckpointError(f"{directory}: has neither {SINGLE} nor {INDEX}{hint}")


_ROLES = (
    ("embed_tokens", "embedding"),
    ("lm_head", "head"),
    (".experts.", "experts"),
    ("shared_expert_gate", "router"),
    ("router", "router"),
    ("mlp.gate.", "router"),
    ("self_attn", "attention"),
    ("linear_attn", "attention"),
    (".mlp.", "mlp"),
    ("norm", "norm"),
    ("fc.", "fc"),
)


def role_of(name: str) -> str:
    """embedding, head, experts, router, attention, mlp, norm, fc (the drafter's fusion of taps) or other."""
    return next((role for part, role in _ROLES if part in name), "other")


# The ends of names of tensors that say how to read a weight.
_SCALES = (
    *("_scale", "_scale_2", "_scales", ".scales", ".weight_scale_inv"),
    *(".weight_zero_point", ".weight_zero_term", ".qzeros", ".weight_g_idx", ".g_idx", ".weight_order"),
    ".weight_shape",
)


def parameters_of(tensor: TensorInfo, quantization: Quantization | None = None) -> int:
    """Numbers in a tensor: two in a byte of MXFP4's blocks and of packed weights, none in their scales.

    Layers in the blocks that ONNX Runtime multiplies have BLOCK numbers in each. `quantization` says how many bits the
    integers in words have; without it they have four.
    """
    if tensor.name.endswith(_SCALES) and not tensor.name.endswith("router.per_expert_scale"):
        return 0
    if tensor.dtype == "I32":
        algorithm = None if quantization is None else quantization.algorithm(tensor.name.rpartition(".")[0])
        return tensor.nbytes * (1 if algorithm is not None and algorithm.scheme == "int8" else 2)
    in_bytes = tensor.dtype == "U8" and tensor.name.endswith((".weight", ".weight_packed"))
    if in_bytes and len(tensor.shape) == 3:
        return math.prod(tensor.shape[:2]) * BLOCK
    return math.prod(tensor.shape) * (2 if in_bytes or tensor.name.endswith("_blocks") else 1)

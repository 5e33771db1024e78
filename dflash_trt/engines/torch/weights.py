"""The weights of a graph, which lie in files beside it."""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import to_torch_dtype

from dflash_trt.errors import BundleError

Tensor = torch.Tensor
Place = tuple[Path, int, int]  # a file, where a part of it begins, and its bytes
# On the way to a GPU, weights pass through so many pieces of pinned memory of so many bytes.
PIECES, PIECE_BYTES = 8, 8 << 20


class WeightFiles:
    """The files beside a graph, which are mapped for a CPU, and read in pieces for a GPU."""

    def __init__(self, graph: Path, device: torch.device) -> None:
        self._graph, self._maps, self._sizes = graph, dict[Path, Any](), dict[Path, int]()
        self._upload = None if device.type == "cpu" else _Upload(device)

    def read(self, tensors: Sequence[Any]) -> list[Tensor]:
        """Weights, which are external tensors of the graph, on the device. On a CPU, they are the files' own memory."""
        try:
            places = [self._place(tensor) for tensor in tensors]
            found = (
                [self._mapped(*place) for place in places] if self._upload is None else self._upload(places)
            )
        except (OSError, ValueError) as error:
            raise BundleError(f"{self._graph}: its weights cannot be read: {error}") from error
        return list(map(_as_stored, found, tensors))

    def _place(self, tensor: Any) -> Place:
        folder = self._graph.parent
        path, begin, size = folder / tensor.location, tensor.offset or 0, tensor.nbytes
        if path not in self._sizes:
            if not path.resolve().is_relative_to(folder.resolve()):
                raise BundleError(
                    f"{self._graph}: {tensor.name} is in {tensor.location}, outside of the bundle"
                )
            self._sizes[path] = path.stat().st_size
        if self._sizes[path] < begin + size:
            raise BundleError(f"{path}: ends within {tensor.name}; build the bundle again")
        return path, begin, size

    def _mapped(self, path: Path, begin: int, size: int) -> Tensor:
        if path not in self._maps:
            self._maps[path] = np.memmap(path, np.uint8, mode="c")
        return torch.from_numpy(self._maps[path][begin : begin + size])

    def close(self) -> None:
        """Give back the pages that were read. A weight that is still the file's own memory finds them again."""
        if self._upload is not None:
            self._upload.close()
        if hasattr(mmap, "MADV_DONTNEED"):
            for mapped in self._maps.values():
                mapped._mmap.madvise(mmap.MADV_DONTNEED)


def _as_stored(raw: Tensor, tensor: Any) -> Tensor:
    """A weight from its bytes. Four-bit integers get eight bits each."""
    shape = [int(n) for n in tensor.shape]
    if tensor.dtype == ir.DataType.INT4:
        both = torch.stack((raw << 4, raw & 0xF0), -1).view(torch.int8)
        return (both >> 4).reshape(shape)
    dtype = to_torch_dtype(tensor.dtype)
    if raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype).reshape(shape)


class _Upload:
    """Copies parts of files to a GPU, on the current stream. Threads read the next pieces while one is copied."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._threads = device, ThreadPoolExecutor(PIECES)
        # Pinned memory, and the end of the last copy from it.
        self._free = deque(
            (torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True), torch.cuda.Event())
            for _ in range(PIECES)
        )
        self._filling = deque[tuple[Future[None], Tensor, Tensor, Any]]()

    def __call__(self, places: Sequence[Place]) -> list[Tensor]:
        """The bytes of each place, uint8. Returns before they are copied."""
        buffers = [torch.empty(size, dtype=torch.uint8, device=self._device) for *_, size in places]
        for whole, (path, begin, size) in zip(buffers, places, strict=True):
            for at in range(0, size, PIECE_BYTES):
                if not self._free:
                    self._copy()
                memory, copied = self._free.popleft()
                copied.synchronize()
                target = whole[at : at + PIECE_BYTES]
                room = memory[: len(target)].numpy()
                filled = self._threads.submit(_fill, room, str(path), begin + at)
                self._filling.append((filled, target, memory, copied))
        while self._filling:
            self._copy()
        return buffers

    def _copy(self) -> None:
        """Copy the oldest piece, once it is filled."""
        filled, target, memory, copied = self._filling.popleft()
        filled.result()
        target.copy_(memory[: len(target)], non_blocking=True)
        copied.record()
        self._free.append((memory, copied))

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()


def _fill(room: Any, path: str, begin: int) -> None:
    with open(path, "rb") as file:
        file.seek(begin)
        if file.readinto(room) < len(room):  # which reads as often as a file system needs
            raise OSError(f"{path}: has become shorter")

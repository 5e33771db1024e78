"""TensorRT-RTX's parser opens `libtensorrt_rtx.so` for a plugin, and NVIDIA's wheels have `libtensorrt_rtx.so.1` only.

Without that name the process ends ("terminate called without an active exception", seen with 1.7.1). So a library of
that name is loaded, which holds nothing and needs the real one. The loader finds what is loaded by its name.
"""

from __future__ import annotations

import ctypes
import platform
import struct
import sys
import tempfile
from pathlib import Path

_MACHINES = {"x86_64": 62, "aarch64": 183}  # ELF's numbers of the processors
_NEEDED, _HASH, _STRTAB, _SYMTAB, _STRSZ, _SYMENT, _SONAME = 1, 4, 5, 6, 10, 11, 14
_HEADER, _SEGMENT, _SYMBOL = 64, 56, 24  # sizes of ELF's structures


def provide_library_name() -> None:
    """Let this process open TensorRT-RTX's library, which it has loaded, without the version in its name."""
    if sys.platform != "linux":
        return
    try:
        ctypes.CDLL("libtensorrt_rtx.so")
    except OSError:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "shim.so"
            file.write_bytes(empty_library("libtensorrt_rtx.so", needs="libtensorrt_rtx.so.1"))
            ctypes.CDLL(str(file), ctypes.RTLD_GLOBAL)


def empty_library(name: str, *, needs: str) -> bytes:
    """A shared library for this processor (64 bits) with this name, no symbols and one dependency."""
    strings = b"\0" + name.encode() + b"\0" + needs.encode() + b"\0"
    strings += bytes(-len(strings) % 8)
    symbols = bytes(_SYMBOL)  # the first one is empty
    hashes = struct.pack("<4I", 1, 1, 0, 0)  # one bucket, with the empty symbol
    begin = _HEADER + 2 * _SEGMENT
    at = {_SYMTAB: begin, _HASH: begin + len(symbols), _STRTAB: begin + len(symbols) + len(hashes)}
    entries = [
        *((_NEEDED, 2 + len(name)), (_SONAME, 1), *at.items()),
        *((_STRSZ, len(strings)), (_SYMENT, _SYMBOL), (0, 0)),
    ]
    dynamic = b"".join(struct.pack("<QQ", *entry) for entry in entries)
    place = at[_STRTAB] + len(strings)
    size = place + len(dynamic)
    machine = _MACHINES[platform.machine()]
    header = struct.pack("<HHIQQQIHHHHHH", 3, machine, 1, 0, _HEADER, 0, 0, _HEADER, _SEGMENT, 2, 64, 0, 0)
    load = struct.pack("<IIQQQQQQ", 1, 6, 0, 0, 0, size, size, 0x10000)
    links = struct.pack("<IIQQQQQQ", 2, 6, place, place, place, len(dynamic), len(dynamic), 8)
    return b"\x7fELF\2\1\1" + bytes(9) + header + load + links + symbols + hashes + strings + dynamic

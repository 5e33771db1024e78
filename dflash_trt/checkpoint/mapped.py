"""Give back resident memory: pages of mapped weights that TensorRT or we have read."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

_SECONDS = 0.05
_MAPS = Path("/proc/self/maps")


@contextmanager
def released(files: Iterable[Path]) -> Iterator[None]:
    """Repeatedly release the resident pages of read-only mappings of `files`.

    The kernel may reclaim such pages, but counts them as this process's memory until then. A second read is served
    from the page cache. Works on Linux only; elsewhere nothing happens.
    """
    if not _MAPS.exists():
        yield
        return
    names = {str(file.resolve()) for file in files}
    done = threading.Event()

    def release() -> None:
        while not done.wait(_SECONDS):
            _release(names)

    thread = threading.Thread(target=release, name="mapped", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _release(names: set[str]) -> None:
    """Release the pages of read-only mappings. No data is lost: such a page is a copy of the file."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in _MAPS.read_text().splitlines():
        addresses, permissions, _, _, _, *path = line.split(None, 5)
        if path and path[0] in names and permissions[1] == "-":
            start, end = (int(a, 16) for a in addresses.split("-"))
            libc.madvise(start, end - start, mmap.MADV_DONTNEED)

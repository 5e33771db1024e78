"""The error of a GPU without free memory."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raise MemoryError where torch, or a library under it, finds no free memory on the GPU. It says how much is free,
    and which other processes have some, without torch's advice about its allocator.
    """
    try:
        yield
    except MemoryError as error:  # of a part of this work
        traceback.clear_frames(error.__traceback__)
        raise
    except RuntimeError as error:
        message = str(error)
        if "out of memory" not in message and "ALLOC_FAILED" not in message:
            raise
        # What the frames hold would take memory for as long as somebody has the error.
        traceback.clear_frames(error.__traceback__)
        short = message.partition("\n")[0].partition(" Including non-PyTorch")[0]
        raise MemoryError(short.rstrip(".")) from error

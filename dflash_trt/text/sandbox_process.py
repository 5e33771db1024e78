"""The program of sandbox.py: answers tasks, each within limits on CPU time, memory and stack.

Its arguments are a module of this folder and the limits: seconds, and bytes of memory and of stack (0: none). Each line
of input is a JSON object, the arguments of that module's `answer`. Each answer is a length of 8 bytes, little endian,
and a JSON object; it has `error` for what cannot be done. The kernel ends a process that exceeds a limit. The program
is started by path and imports nothing else of this package.
"""

from __future__ import annotations

import importlib
import json
import math
import signal
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

try:
    import resource
except ImportError:  # Windows has none; there only the caller's clock limits
    resource = None  # type: ignore[assignment]


def main(module: str, seconds: int, memory: int, stack: int) -> None:
    """Answer tasks from standard input until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller handles Ctrl-C in a terminal
    sys.path.append(str(Path(__file__).parent))  # last: it must not shadow the standard library
    answer = importlib.import_module(module).answer
    for line in sys.stdin.buffer:
        try:
            result = answer(**json.loads(line), limit=partial(_limit, seconds, memory, stack))
        except MemoryError:
            result = {"error": f"it takes more than {memory >> 20} MiB of memory"}
        finally:
            _limit(None, None, 0)
        text = json.dumps(result).encode()
        sys.stdout.buffer.write(len(text).to_bytes(8, "little") + text)
        sys.stdout.buffer.flush()


def _limit(seconds: int | None, memory: int | None, stack: int) -> None:
    """Limit what is taken from now on, beyond what this process has taken before. None lifts a limit."""
    if resource is None:
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    size = 0
    with suppress(OSError), open("/proc/self/statm") as sizes:
        size = int(sizes.read().split()[0]) * resource.getpagesize()
    for kind, taken, more in (
        (resource.RLIMIT_CPU, math.ceil(time.process_time()), seconds),
        (resource.RLIMIT_AS, size, memory),
        (resource.RLIMIT_STACK, 0, stack or None),
    ):
        _, most = resource.getrlimit(kind)
        wanted = most if more is None else taken + more
        with suppress(ValueError, OSError):  # macOS refuses a limit of the address space
            resource.setrlimit(kind, (wanted if most == resource.RLIM_INFINITY else min(wanted, most), most))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))

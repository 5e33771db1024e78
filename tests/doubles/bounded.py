"""Run code in its own process with little memory and little time, to check limits."""

from __future__ import annotations

import os
import subprocess
import sys

SECONDS, MEMORY = 20, 2 << 30  # CPU seconds, and bytes of address space

_LIMITS = """\
import resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_CPU, ({seconds}, {seconds} + 1))
resource.setrlimit(resource.RLIMIT_AS, ({memory}, {memory}))
"""


def bounded(code: str, *arguments: object, seconds: int = SECONDS, memory: int = MEMORY) -> str:
    """The output of `code` with `arguments` in sys.argv. Fails if it does not end well within the limits."""
    limits = _LIMITS.format(seconds=seconds, memory=memory)
    command = [sys.executable, "-c", limits + code, *map(str, arguments)]
    # Every thread of a BLAS takes address space.
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=30 * seconds, check=False
    )
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr[-2000:]}"
    return done.stdout

"""Becomes another program that is killed when the process that started it ends, however that ends.

    python tied.py PID PROGRAM ARGUMENT...

PID is the process that starts it. Linux only. Nothing of this package is imported, so that it starts at once.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == int(sys.argv[1]):  # else it has ended before this was asked for
        os.execv(sys.argv[2], sys.argv[2:])

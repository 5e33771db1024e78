"""Become another program, which is killed when its parent process ends for any reason.

    python tied.py PID PROGRAM ARGUMENT...

PID is the parent process. Linux only. Imports nothing of this package, so that it starts fast.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == int(sys.argv[1]):  # otherwise the parent had already ended
        os.execv(sys.argv[2], sys.argv[2:])

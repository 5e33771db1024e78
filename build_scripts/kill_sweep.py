"""Kill what makes files at every call that changes the file system, and look at what is left.

    python -m build_scripts.kill_sweep [OPERATION ...] [--sample N] [--syscalls] [--dir DIR]

Operations: build, precision (a build that quantizes), replace (a build with --force over another bundle), quantize,
deploy. Each is run again and again in a process of its own, which is killed (SIGKILL) at its first call that changes
the file system, its second, and so on; then once for each of some limits of the size of a file, which stand for a full
disk. After each, the place must hold the old directory, the new one, whole, or nothing; the same operation again must
succeed, and leave what an undisturbed one leaves, and nothing beside it.

Calls are seen by an audit hook: opening for writing, making, linking, renaming, removing, flushing. With --syscalls
they are system calls, single writes included, seen and killed by strace, which must be installed and allowed to trace.
The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from build_scripts.generated import write_pair
from dflash_trt.build import build
from dflash_trt.bundle import MANIFEST, Bundle
from dflash_trt.precision import Precision
from dflash_trt.quantization.convert import quantize
from dflash_trt.serving.deploy import deploy

CALLS = {
    *("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.utime"),
    *("os.chmod", "fcntl.flock"),
}
SYSCALLS = ",".join(
    [
        *(
            "write",
            "pwrite64",
            "writev",
            "ftruncate",
            "fsync",
            "fdatasync",
            "sendfile",
            "copy_file_range",
            "flock",
        ),
        *("rename", "renameat", "renameat2", "link", "linkat", "symlink", "symlinkat", "unlink", "unlinkat"),
        *("mkdir", "mkdirat", "rmdir", "utimensat", "chmod", "fchmod", "fchmodat"),
    ]
)
FILE_SIZES = (0, 100, 10_000, 200_000, 1_000_000)
_FAILED, _STARTED = 3, 30  # exit code of an operation that raised OSError; seconds until strace has attached

Tree = dict[str, str]


class Operation:
    """One of OPERATIONS, in a directory of its own."""

    def __init__(self, name: str, pair: Path, folder: Path) -> None:
        self.name, self.pair, self.folder, self.out = name, pair, folder, folder / "out"
        folder.mkdir()
        self.old: Tree = {}
        if name == "replace":
            self._build(block_size=8)
            self.old = tree(self.out)
            shutil.copytree(self.out, pair / "old")
        self.run()
        self.new = tree(self.out)
        assert self.new != self.old
        self.reset()

    def run(self) -> None:
        if self.name == "quantize":
            quantize(self.pair / "target", self.out, "int4")
        elif self.name == "deploy":
            deploy(self.pair / "bundle", self.out, copy=True)
        elif self.name == "precision":
            self._build(precision=Precision(target="fp8", drafter="nvfp4", head="mxfp4"))
        else:
            self._build(force=self.name == "replace")

    def _build(self, **options: Any) -> None:
        build(str(self.pair / "target"), str(self.pair / "drafter"), self.out, **options)

    def reset(self) -> None:
        shutil.rmtree(self.folder)
        self.folder.mkdir()
        if self.old:
            shutil.copytree(self.pair / "old", self.out)

    def check(self, moment: str) -> None:
        """What is left by an interruption, and by the same operation again."""
        found = tree(self.out) if self.out.exists() else {}
        if found not in ({}, self.old, self.new):
            sys.exit(f"{self.name}, {moment}: {self.out} is neither old nor new: {sorted(found)}")
        if MANIFEST in found:
            Bundle.open(self.out, "full")
        code = in_child(self.run)
        if code != 0:
            sys.exit(f"{self.name}, {moment}: again, it ended with {code}; {sorted(tree(self.folder))}")
        if tree(self.out) != self.new:
            sys.exit(f"{self.name}, {moment}: again, it left something else: {sorted(tree(self.out))}")
        if beside := sorted(p.name for p in self.folder.iterdir() if p != self.out):
            sys.exit(f"{self.name}, {moment}: again, it left {beside} beside")


OPERATIONS = ("build", "precision", "replace", "quantize", "deploy")


def tree(folder: Path) -> Tree:
    """Every file and directory with its digest."""
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() if p.is_file() else ""
        for p in folder.rglob("*")
    }


def in_child(run: Callable[[], None], prepare: Callable[[], None] | None = None, *, traced: str = "") -> int:
    """Exit code of `run` in a fork of this process; negative is a signal. `traced`: what strace injects."""
    child = os.fork()
    if not child:
        code = 1
        try:
            if traced:
                os.kill(os.getpid(), signal.SIGSTOP)
            if prepare:
                prepare()
            run()
            code = 0
        except OSError:
            code = _FAILED
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    if traced:
        return _traced(child, traced)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _traced(child: int, inject: str) -> int:
    os.waitpid(child, os.WUNTRACED)
    command = ["strace", "-f", "-qq", "-o", os.devnull, "-e", f"trace={SYSCALLS}", "-e", inject]
    tracer = subprocess.Popen([*command, "-p", str(child)])
    end = time.monotonic() + _STARTED
    while "TracerPid:\t0\n" in Path(f"/proc/{child}/status").read_text():
        if tracer.poll() is not None or time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            sys.exit("strace cannot trace here")
        time.sleep(0.002)
    os.kill(child, signal.SIGCONT)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    tracer.wait()
    return code


def kill_at(number: int) -> Callable[[], None]:
    """Prepare a process to be killed at its call of that number (0: the first)."""

    def prepare() -> None:
        count = -1
        flush = os.fsync

        def call() -> None:
            nonlocal count
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            writes = event == "open" and bool((arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
            if writes or event in CALLS:
                call()

        def fsync(descriptor: int) -> None:
            call()
            flush(descriptor)

        os.fsync = fsync  # type: ignore[assignment]
        sys.addaudithook(hook)

    return prepare


def kill(operation: Operation, number: int, *, syscalls: bool) -> bool:
    """Run the operation, to be killed at its call of that number; False where it has not so many."""
    if syscalls:
        inject = f"inject={SYSCALLS}:signal=KILL:when={number + 1}"
        code = in_child(operation.run, traced=inject)
    else:
        code = in_child(operation.run, kill_at(number))
    if code not in (0, -signal.SIGKILL):
        sys.exit(f"{operation.name}, call {number}: ended with {code}")
    return code != 0


def calls_of(operation: Operation, *, syscalls: bool) -> int:
    """How many calls there are to be killed at."""
    least, most = 0, 1
    while kill(operation, most, syscalls=syscalls):
        operation.reset()
        least, most = most, 2 * most
    while most - least > 1:
        operation.reset()
        middle = (least + most) // 2
        if kill(operation, middle, syscalls=syscalls):
            least = middle
        else:
            most = middle
    operation.reset()
    return most


def limit_files(size: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def sweep(operation: Operation, sample: int | None, *, syscalls: bool) -> dict[str, int]:
    total = calls_of(operation, syscalls=syscalls)
    count = total if sample is None else min(sample, total)
    numbers = sorted({round(i * (total - 1) / max(1, count - 1)) for i in range(count)})
    for number in numbers:
        if not kill(operation, number, syscalls=syscalls):
            sys.exit(f"{operation.name}: had {total} calls before, and now not {number}")
        operation.check(f"killed at call {number} of {total}")
        operation.reset()
    failed = 0
    for size in FILE_SIZES:
        code = in_child(operation.run, limit_files(size))
        if code not in (0, _FAILED):
            sys.exit(
                f"{operation.name}, files of at most {size} bytes: ended with {code}, not with an OSError"
            )
        failed += code == _FAILED
        operation.check(f"files of at most {size} bytes")
        operation.reset()
    assert failed, "no limit was small enough"
    return {"calls": total, "killed": len(numbers), "full": failed}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("operations", nargs="*", metavar="OPERATION", help=", ".join(OPERATIONS))
    parser.add_argument("--sample", type=int, metavar="N", help="kill each operation only so often")
    parser.add_argument("--syscalls", action="store_true", help="at every system call, with strace")
    parser.add_argument("--dir", type=Path, help="where to work (default: a temporary directory)")
    args = parser.parse_args()
    if unknown := set(args.operations) - set(OPERATIONS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; expected some of {', '.join(OPERATIONS)}")
    sys.dont_write_bytecode = True
    found = {}
    with tempfile.TemporaryDirectory(dir=args.dir) as work:
        pair = Path(work) / "pair"
        write_pair(pair, hidden=256, layers=8, intermediate=256, vocab=2048)
        build(str(pair / "target"), str(pair / "drafter"), pair / "bundle")
        for name in args.operations or OPERATIONS:
            begin = time.monotonic()
            operation = Operation(name, pair, Path(work) / name)
            found[name] = sweep(operation, args.sample, syscalls=args.syscalls)
            print(f"{name}: {found[name]}, {time.monotonic() - begin:.0f} s", flush=True)
    print(json.dumps({"syscalls": args.syscalls, "operations": found}))


if __name__ == "__main__":
    main()

"""Kill operations at every call that changes the file system, and check the remains.

    python -m build_scripts.soak.kill_sweep [OPERATION ...] [--sample N] [--dir DIR]

Operations: build, precision (a build that quantizes), replace (a build with --force over another bundle), quantize,
deploy. Each runs repeatedly in its own process. The process is killed (SIGKILL) at its first call that changes the
file system, then at its second, and so on. Further runs have a file size limit instead, which stands for a full disk.

After each run the place must hold the old directory, the complete new one, or nothing. Then the same operation must
succeed. It must leave the same result as an undisturbed one, and nothing beside it. (`deploy` may refuse if its
repository is complete.)

An audit hook sees the calls: opening for writing, creating, linking, renaming, removing, flushing. The last line is one
JSON document.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from build_scripts import harness
from dflash_trt.building.build import build
from dflash_trt.bundle.manifest import MANIFEST, Bundle
from dflash_trt.errors import DFlashError
from dflash_trt.formats.precision import Precision
from dflash_trt.quantization.convert import quantize
from dflash_trt.serving.deploy import deploy
from tests.doubles.checkpoints import make_drafter, make_target

CALLS = {
    *("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.utime"),
    *("os.chmod", "fcntl.flock"),
}
FILE_SIZES = (0, 100, 10_000, 200_000, 1_000_000)
_FAILED = 3  # exit code of an operation that met an OSError

Tree = dict[str, str]


class Operation:
    """One of OPERATIONS, in its own directory."""

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
        """Run it in this process."""
        if self.name == "quantize":
            quantize(self.pair / "target", self.out, "int4")
        elif self.name == "deploy":
            deploy(Bundle.open(self.pair / "bundle"), self.out, copy=True)
        elif self.name == "precision":
            self._build(precision=Precision(target="fp8", drafter="nvfp4", head="mxfp4"))
        else:
            self._build(force=self.name == "replace")

    def refused(self) -> None:
        """`deploy` never replaces a repository, not even its own."""
        try:
            self.run()
        except DFlashError:
            return
        raise AssertionError("was not refused")

    def _build(self, **options: Any) -> None:
        build(str(self.pair / "target"), str(self.pair / "drafter"), self.out, **options)

    def reset(self) -> None:
        """Bring the directory back to its state before."""
        shutil.rmtree(self.folder)
        self.folder.mkdir()
        if self.old:
            shutil.copytree(self.pair / "old", self.out)

    def check(self, moment: str) -> None:
        """Check the remains of an interruption, then the result of the same operation."""
        remains = tree(self.out) if self.out.exists() else {}
        if remains not in ({}, self.old, self.new):
            sys.exit(f"{self.name}, {moment}: {self.out} is neither old nor new: {sorted(remains)}")
        if MANIFEST in remains:
            Bundle.open(self.out, "full")
        code = in_child(self.refused if self.name == "deploy" and remains == self.new else self.run)
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


def in_child(run: Callable[[], None], prepare: Callable[[], None] | None = None) -> int:
    """Exit code of `run` in a fork of this process; negative is a signal."""
    child = os.fork()
    if not child:
        code = 1
        try:
            if prepare:
                prepare()
            run()
            code = 0
        except BaseException as error:
            # A place that cannot be written is named in an error of the package, whose cause is the system's.
            if isinstance(error, OSError) or isinstance(error.__cause__, OSError):
                code = _FAILED
            else:
                traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def on_call(call: Callable[[], None]) -> None:
    """Call `call` before each call of this process that changes the file system."""
    flush = os.fsync

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and bool((arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        if writes or event in CALLS:
            call()

    def fsync(descriptor: int) -> None:
        call()
        flush(descriptor)

    os.fsync = fsync  # type: ignore[assignment]
    sys.addaudithook(hook)


def count_calls(operation: Operation) -> int:
    """The calls of an undisturbed run, each of which can be a kill point."""
    with tempfile.NamedTemporaryFile() as log:

        def note() -> None:
            os.write(log.fileno(), b".")

        code = in_child(operation.run, lambda: on_call(note))
        count = Path(log.name).stat().st_size
    if code or not count:
        sys.exit(f"{operation.name}: ended with {code}, after {count} calls")
    operation.reset()
    return count


def killer(number: int) -> Callable[[], None]:
    """A function that ends this process the `number`-th time it is called."""
    left = number

    def call() -> None:
        nonlocal left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

    return call


def limit_files(size: int) -> Callable[[], None]:
    """A function that limits the size of files that this process writes."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def spread(count: int, sample: int | None) -> list[int]:
    """Evenly spread indices of `count` things, with the first and the last; all of them without a sample."""
    chosen = count if sample is None else min(sample, count)
    return sorted({round(i * (count - 1) / max(1, chosen - 1)) for i in range(chosen)})


def sweep(operation: Operation, sample: int | None) -> dict[str, int]:
    """Interrupt an operation everywhere. Returns how often."""
    calls = count_calls(operation)
    chosen = spread(calls, sample)
    for number in (i + 1 for i in chosen):
        code = in_child(operation.run, lambda number=number: on_call(killer(number)))  # type: ignore[misc]
        if code != -signal.SIGKILL:
            sys.exit(f"{operation.name}: ended with {code} before call {number}")
        operation.check(f"killed at call {number} of {calls}")
        operation.reset()
    failed = 0
    for size in (FILE_SIZES[i] for i in spread(len(FILE_SIZES), sample)):
        code = in_child(operation.run, limit_files(size))
        if code not in (0, _FAILED):
            sys.exit(
                f"{operation.name}, files of at most {size} bytes: ended with {code}, not with an OSError"
            )
        failed += code == _FAILED
        operation.check(f"files of at most {size} bytes")
        operation.reset()
    assert failed, "no limit was small enough"
    return {"calls": calls, "killed": len(chosen), "full": failed}


def main() -> None:
    """Sweep the operations."""
    parser = harness.parser(__doc__)
    parser.add_argument("operations", nargs="*", metavar="OPERATION", help=", ".join(OPERATIONS))
    parser.add_argument(
        "--sample", type=int, metavar="N", help="number of kills and of limits per operation (default: all)"
    )
    parser.add_argument("--dir", type=Path, help="working directory (default: a temporary directory)")
    args = parser.parse_args()
    if unknown := set(args.operations) - set(OPERATIONS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; expected some of {', '.join(OPERATIONS)}")
    sys.dont_write_bytecode = True
    results = {}
    with tempfile.TemporaryDirectory(dir=args.dir) as work:
        pair = Path(work) / "pair"
        make_drafter(pair / "drafter", make_target(pair / "target"), block_size=16)
        build(str(pair / "target"), str(pair / "drafter"), pair / "bundle")
        for name in args.operations or OPERATIONS:
            begin = time.monotonic()
            operation = Operation(name, pair, Path(work) / name)
            results[name] = sweep(operation, args.sample)
            print(f"{name}: {results[name]}, {time.monotonic() - begin:.0f} s", flush=True)
    print(json.dumps({"operations": results}))


if __name__ == "__main__":
    main()

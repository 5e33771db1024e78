"""Kill operations at calls that change the file system, or let their disk be full, and check the remains.

    python -m tests.bundle.kill_sweep DIR SAMPLE OPERATION ...

Each operation runs repeatedly in a fork: it is killed (SIGKILL) at its first call that changes the file system, at its
last, and at others between them, SAMPLE in all. Further runs have a file size limit, which stands for a full disk. An
audit hook sees the calls: opening for writing, creating, linking, renaming, removing, flushing.

After each run the place must hold the old directory, the complete new one, or nothing. Then the same operation must
succeed, leave what an undisturbed one leaves, and nothing beside it. (`deploy` may refuse if its repository is
complete.) The last line is one JSON document: by operation how many runs were killed, and how many met a full disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

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
FAILED = 3  # exit code of an operation that met an OSError

Tree = dict[str, str]


def tree(folder: Path) -> Tree:
    """Every file and directory with its digest."""
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() if p.is_file() else ""
        for p in folder.rglob("*")
    }


class Operation:
    """One operation, whose result is `folder`/out."""

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

    def _build(self, **options: Any) -> None:
        build(str(self.pair / "target"), str(self.pair / "drafter"), self.out, **options)

    def run(self) -> None:
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

    def reset(self) -> None:
        """Bring the directory back to its state before."""
        shutil.rmtree(self.folder)
        self.folder.mkdir()
        if self.old:
            shutil.copytree(self.pair / "old", self.out)

    def check(self, moment: str) -> None:
        """The remains of an interruption, then the result of the same operation."""
        moment = f"{self.name}, {moment}"
        remains = tree(self.out) if self.out.exists() else {}
        assert remains in ({}, self.old, self.new), f"{moment}: neither old nor new: {sorted(remains)}"
        if MANIFEST in remains:
            Bundle.open(self.out, "full")
        again = self.refused if self.name == "deploy" and remains == self.new else self.run
        assert in_child(again) == 0, f"{moment}: does not run again; {sorted(tree(self.folder))}"
        assert tree(self.out) == self.new, f"{moment}: again, something else: {sorted(tree(self.out))}"
        assert [*self.folder.iterdir()] == [self.out], f"{moment}: leaves {[*self.folder.iterdir()]}"
        self.reset()


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
                code = FAILED
            else:
                traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def on_call(call: Callable[[], object]) -> None:
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


def count_calls(operation: Operation, log: Path) -> int:
    """The calls of an undisturbed run, each of which can be a kill point."""
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    assert in_child(operation.run, lambda: on_call(partial(os.write, descriptor, b"."))) == 0
    os.close(descriptor)
    operation.reset()
    return log.stat().st_size


def kill_at(number: int) -> None:
    """End this process at its `number`-th call that changes the file system."""
    left = iter(range(number - 1))
    on_call(lambda: next(left, None) is None and os.kill(os.getpid(), signal.SIGKILL))


def spread(count: int, sample: int) -> list[int]:
    """Evenly spread indices of `count` things, with the first and the last."""
    return sorted({round(i * (count - 1) / (sample - 1)) for i in range(sample)})


def sweep(operation: Operation, sample: int) -> dict[str, int]:
    calls = count_calls(operation, operation.folder.with_name("calls"))
    chosen = [i + 1 for i in spread(calls, sample)]
    for number in chosen:
        code = in_child(operation.run, partial(kill_at, number))
        assert code == -signal.SIGKILL, f"{operation.name}: ended with {code} before call {number}"
        operation.check(f"killed at call {number} of {calls}")
    full = 0
    for size in (FILE_SIZES[i] for i in spread(len(FILE_SIZES), sample)):
        code = in_child(operation.run, partial(resource.setrlimit, resource.RLIMIT_FSIZE, (size, size)))
        assert code in (0, FAILED), f"{operation.name}, files of at most {size} bytes: ended with {code}"
        full += code == FAILED
        operation.check(f"files of at most {size} bytes")
    return {"killed": len(chosen), "full": full}


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    work, number, *names = sys.argv[1:]
    pair = Path(work) / "pair"
    make_drafter(pair / "drafter", make_target(pair / "target"), block_size=16)
    build(str(pair / "target"), str(pair / "drafter"), pair / "bundle")
    print(json.dumps({name: sweep(Operation(name, pair, Path(work) / name), int(number)) for name in names}))

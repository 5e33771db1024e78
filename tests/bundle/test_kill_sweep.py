"""Operations that are killed at calls that change the file system, or whose disk is full, and their remains.

Each operation runs in forks: one is killed (SIGKILL) at its first such call, one at its last, one between them. Others
have a file size limit, which stands for a full disk. An audit hook sees the calls. After each run the place must hold
the old directory, the complete new one, or nothing. Then the same operation must succeed, leave what an undisturbed one
leaves, and nothing beside it.
"""

from __future__ import annotations

import hashlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.building.build import build
from dflash_trt.bundle.manifest import MANIFEST, Bundle
from dflash_trt.errors import DFlashError
from dflash_trt.quantization.convert import quantize
from dflash_trt.serving.deploy import deploy
from tests.doubles.checkpoints import make_drafter, make_target

CALLS = {
    *("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.utime"),
    *("os.chmod", "fcntl.flock"),
}
FAILED = 3  # exit code of an operation that met an OSError
PAIR, OUT = Path("pair"), Path("place/out")
OPERATIONS: dict[str, Callable[[], object]] = {
    "replace": lambda: build(f"{PAIR}/target", f"{PAIR}/drafter", OUT, force=True),
    "quantize": lambda: quantize(PAIR / "target", OUT, "int4"),
    "deploy": lambda: deploy(Bundle.open(PAIR / "bundle"), OUT, copy=True),
}


def test_what_is_killed_or_meets_a_full_disk_leaves_old_or_new_or_nothing(tmp_path: Path) -> None:
    """In a process without torch's threads, because it forks."""
    root = Path(__file__).parents[2]
    command, environment = ([sys.executable, "-m", "tests.bundle.test_kill_sweep"], {"PYTHONPATH": str(root)})
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "3 killed, some full\n" * len(OPERATIONS)), done.stderr


def tree(folder: Path) -> dict[str, str]:
    """Every file and directory with its digest."""
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() if p.is_file() else ""
        for p in (folder.rglob("*") if folder.exists() else ())
    }


def in_child(run: Callable[[], object], prepare: Callable[[], object] = bool) -> int:
    """Exit code of `run` in a fork of this process; negative is a signal."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        prepare()
        run()
        code = 0
    except BaseException as error:
        # A place that cannot be written is named in an error of the package, whose cause is the system's.
        code = FAILED if isinstance(error, OSError) or isinstance(error.__cause__, OSError) else 1
        if code == 1:
            traceback.print_exc()
    finally:
        os._exit(code)


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

    os.fsync = fsync
    sys.addaudithook(hook)


def kill_at(number: int) -> None:
    """End this process at its `number`-th call that changes the file system."""
    left = iter(range(number - 1))
    on_call(lambda: next(left, None) is None and os.kill(os.getpid(), signal.SIGKILL))


def sweep(name: str) -> None:
    run, old = OPERATIONS[name], tree(PAIR / "old") if name == "replace" else {}

    def reset() -> None:
        shutil.rmtree(OUT.parent, ignore_errors=True)
        OUT.parent.mkdir()
        if old:
            shutil.copytree(PAIR / "old", OUT)

    reset()
    log = os.open(f"calls-{name}", os.O_CREAT | os.O_WRONLY)
    assert in_child(run, lambda: on_call(partial(os.write, log, b"."))) == 0
    calls, new = os.fstat(log).st_size, tree(OUT)
    assert new != old

    def check(moment: str) -> None:
        remains = tree(OUT)
        assert remains in ({}, old, new), f"{moment}: neither old nor new: {sorted(remains)}"
        if MANIFEST in remains:
            Bundle.open(OUT, "full")
        if remains == new and name != "replace":  # neither replaces its own result
            with pytest.raises(DFlashError):
                run()
        else:
            assert in_child(run) == 0, f"{moment}: does not run again; {sorted(tree(OUT.parent))}"
        assert tree(OUT) == new, f"{moment}: again, something else: {sorted(tree(OUT))}"
        assert [*OUT.parent.iterdir()] == [OUT], f"{moment}: leaves {[*OUT.parent.iterdir()]}"

    for number in (1, calls // 2, calls):
        reset()
        assert in_child(run, partial(kill_at, number)) == -signal.SIGKILL
        check(f"killed at call {number} of {calls}")
    full = 0
    for size in (0, 1_000_000):
        reset()
        code = in_child(run, partial(resource.setrlimit, resource.RLIMIT_FSIZE, (size, size)))
        assert code in (0, FAILED), f"files of at most {size} bytes: ended with {code}"
        full += code == FAILED
        check(f"files of at most {size} bytes")
    print(f"3 killed, {'some' if full else 'none'} full")


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    make_drafter(PAIR / "drafter", make_target(PAIR / "target"), block_size=16)
    build(f"{PAIR}/target", f"{PAIR}/drafter", PAIR / "bundle")
    build(f"{PAIR}/target", f"{PAIR}/drafter", PAIR / "old", block_size=8)
    for each in OPERATIONS:
        sweep(each)

"""Runs a command, and notes which addresses it and its children send to and which files they make.

Linux stops them at these system calls and asks this process (seccomp's SECCOMP_RET_USER_NOTIF). It needs no privileges
and no tools. Addresses that are not of this machine are refused, and so is every DNS server. Sockets below /run are
refused silently, because a local resolver may listen there: the C library then asks the DNS server itself.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import ipaddress
import os
import platform
import select
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_PIDFD_GETFD = 438
_RECEIVE, _ANSWER, _ADD_DESCRIPTOR = 0xC0502100, 0xC0182101, 8
_NOTIFICATION, _CALL = "=QII", "=iIQ6Q"
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
# Numbers of the calls that are watched. None stands for a call that the machine lacks.
_CALLS: Mapping[str, Mapping[str, int]] = {
    "x86_64": {
        "audit": 0xC000003E, "seccomp": 317, "connect": 42, "sendto": 44, "sendmsg": 46, "sendmmsg": 307,
        "open": 2, "openat": 257, "creat": 85, "mkdir": 83, "mkdirat": 258,
    },
    "aarch64": {
        "audit": 0xC00000B7, "seccomp": 277, "connect": 203, "sendto": 206, "sendmsg": 211, "sendmmsg": 269,
        "openat": 56, "mkdirat": 34,
    },
}  # fmt: skip
# Watched only if these bits of an argument are set: the address of `sendto`, the flags of `open`.
_ONLY_IF = {"sendto": (4, 0xFFFFFFFF), "open": (1, _WRITES), "openat": (2, _WRITES)}


def available() -> bool:
    """Whether this system can watch commands."""
    actions = Path("/proc/sys/kernel/seccomp/actions_avail")
    return platform.machine() in _CALLS and actions.exists() and "user_notif" in actions.read_text().split()


@dataclass
class Watch:
    """A command and what was seen of it. `sent`: addresses outside of this machine, and DNS servers. `made`: absolute
    paths of files opened for writing, and of directories."""

    process: subprocess.Popen[str]
    sent: list[str] = field(default_factory=list)
    made: set[Path] = field(default_factory=set)


@contextmanager
def watched(command: list[str], environment: Mapping[str, str], cwd: Path) -> Iterator[Watch]:
    """Start a command under watch. At the end it and its children must have ended."""
    ours, theirs = os.pipe(), os.pipe()
    launcher = [sys.executable, "-I", "-S", __file__, str(ours[1]), str(theirs[0]), *command]
    process = subprocess.Popen(
        launcher, env=environment, cwd=cwd, text=True, pass_fds=(ours[1], theirs[0]), encoding="utf-8",
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    os.close(ours[1])
    os.close(theirs[0])
    with open(ours[0], "rb") as answer, open(theirs[1], "wb") as go:
        number = int(answer.readline() or b"-1")
        assert number >= 0, process.communicate()[0]
        pidfd = os.pidfd_open(process.pid)
        listener = _libc.syscall(_PIDFD_GETFD, pidfd, number, 0)
        os.close(pidfd)
        assert listener >= 0, os.strerror(ctypes.get_errno())
        go.write(b"\n")
    watch = Watch(process)
    thread = threading.Thread(target=_attend, args=(listener, watch), daemon=True)
    thread.start()
    try:
        yield watch
    except BaseException:
        process.kill()
        raise
    finally:
        process.wait()
        thread.join(30)  # it ends with the last child
        assert not thread.is_alive(), "a child has outlived the command"
        os.close(listener)


def _attend(listener: int, watch: Watch) -> None:
    """Answer every watched call until no process is left."""
    names = {number: name for name, number in _CALLS[platform.machine()].items()}
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    while not poll.poll()[0][1] & select.POLLHUP:
        notification = bytearray(80)
        try:
            fcntl.ioctl(listener, _RECEIVE, notification, True)
        except OSError:  # a signal ended the call
            continue
        key, task, _ = struct.unpack_from(_NOTIFICATION, notification)
        number, _, _, *arguments = struct.unpack_from(_CALL, notification, struct.calcsize(_NOTIFICATION))
        try:
            refused = _judge(watch, task, names[number], arguments)
        except OSError:  # the process has ended
            refused = 0
        answer = struct.pack("=QqiI", key, 0, -refused, 0 if refused else 1)
        try:
            fcntl.ioctl(listener, _ANSWER, bytearray(answer), True)
        except OSError:
            continue


def _judge(watch: Watch, task: int, name: str, arguments: list[int]) -> int:
    """Note a call. Returns the error to refuse it with, or 0."""
    with open(f"/proc/{task}/mem", "rb", 0) as memory:

        def read(address: int, size: int) -> bytes:
            return os.pread(memory.fileno(), size, address)

        if name in ("connect", "sendto"):
            pointer, size = arguments[1:3] if name == "connect" else arguments[4:6]
            return _address(watch, read(pointer, min(size, 128)))
        if name in ("sendmsg", "sendmmsg"):
            pointer, size = struct.unpack("=QI", read(arguments[1], 12))  # of the first message
            return _address(watch, read(pointer, min(size, 128))) if pointer else 0
        directory, place = (arguments[0], arguments[1]) if name.endswith("at") else (None, arguments[0])
        path = read(place, 4096).split(b"\0")[0].decode("utf-8", "surrogateescape")
    at = None if directory is None else ctypes.c_int(directory & 0xFFFFFFFF).value
    base = os.readlink(f"/proc/{task}/cwd" if at is None or at < 0 else f"/proc/{task}/fd/{at}")
    watch.made.add(Path(os.path.normpath(os.path.join(base, path))))
    return 0


def _address(watch: Watch, address: bytes) -> int:
    (family,) = struct.unpack_from("=H", address)
    if family == 1:  # Unix
        return errno.ENOENT if address[2:].startswith((b"/run/", b"/var/run/")) else 0
    if family not in (2, 10):  # none, or the kernel's own (netlink)
        return 0
    (port,) = struct.unpack_from(">H", address, 2)
    host = ipaddress.ip_address(address[4:8] if family == 2 else address[8:24])
    host = getattr(host, "ipv4_mapped", None) or host
    if host.is_loopback and port != 53:
        return 0
    watch.sent.append(f"{host} port {port}")
    return errno.ENETUNREACH


def _program(calls: Mapping[str, int]) -> bytes:
    """The filter in BPF: the watched calls are reported, all others allowed."""
    load, equal, bits, end = 0x20, 0x15, 0x45, 0x06
    report, allow = 0x7FC00000, 0x7FFF0000
    steps = [(load, 0, 0, 4), (equal, 1, 0, calls["audit"]), (end, 0, 0, allow)]
    for name, number in calls.items():
        if name in ("audit", "seccomp"):
            continue
        argument, mask = _ONLY_IF.get(name, (None, 0))
        more = [] if argument is None else [(load, 0, 0, 16 + 8 * argument), (bits, 0, 1, mask)]
        steps += [(load, 0, 0, 0), (equal, 0, len(more) + 1, number), *more, (end, 0, 0, report)]
    steps.append((end, 0, 0, allow))
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def _launch(ours: int, theirs: int, command: list[str]) -> None:
    """In the new process: watch it from now on, wait until somebody attends, and become the command."""
    calls = _CALLS[platform.machine()]
    code = _program(calls)
    held = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(code) // 8, ctypes.addressof(held))
    _libc.prctl(38, 1, 0, 0, 0)  # no new privileges
    listener = _libc.syscall(calls["seccomp"], 1, _ADD_DESCRIPTOR, program)
    if listener < 0:
        sys.exit(f"seccomp: {os.strerror(ctypes.get_errno())}")
    os.write(ours, b"%d\n" % listener)
    os.read(theirs, 1)
    for number in (listener, ours, theirs):
        os.close(number)
    os.execvp(command[0], command)


if __name__ == "__main__":
    _launch(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])

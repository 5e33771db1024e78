"""Triton contacts no other machine and writes only what SECURITY.md lists, as the commands of tests/test_privacy.py."""

from __future__ import annotations

import json
import os
import signal
import sys
import urllib.request
from pathlib import Path

import pytest

from server_tests.serving import free_ports
from tests.doubles.watched import available, watched

ROOT = Path(__file__).parent.parent
PLACES = ("/tmp/python_env_", "/dev/shm/dflash_trt_", "/var/log/nv-hostengine.log")


@pytest.mark.skipif(not available(), reason="needs Linux with seccomp's user notifications")
def test_triton_sends_nothing_and_writes_only_what_is_listed(
    bundles: dict[str, Path], tmp_path: Path
) -> None:
    home, temporary, work = (tmp_path / name for name in ("home", "tmp", "work"))
    for folder in (home, temporary, work):
        folder.mkdir()
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= {"HOME": str(home), "TMPDIR": str(temporary)}
    http, grpc, metrics = free_ports(3)
    ports = [f"--port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}"]
    command = [sys.executable, "-m", "dflash_trt", "serve", str(bundles["tiny"]), "--api=triton", *ports]
    with watched(command, environment, work) as watch:
        assert watch.process.stdout is not None
        log = ""
        while "\nmetrics " not in log:
            line = watch.process.stdout.readline()
            assert line, log
            log += line
        body = json.dumps({"text_input": "hi", "max_tokens": 4}).encode()
        url = f"http://127.0.0.1:{http}/v2/models/dflash/generate"
        post = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(post, timeout=60) as answer:
            assert answer.status == 200
        watch.process.send_signal(signal.SIGTERM)
        log += watch.process.communicate(timeout=120)[0]
    assert watch.process.returncode == 0, log
    assert watch.sent == []
    listed = (ROOT / "SECURITY.md").read_text()
    assert [place for place in PLACES if f"`{place}" not in listed] == []
    cache = home / ".cache/dflash-trt"
    known = (*PLACES, "/dev/null", "/dev/tty", f"{temporary}/", f"{cache}/pass-times")
    folders = {str(cache.parent), str(cache)}  # made on the way
    assert [path for path in {*map(str, watch.made)} - folders if not path.startswith(known)] == []
    assert {path.relative_to(home).parts[:3] for path in home.rglob("*") if path.is_file()} <= {
        (".cache", "dflash-trt", "pass-times")
    }
    assert [*temporary.iterdir(), *work.iterdir()] == []

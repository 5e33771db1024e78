"""How tritonserver is found, started and closed to others."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.cli import main
from dflash_trt.engines.packages import TRITON_IMAGE
from dflash_trt.errors import DFlashError, UsageError
from dflash_trt.serving.launch import Addresses, TritonServer, find_server, server_arguments


def test_the_server_on_the_path_is_taken_and_without_one_the_container_is_told(
    bundle, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "pytriton", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert find_server(tmp_path / "work") is None
    assert main(["serve", str(bundle), "--api", "triton"]) == 1
    out, err = capsys.readouterr()
    assert "nvidia-pytriton" in err
    assert "\ndocker run " in out
    assert f'-v "{bundle.resolve()}:/bundle:ro"' in out
    assert "dflash-trt serve /bundle" in out
    assert f"nvcr.io/nvidia/tritonserver:{TRITON_IMAGE} " in out
    server = tmp_path / "tritonserver"
    server.write_text("")
    server.chmod(0o755)
    chosen = find_server(tmp_path / "work")
    assert chosen is not None
    assert (chosen.command, chosen.environment) == ([str(server)], {})


ADDRESSES = Addresses("127.0.0.1", {"http": 8000, "grpc": 8001, "metrics": 8002})


@pytest.mark.parametrize(
    "option",
    [
        "--model-repository=x", "--http-address", "--model-control-mode=explicit", "--model-repo=x",
        "--allow-http=false",
    ],
)  # fmt: skip
def test_options_of_tritonserver_come_last_but_not_those_that_serve_sets(option: str) -> None:
    own = ["--log-format", "ISO8601", "--http-thread-count=4", "--http-restricted-api=inference:key=value"]
    plain = server_arguments(Path("repository"), ADDRESSES, "warning", 30)
    given = server_arguments(Path("repository"), ADDRESSES, "warning", 30, own)
    assert given[len(plain) :] == own
    assert [a.partition("=")[0] for a in given[: len(plain)]] == [a.partition("=")[0] for a in plain]
    with pytest.raises(UsageError, match=option.partition("=")[0]):
        server_arguments(Path("repository"), ADDRESSES, "warning", 30, [option])


def test_tritonserver_is_closed_and_listens_where_it_is_told() -> None:
    def arguments(level: Any, host: str = "127.0.0.1") -> dict[str, str]:
        given = server_arguments(Path("r"), Addresses(host, ADDRESSES.ports), level, 30)
        return dict(argument.removeprefix("--").split("=", 1) for argument in given)

    closed = arguments("info")
    assert closed["model-control-mode"] == "none"
    assert (closed["allow-sagemaker"], closed["allow-vertex-ai"]) == ("false", "false")
    keys = {closed[option] for option in ("http-restricted-api", "grpc-restricted-protocol")}
    assert len(keys) == 1
    assert keys != {arguments("info")["http-restricted-api"]}  # a key of each start
    assert keys.pop().startswith("model-repository,shared-memory,trace,logging:dflash-key=")
    for host, http, grpc in (("127.0.0.1",) * 3, ("::1", "ipv6:::1", "[::1]")):
        given = arguments("info", host)
        assert [given[f"{name}-address"] for name in ("http", "metrics", "grpc")] == [http, http, grpc]
    for level, shown in (("error", 0), ("warning", 1), ("info", 2), ("debug", 3)):
        logs = [value for name, value in arguments(level).items() if name.startswith("log")]
        assert logs == [str(int(shown > 2)), str(shown > 1).lower(), str(shown > 0).lower()]


@pytest.mark.parametrize(
    ("says", "told"),
    [
        ("--model-repository\n--http-restricted-api <x>\n--grpc-restricted-protocol <x>\n", None),
        ("--model-repository\n--grpc-restricted-protocol <x>\n", "no --http-restricted-api.*24.10"),
        ("--model-repository\n--http-restricted-api <x>\n", "no --grpc-restricted-protocol.*24.10"),
        ("libdcgm.so is missing", "does not start: libdcgm.so is missing"),
    ],
)
def test_a_tritonserver_that_cannot_be_closed_is_refused(tmp_path: Path, says: str, told: str | None) -> None:
    program = tmp_path / "tritonserver"
    program.write_text(f"#!/bin/sh\n[ $1 = --help ] && cat <<'END' >&2\n{says}\nEND\n")
    program.chmod(0o755)
    if told is None:
        TritonServer([str(program)]).check()
    else:
        with pytest.raises(DFlashError, match=told):
            TritonServer([str(program)]).check()

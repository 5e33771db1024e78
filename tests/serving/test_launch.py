"""The arguments of tritonserver, and the user's own among them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_trt.cli import main
from dflash_trt.errors import DFlashError
from dflash_trt.serving.launch import server_arguments
from dflash_trt.serving.proxy_settings import Sockets


def test_the_user_s_options_come_last() -> None:
    sockets, own = Sockets(Path("/tmp")), ["--log-format", "ISO8601", "--http-thread-count=4"]
    plain = server_arguments(Path("repository"), sockets, "warning")
    assert server_arguments(Path("repository"), sockets, "warning", own) == [*plain, *own]


@pytest.mark.parametrize(
    "option",
    ["--model-repository=x", "--http-address", "--load-model=y", "--model-repo=x", "--allow-http=false"],
)
def test_options_that_serve_sets_are_refused(option: str) -> None:
    name = option.partition("=")[0]
    with pytest.raises(DFlashError, match=f"{name}: is set by"):
        server_arguments(Path("repository"), Sockets(Path("/tmp")), "warning", [option])


def test_only_serve_passes_options_on(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--", "--log-format=x"])
    assert ended.value.code == 2
    assert "unknown argument '--log-format=x'" in capsys.readouterr().err

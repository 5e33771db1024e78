"""One server for all clients, and the environments of the clients.

`make clients` makes them. Each has one client alone, in the versions of requirements/clients/. A client runs as a
process of its environment. It prints one JSON document. The tests compare that with the API of Python.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.serving.openai.conftest import Server, llm, server, tiny

__all__ = ["llm", "server", "tiny"]  # the fixtures
FOLDER = Path(__file__).parent
ENVIRONMENTS = Path(os.environ.get("CLIENTS", FOLDER.parent / ".venv-clients"))
SECONDS = 600.0

Run = Callable[..., Any]


def environment(name: str) -> Path:
    """The programs of a client's environment. Skips the test where it does not exist."""
    programs = ENVIRONMENTS / name / "bin"
    if not (programs / "python").exists():
        pytest.skip(f"there is no environment of {name}; make clients makes it")
    return programs


def printed(*command: str | Path, text: str = "", offline: bool = True) -> str:
    """The output of a client. It sees nothing of this package, no proxy, and no model hub unless `offline` is false."""
    keep = {name: value for name, value in os.environ.items() if not name.upper().endswith("_PROXY")}
    keep.pop("PYTHONPATH", None)
    if offline:
        keep |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=SECONDS, env=keep)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


@pytest.fixture
def client(server: Server) -> Run:
    """Run a client's script, and read the JSON document on its last line."""

    def run(name: str, *arguments: str) -> Any:
        script = FOLDER / "clients" / f"{name}.py"
        out = printed(environment(name) / "python", "-I", script, f"{server.url}/v1", *arguments)
        return json.loads(out.splitlines()[-1])

    return run

"""`dflash-trt serve` with passes that sleep, as the passes of a GPU leave the cores to the server.

    PASS_MS=10 python build_scripts/bench/sleeping_passes.py serve BUNDLE [options of dflash-trt serve]

A pass of the target takes PASS_MS milliseconds, and a pass of the drafter a fifth of it. Nothing is computed: all
outputs are 0, so a greedy request gets the token 0 again and again. `build_scripts.bench.openai_server --pass-ms`
measures with it.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from typing import Any

DRAFTER_SHARE = 0.2


class _Sleep:
    """In place of a session of ONNX Runtime: takes its bindings, and sleeps."""

    def __init__(self, session: Any, seconds: float) -> None:
        self._session, self._seconds = session, seconds

    def run_with_iobinding(self, binding: Any, options: Any = None) -> None:
        time.sleep(self._seconds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


def install(milliseconds: float) -> None:
    """Let the passes of every engine of ONNX Runtime that this process loads from now on sleep."""
    from dflash_trt.engines.onnxruntime.engine import OnnxRuntimeEngine

    patched: Any = OnnxRuntimeEngine
    load = patched._load

    def load_and_sleep(engine: Any) -> None:
        load(engine)
        share = DRAFTER_SHARE if "drafter" in engine._path.name else 1.0
        engine._session = _Sleep(engine._session, share * milliseconds / 1e3)

    patched._load = load_and_sleep


def main() -> int:
    """Run the server, or its worker, with passes that sleep."""
    role, *arguments = sys.argv[1:]
    install(float(os.environ["PASS_MS"]))
    if role == "worker":
        sys.argv = [sys.argv[0], *arguments]
        runpy.run_module("dflash_trt.serving.worker", run_name="__main__")
        return 0
    from dflash_trt.cli import main as dflash_trt
    from dflash_trt.serving import wire

    wire.WORKER = (__file__, "worker")
    return dflash_trt([role, *arguments])


if __name__ == "__main__":
    raise SystemExit(main())

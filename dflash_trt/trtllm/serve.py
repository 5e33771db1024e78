"""`trtllm-serve` over a bundle: TensorRT-LLM's own server, with OpenAI's API."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import NoReturn

from dflash_trt.bundle import Bundle
from dflash_trt.errors import DFlashError


def serve(path: str | Path, *, host: str, port: int) -> NoReturn:
    """Become the server: the bundle's launch/serve.sh in place of this process, so that signals reach it.

    Raises:
        DFlashError: the bundle is for another engine, is for several nodes, or there is no trtllm-serve.
    """
    bundle = Bundle.open(path)
    manifest = bundle.manifest
    if manifest["engine"] != "tensorrt-llm":
        raise DFlashError(
            f"{path}: is a bundle for {manifest['engine']}, but trtllm-serve takes those for tensorrt-llm; serve it "
            "with Triton"
        )
    if manifest["weights"] == "none":
        raise DFlashError(f"{path}: was built with --weights none and cannot run; build it with its weights")
    nodes = manifest["tensorrt_llm"]["nodes"]
    if nodes > 1:
        raise DFlashError(
            f"{path}: is for {nodes} nodes; start {bundle.path / 'launch'}/mpi.sh or slurm.sbatch instead"
        )
    if shutil.which("trtllm-serve") is None:
        raise DFlashError(
            f"there is no trtllm-serve on the PATH; install tensorrt_llm {manifest['tensorrt_llm']['version']}, or "
            f"serve in a container: PORT={port} {bundle.path / 'launch' / 'container.sh'}"
        )
    script = str((bundle.path / "launch" / "serve.sh").resolve())
    os.execve(script, [script], {**os.environ, "HOST": host, "PORT": str(port)})

"""`trtllm-serve` over a bundle: TensorRT-LLM's own server, with OpenAI's API."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import NoReturn

from dflash_trt.bundle.manifest import Bundle
from dflash_trt.errors import DFlashError
from dflash_trt.trtllm.attention import usable
from dflash_trt.trtllm.installed import read_llm_args
from dflash_trt.trtllm.releases import find_release


def serve(bundle: Bundle, *, host: str, port: int) -> NoReturn:
    """Become the server, in place of this process, so that signals reach it. Nothing of the bundle is executed.

    Raises:
        DFlashError: the bundle is for several nodes, or asks for code of its own to be run; or there is no
            trtllm-serve.
    """
    path, manifest = bundle.path, bundle.manifest
    if manifest["weights"] == "none":
        raise DFlashError(f"{path}: was built with --weights none and cannot run; build it with its weights")
    nodes = manifest["tensorrt_llm"]["nodes"]
    if nodes > 1:
        raise DFlashError(f"{path}: is for {nodes} nodes; start it under MPI or Slurm (docs/tensorrt_llm.md)")
    read_llm_args(bundle)
    if shutil.which("trtllm-serve") is None:
        release = find_release(manifest["tensorrt_llm"]["version"])
        raise DFlashError(
            f"there is no trtllm-serve on the PATH; install tensorrt_llm {release.version}, or serve in a container: "
            "docker run --rm --ipc host --gpus all --ulimit memlock=-1 --ulimit stack=67108864 "
            f"--publish {host}:{port}:8000 --volume {bundle.path.resolve()}:/bundle:ro --workdir /bundle "
            f"{release.container} {' '.join(_command('0.0.0.0', 8000))}"
        )
    os.chdir(bundle.path)
    try:
        command = _command(host, port, usable(Path("llm_args.yaml")))
    except ValueError as error:
        raise DFlashError(f"{path}: {error}") from None
    os.execvp(command[0], command)


def _command(host: str, port: int, file: Path = Path("llm_args.yaml")) -> list[str]:
    """trtllm-serve, as launch/serve.sh starts it by hand, in the bundle's directory."""
    return ["trtllm-serve", "./target", "--host", host, "--port", str(port), "--config", str(file)]

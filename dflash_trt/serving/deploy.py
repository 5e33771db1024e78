"""Writes a Triton model repository that serves a bundle."""

from __future__ import annotations

import shutil
from pathlib import Path
from string import Template

from dflash_trt.bundle.manifest import Bundle
from dflash_trt.bundle.workspace import workspace
from dflash_trt.errors import DFlashError, RequestError

MODEL = "dflash"
_PACKAGE = Path(__file__).resolve().parent.parent


def deploy(
    bundle: str | Path,
    out: Path,
    *,
    copy: bool = False,
    python: str = "",
    max_batch_size: int = 8,
    max_queue: int = 256,
    block_length: int | None = None,
    stream_interval_ms: int = 50,
    threads: int | None = None,
) -> Path:
    """Write the models `dflash` and `ensemble` into the directory `out`, which must not exist or be empty.

    It appears when it is whole.

    copy: whether the repository holds the bundle itself (to be taken elsewhere), or a link to it.
    python: the interpreter that runs the engine; "" is the one that Triton's Python backend runs.
    stream_interval_ms: `AsyncLLM`'s stream_interval, in milliseconds. The rest are `AsyncLLM`'s.

    Returns `out`. Raises DFlashError: the bundle is not whole, a setting is out of range, or `out` is taken.
    """
    opened = Bundle.open(bundle)
    numbers = {"max_batch_size": (max_batch_size, 1), "max_queue": (max_queue, 0)}
    numbers["stream_interval_ms"] = (stream_interval_ms, 0)
    for name, (value, least) in numbers.items():
        if value < least:
            raise DFlashError(f"{name} is {value}, expected {least} or more")
    block_size = opened.manifest["block_size"]
    if block_length is not None and not 1 <= block_length <= block_size:
        raise RequestError(
            f"block_length is {block_length}, expected 1..{block_size} (this bundle's block size)"
        )
    settings = {
        "bundle": "bundle",
        "python": python,
        "max_batch_size": max_batch_size,
        "max_queue": max_queue,
        "block_length": block_length or "auto",
        "stream_interval_ms": stream_interval_ms,
        "threads": threads or "",
    }
    source = template()
    with workspace(out, "repository") as place:
        place.empty()
        place.check_free("is there already")
        version = place.path / MODEL / "1"
        version.mkdir(parents=True)
        (place.path / "ensemble" / "1").mkdir(parents=True)  # Triton wants a version, though it is empty
        shutil.copyfile(source / MODEL / "1" / "model.py", version / "model.py")
        shutil.copyfile(source / "ensemble" / "config.pbtxt", place.path / "ensemble" / "config.pbtxt")
        if copy:
            opened.copy_to(version / "bundle")
        else:
            (version / "bundle").symlink_to(opened.path.resolve(), target_is_directory=True)
        config = Template((source / MODEL / "config.pbtxt").read_text(encoding="utf-8")).substitute(settings)
        (place.path / MODEL / "config.pbtxt").write_text(config, encoding="utf-8")
        place.publish()
    return out


def template() -> Path:
    """The repository's template: in the installed package, or beside it in the source tree."""
    places = (_PACKAGE / "triton_repo", _PACKAGE.parent / "triton_repo")
    return next(place for place in places if place.is_dir())


def container_command(bundle: str | Path) -> str:
    """How to serve a bundle in a container whose libraries fit it."""
    manifest = Bundle.open(bundle).manifest
    extra = {"tensorrt-rtx": " tensorrt-rtx"}.get(manifest["engine"], "")
    gpus = "" if manifest["engine"] == "onnxruntime" else "--gpus all "
    return (
        f'docker run --rm --init {gpus}--network host --shm-size 1g -v "{Path(bundle).resolve()}:/bundle:ro" \\\n'
        f"    nvcr.io/nvidia/tritonserver:{_image(manifest['engine'], manifest['versions'])} bash -c \\\n"
        f"    \"pip install 'dflash-trt[serve]'{extra} && dflash-trt serve /bundle\""
    )


# What a client of a server of one's own must not ask for: Python of its choosing is loaded, or memory mapped.
RESTRICTED = "model-repository,shared-memory,trace,logging"


def bare_command(repository: str | Path) -> str:
    """How to start a tritonserver on a repository without `dflash-trt serve`, bound to loopback."""
    return (
        "secret=$(openssl rand -hex 32)\n"
        f"tritonserver --model-repository {repository} --model-control-mode explicit --load-model '*' \\\n"
        "    --http-address 127.0.0.1 --grpc-address 127.0.0.1 --metrics-address 127.0.0.1 \\\n"
        f"    --http-restricted-api {RESTRICTED}:dflash-secret=$secret \\\n"
        f"    --grpc-restricted-protocol {RESTRICTED}:dflash-secret=$secret"
    )


# TensorRT of the containers that hold it (server/docs/introduction/compatibility.md). Containers before 26.07 have
# defects that clients can use (docs/serving.md, "Security"), and are not named.
_TENSORRT_IMAGES = {"10.14": "26.07-trtllm-python-py3"}


def _image(engine: str, versions: dict[str, str]) -> str:
    """A plan runs only with the TensorRT that built it; the other engines bring their library themselves."""
    if engine == "tensorrt":
        version = ".".join(versions.get("tensorrt", "").split(".")[:2])
        if version not in _TENSORRT_IMAGES:
            raise DFlashError(
                f"this bundle's plans are of TensorRT {version or 'unknown'}; known containers have "
                f"{', '.join(_TENSORRT_IMAGES)}: build the bundle again with one of these, or install it in yours"
            )
        return _TENSORRT_IMAGES[version]
    return "26.07-trtllm-python-py3" if engine == "tensorrt-llm" else "26.07-py3"

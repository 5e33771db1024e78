"""Write a Triton model repository that serves a bundle."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from string import Template

from dflash_trt.building.first_use import check_path
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.bundle.workspace import workspace
from dflash_trt.engines.registry import engine_of
from dflash_trt.errors import DFlashError, UsageError

MODEL = "dflash"
_PACKAGE = Path(__file__).resolve().parent.parent


def deploy(
    bundle: str | Path,
    out: Path,
    *,
    name: str | None = None,
    copy: bool = False,
    python: str = "",
    max_batch_size: int = 8,
    max_queue: int = 256,
    block_length: int | None = None,
    tree_nodes: int | None = None,
    stream_interval_ms: int = 50,
    threads: int | None = None,
) -> Path:
    """Write the models `dflash` and `ensemble` into the directory `out`, which must be missing or empty.

    With a `name`, write one model of this name into `out`, which may have other models. Either appears when it is
    complete.

    copy: whether the repository contains a copy of the bundle, to move it elsewhere, or a link to the bundle.
    python: the interpreter that runs the engine. "" is the interpreter of Triton's Python backend.
    stream_interval_ms: `AsyncLLM`'s stream_interval, in milliseconds.
    All other arguments are those of `AsyncLLM`.

    Returns `out`. Raises DFlashError if the bundle is incomplete, a setting is out of range, or `out` is in use.
    """
    check_path(Path(bundle))
    if re.search(r"\s", str(out.absolute())):
        raise DFlashError(
            f"{out.absolute()}: has a space, and tritonserver cannot read such a path; choose another one"
        )
    opened = Bundle.open(bundle)
    numbers = {"max_batch_size": (max_batch_size, 1), "max_queue": (max_queue, 0)}
    numbers["stream_interval_ms"] = (stream_interval_ms, 0)
    for setting, (value, least) in numbers.items():
        if value < least:
            raise DFlashError(f"{setting} is {value}, expected {least} or more")
    check_drafting(opened, block_length, tree_nodes)
    settings = {
        "name": name or MODEL,
        "bundle": "bundle",
        "python": python,
        "max_batch_size": max_batch_size,
        "max_queue": max_queue,
        "block_length": block_length or "auto",
        "tree_nodes": "auto" if tree_nodes is None else tree_nodes,
        "stream_interval_ms": stream_interval_ms,
        "threads": threads or "",
    }
    source = template()
    if name is not None:
        _check_name(name)
        if os.path.lexists(out) and not out.is_dir():
            raise DFlashError(
                f"{out}: is a file, expected the directory of a repository; choose another --out"
            )
        out.mkdir(parents=True, exist_ok=True)
    with workspace(out if name is None else out / name, "repository") as place:
        place.empty()
        place.check_free("is there already")
        if name is None:
            # Triton needs a version directory, even an empty one.
            (place.path / "ensemble" / "1").mkdir(parents=True)
            shutil.copyfile(source / "ensemble" / "config.pbtxt", place.path / "ensemble" / "config.pbtxt")
        _write_model(place.path if name else place.path / MODEL, opened, settings, copy=copy)
        place.publish()
    return out


def check_drafting(bundle: Bundle, block_length: int | None, tree_nodes: int | None) -> None:
    """Raise UsageError for what this bundle cannot draft, before an engine is started."""
    block_size = bundle.manifest["block_size"]
    if block_length is not None and not 1 <= block_length <= block_size:
        raise UsageError(
            f"block_length is {block_length}, expected 1..{block_size} (this bundle's block size)"
        )
    if tree_nodes and bundle.manifest["tree_width"] < 2:
        raise UsageError(
            f"tree_nodes is {tree_nodes}, but this bundle drafts chains: build it with --tree-width 2 or more"
        )


def _write_model(folder: Path, bundle: Bundle, settings: Mapping[str, object], *, copy: bool) -> None:
    source, version = template() / MODEL, folder / "1"
    copy_code(version)
    if copy:
        bundle.copy_to(version / "bundle")
    else:
        (version / "bundle").symlink_to(bundle.path.resolve(), target_is_directory=True)
    config = Template((source / "config.pbtxt").read_text(encoding="utf-8")).substitute(settings)
    (folder / "config.pbtxt").write_text(config, encoding="utf-8")


def copy_code(folder: Path) -> None:
    """Write the code of the model into a new directory. Triton's Python may lack this package, so wire.py is copied.

    It is renamed, because Triton appends the directory to the path: another package's module of this name would win.
    """
    folder.mkdir(parents=True)
    for module in (template() / MODEL / "1").glob("*.py"):
        shutil.copyfile(module, folder / module.name)
    shutil.copyfile(Path(__file__).with_name("wire.py"), folder / "dflash_wire.py")


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", name):
        raise DFlashError(f"name is {name!r}, expected up to 100 letters, digits, '.', '_' and '-'")
    if name == "ensemble":
        raise DFlashError(
            "name is 'ensemble', which is another model of this repository: choose another name"
        )


def request_fields() -> dict[str, str]:
    """The fields of a JSON request to the model: its inputs with their data types, and those of Triton's own."""
    config = (template() / MODEL / "config.pbtxt").read_text(encoding="utf-8")
    inputs = config[config.index("input [") : config.index("output [")]
    return dict(re.findall(r'name: "(\w+)" data_type: TYPE_(\w+)', inputs)) | {"id": "", "parameters": ""}


def template() -> Path:
    """The repository's template: in the installed package, or in the source tree."""
    places = (_PACKAGE / "triton_repo", _PACKAGE.parent / "triton_repo")
    return next(place for place in places if place.is_dir())


def container_command(bundle: str | Path) -> str:
    """A command that serves a bundle in a container with matching libraries. It begins with a wheel of a checkout."""
    check_path(Path(bundle))
    opened = Bundle.open(bundle)
    found = engine_of(opened).container(opened.manifest)
    packages = " ".join(["$(echo /dist/dflash_trt-*.whl)[triton]", *found.packages])
    return (
        "pip wheel --no-deps --wheel-dir dist .   # in a checkout of dflash-trt\n"
        f"docker run --rm --init {'--gpus all ' if found.gpus else ''}--network host --shm-size 1g "
        f'-v "{Path(bundle).resolve()}:/bundle:ro" -v "$PWD/dist:/dist:ro" \\\n'
        f"    nvcr.io/nvidia/tritonserver:{found.tag} bash -c \\\n"
        f"    'pip install {packages} && dflash-trt serve /bundle --api triton'"
    )


# APIs that are closed to clients: they could load Python code or map memory.
RESTRICTED = "model-repository,shared-memory,trace,logging"


def bare_command(repository: str | Path) -> str:
    """A command that starts tritonserver on a repository without `dflash-trt serve --api triton`, bound to loopback."""
    # By name, because '*' would also load the work directory of a `deploy --name` that runs or was interrupted.
    models = " ".join(
        f"--load-model {path.parent.name}" for path in sorted(Path(repository).glob("[!.]*/config.pbtxt"))
    )
    return (
        "secret=$(openssl rand -hex 32)\n"
        f"tritonserver --model-repository {shlex.quote(str(repository))} --model-control-mode explicit \\\n"
        f"    {models} \\\n"
        "    --http-address 127.0.0.1 --grpc-address 127.0.0.1 --metrics-address 127.0.0.1 \\\n"
        f"    --http-restricted-api {RESTRICTED}:dflash-secret=$secret \\\n"
        f"    --grpc-restricted-protocol {RESTRICTED}:dflash-secret=$secret"
    )

"""Write a Triton model repository that serves a bundle."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

from dflash_trt.bundle.manifest import Bundle
from dflash_trt.bundle.workspace import workspace
from dflash_trt.decoding.params import RequestOptions
from dflash_trt.engines.packages import packages_of
from dflash_trt.engines.registry import engine_of
from dflash_trt.errors import DFlashError

MODEL = "dflash"
# The model `dflash` under the name that clients of TensorRT-LLM's models call. It has no engine of its own.
_ENSEMBLE = """\
name: "ensemble"
platform: "ensemble"
max_batch_size: 1

{tensors}

ensemble_scheduling {{
  step [ {{
    model_name: "dflash"
    model_version: -1
{maps}
  }} ]
}}
"""
_PACKAGE = Path(__file__).resolve().parent.parent


def deploy(
    bundle: Bundle,
    out: Path,
    *,
    name: str | None = None,
    copy: bool = False,
    python: str = "",
    **options: Any,
) -> Path:
    """Write the models `dflash` and `ensemble` into the directory `out`, which must be missing or empty.

    With a `name`, write one model of this name into `out`, which may have other models. Either appears when it is
    complete.

    copy: whether the repository contains a copy of the bundle, to move it elsewhere, or a link to the bundle.
    python: the interpreter that runs the engine. "" is the interpreter of Triton's Python backend.
    All other arguments are those of `AsyncLLM`; None stands for its default.

    Returns `out`. Raises DFlashError if the bundle cannot draft so, or `out` is in use.
    """
    _check_place(out, name)
    set_options = {key: value for key, value in options.items() if value is not None}
    check_drafting(bundle, set_options)
    # Escaped once more, as a text of the configuration.
    settings = {"name": name or MODEL, "python": python, "options": json.dumps(json.dumps(set_options))[1:-1]}
    if name is not None:
        out.mkdir(parents=True, exist_ok=True)
    with workspace(out if name is None else out / name) as place:
        place.check_free()
        if name is None:
            # Triton needs a version directory, even an empty one.
            (place.path / "ensemble" / "1").mkdir(parents=True)
            (place.path / "ensemble" / "config.pbtxt").write_text(_ensemble(), encoding="utf-8")
        _write_model(place.path if name else place.path / MODEL, bundle, settings, copy=copy)
        place.publish()
    return out


def check_drafting(bundle: Bundle, options: Mapping[str, Any]) -> None:
    """Raise UsageError for what no engine can draft for this bundle, before one is started. options: `AsyncLLM`'s."""
    most_nodes = bundle.capacity // 2 if bundle.manifest["tree_width"] > 1 else 0
    names = ("block_length", "tree_nodes", "draft_source")
    drafting = RequestOptions(**{name: options[name] for name in names if name in options})
    drafting.check(bundle.manifest["block_size"], most_nodes, drafter="drafter" in bundle.roles)


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


def _check_place(out: Path, name: str | None) -> None:
    """Raise DFlashError for a directory or a model's name that tritonserver could not read."""
    if re.search(r"\s", str(out.absolute())):
        raise DFlashError(
            f"{out.absolute()}: has a space, and tritonserver cannot read such a path; choose another one"
        )
    if name is None:
        return
    if os.path.lexists(out) and not out.is_dir():
        raise DFlashError(f"{out}: is a file, expected the directory of a repository; choose another --out")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", name):
        raise DFlashError(f"name is {name!r}, expected up to 100 letters, digits, '.', '_' and '-'")
    if name == "ensemble":
        raise DFlashError(
            "name is 'ensemble', which is another model of this repository: choose another name"
        )


def _ensemble() -> str:
    """The configuration of the model `ensemble`: every tensor of `dflash` is one of its own."""
    config = (template() / MODEL / "config.pbtxt").read_text(encoding="utf-8")
    tensors = {
        kind: config[(start := config.index(f"\n{kind} [") + 1) : config.index("\n]", start) + 2]
        for kind in ("input", "output")
    }
    maps = [
        f'    {kind}_map {{ key: "{name}" value: "{name}" }}'
        for kind, listed in tensors.items()
        for name in re.findall(r'name: "(\w+)"', listed)
    ]
    return _ENSEMBLE.format(tensors="\n\n".join(tensors.values()), maps="\n".join(maps))


def template() -> Path:
    """The repository's template: in the installed package, or in the source tree."""
    places = (_PACKAGE / "triton_repo", _PACKAGE.parent / "triton_repo")
    return next(place for place in places if place.is_dir())


def container_command(bundle: Bundle) -> str:
    """A command that serves a bundle in a container with matching libraries. It begins with a wheel of a checkout."""
    packages = packages_of(engine_of(bundle))
    extras = ",".join(filter(None, ("serve", packages.extra)))
    wheels = " ".join([f"$(echo /dist/dflash_trt-*.whl)[{extras}]", *packages.pinned(bundle.manifest)])
    note = f"{packages.note}\n" if packages.note else ""
    return (
        f"{note}pip wheel --no-deps --wheel-dir dist .   # in a checkout of dflash-trt\n"
        f"docker run --rm --init {'--gpus all ' if packages.gpus else ''}--network host --shm-size 1g "
        f'-v "{bundle.path.resolve()}:/bundle:ro" -v "$PWD/dist:/dist:ro" \\\n'
        f"    nvcr.io/nvidia/tritonserver:{packages.tag} bash -c \\\n"
        f"    'pip install {wheels} && dflash-trt serve /bundle --api triton'"
    )


# What is closed to clients: they could load Python code, map memory, and write files. tritonserver's options for it.
RESTRICTED = "model-repository,shared-memory,trace,logging"
RESTRICTIONS = ("http-restricted-api", "grpc-restricted-protocol")


def bare_command(repository: str | Path) -> str:
    """A command that serves a repository on loopback. Only who knows its key may load further models."""
    # By name, because '*' and the other modes would also load the work directory of a `deploy --name` that runs or was
    # interrupted.
    models = " ".join(
        f"--load-model {path.parent.name}" for path in sorted(Path(repository).glob("[!.]*/config.pbtxt"))
    )
    closed = " \\\n".join(f"    --{option} {RESTRICTED}:dflash-key=$key" for option in RESTRICTIONS)
    return (
        "key=$(openssl rand -hex 32)\n"
        f"tritonserver --model-repository {shlex.quote(str(repository))} --model-control-mode explicit \\\n"
        f"    {models} \\\n"
        "    --http-address 127.0.0.1 --grpc-address 127.0.0.1 --metrics-address 127.0.0.1 \\\n"
        f"{closed}"
    )

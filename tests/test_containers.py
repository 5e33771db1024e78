"""The Dockerfile and the compose file agree with the package and with each other. No image is built here."""

from __future__ import annotations

import fnmatch
import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from dflash_trt.bundle.manifest import Bundle
from dflash_trt.cli import make_parser
from dflash_trt.serving.deploy import container_command

ROOT = Path(__file__).parent.parent
DOCKERFILE = (ROOT / "Dockerfile").read_text()
# The stages that all images share, and that of Triton.
STAGES = DOCKERFILE.partition("\nFROM base AS openai")[0]
PORTS = {"port", "grpc_port", "metrics_port"}


def instructions(name: str) -> list[str]:
    text = re.sub(r"^#.*\n", "", STAGES, flags=re.M).replace("\\\n", " ")
    return [line.removeprefix(name).strip() for line in text.splitlines() if line.startswith(f"{name} ")]


def service() -> dict[str, object]:
    return dict(yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["triton"])


def served() -> dict[str, object]:
    """The command line's arguments from the container's entry point and the compose file's command."""
    (entry,) = (json.loads(text) for text in instructions("ENTRYPOINT"))
    assert entry[0] == "dflash-trt"
    command = [re.sub(r"\$\{\w+:-(.*)\}", r"\1", word) for word in service()["command"]]  # type: ignore[attr-defined]
    return vars(make_parser().parse_args([*entry[1:], *command]))


def test_the_container_starts_a_command_that_exists_on_the_ports_it_shows() -> None:
    arguments = served()
    ports = {str(arguments[name]) for name in PORTS}
    assert set(instructions("EXPOSE")[0].split()) == ports
    assert sorted(service()["ports"]) == sorted(f"127.0.0.1:{port}:{port}" for port in ports)  # type: ignore[call-overload]


def test_the_container_mounts_the_bundle_that_it_serves_and_cannot_write_to_it() -> None:
    (volume,) = service()["volumes"]  # type: ignore[misc]
    assert volume.endswith(f":{served()['bundle']}:ro")


def test_the_container_gets_longer_to_stop_than_requests_get_to_finish() -> None:
    assert int(str(service()["stop_grace_period"]).removesuffix("s")) > float(str(served()["grace"]))


def test_the_images_extras_exist_and_the_other_bases_are_those_that_the_engines_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"whl\)\[([\w-]+)\]", DOCKERFILE)) == {"triton", "serve"} <= set(extras)
    manifest = {"engine": "onnxruntime", "versions": {}}
    (base,) = re.findall(r"BASE=(nvcr\S+/tritonserver:\S+)", DOCKERFILE)
    assert f" {base} " in container_command(Bundle(tmp_path, manifest))


def test_all_that_the_image_is_built_from_reaches_docker() -> None:
    lines = (ROOT / ".dockerignore").read_text().split()
    assert lines[0] == "**"  # excludes everything that is not named
    named = [line[1:] for line in lines if line.startswith("!")]
    assert [name for name in named if not (ROOT / name).exists()] == []
    sources = {
        word for text in instructions("COPY") if "--from" not in text for word in text.split()[:-1]
    } - {"."}
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = (
        sources
        | {"README.md", "LICENSE", "pyproject.toml"}
        | set(build["packages"])
        | set(build["force-include"])
    )
    assert [
        name for name in needed if not any(fnmatch.fnmatch(f"{name}/", f"{known}/*") for known in named)
    ] == []


def test_the_image_does_not_run_as_root() -> None:
    assert not instructions("USER")[-1].startswith(("0", "root"))

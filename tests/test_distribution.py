"""The content of a release: the source distribution, the wheel built from it, and the installed package."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Folders of the checkout, and their places in the wheel.
PACKED = {
    "dflash_trt": "dflash_trt",
    "plugins/dflash_plugins": "dflash_plugins",
    "triton_repo": "dflash_trt/triton_repo",
}


def build(project: Path, out: Path, target: str) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(out)]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked source distribution."""
    out = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build(ROOT, out / "made", "sdist")) as packed:
        packed.extractall(out, filter="data")
    return next(path for path in out.iterdir() if path.name != "made")


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(sdist, tmp_path_factory.mktemp("wheel") / "made", "wheel")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with only the wheel."""
    place = tmp_path_factory.mktemp("environment") / "venv"
    uv = [sys.executable, "-m", "uv", "--no-config", "--offline", "--quiet"]
    subprocess.run([*uv, "venv", "--python", sys.executable, str(place)], check=True)
    python = place / "bin" / "python"
    subprocess.run([*uv, "pip", "install", "--no-deps", "--python", str(python), str(wheel)], check=True)
    return python


def run(python: Path, *arguments: str, cwd: Path) -> str:
    # The dependencies are those of the tests. The checkout is invisible: the tests' environment finds it through a
    # .pth file, and such files do not count in a folder on PYTHONPATH.
    environment = os.environ | {"PYTHONPATH": sysconfig.get_path("purelib")}
    done = subprocess.run([python, *arguments], capture_output=True, text=True, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def files(folder: Path) -> list[Path]:
    found = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return sorted(path.relative_to(folder) for path in found)


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as packed:
        (name,) = (name for name in packed.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(packed.read(name).decode())


def test_the_wheel_has_every_file_of_the_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        found = {name: packed.read(name) for name in packed.namelist() if ".dist-info/" not in name}
    expected = {
        f"{place}/{path.as_posix()}": (ROOT / folder / path).read_bytes()
        for folder, place in PACKED.items()
        for path in files(ROOT / folder)
        if "tiny-gpt-oss" not in path.parts  # of the tests, and 8 MB
    }
    assert sorted(found) == sorted(expected)
    assert [name for name, data in expected.items() if found[name] != data] == []


def test_the_source_distribution_has_what_builds_tests_and_documents_it(sdist: Path) -> None:
    tests = ("tests", "server_tests", "client_tests")
    for folder in (*PACKED, *tests, "docs", "examples", "requirements", "build_scripts"):
        assert files(sdist / folder) == files(ROOT / folder), folder
    for name in ("LICENSE", "Makefile", "README.md", "pyproject.toml"):
        assert (sdist / name).read_bytes() == (ROOT / name).read_bytes()


def test_no_folder_of_a_release_needs_symbolic_links() -> None:
    links = [path for folder in PACKED for path in (ROOT / folder).rglob("*") if path.is_symlink()]
    assert links == []


def test_the_page_of_an_index_links_to_nothing_that_it_does_not_have(wheel: Path) -> None:
    text = str(metadata(wheel).get_payload())
    assert metadata(wheel)["Description-Content-Type"] == "text/markdown"
    assert text.lstrip().startswith("# dflash-trt")
    targets = re.findall(r"\]\(([^)]*)\)", text)
    assert [target for target in targets if not target.startswith("https://")] == []
    assert "docs/serving.md" in text  # named, though not linked: the source distribution has it


def test_an_installed_wheel_finds_its_packages_its_licence_and_its_version(
    installed: Path, tmp_path: Path
) -> None:
    code = (
        "import dflash_trt, dflash_plugins.dialect, importlib.metadata as m, sys\n"
        "from dflash_trt.serving.deploy import template\n"
        "for path in (dflash_trt.__file__, dflash_plugins.__file__, template()): print(path)\n"
        "print(dflash_trt.__version__)\n"
        "print(*m.metadata('dflash-trt').get_all('License-File'))\n"
    )
    *places, version, licences = run(installed, "-c", code, cwd=tmp_path).splitlines()
    assert [place for place in places if not Path(place).is_relative_to(installed.parent.parent)] == []
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    assert licences == "LICENSE"


def test_an_installed_wheel_builds_generates_and_deploys(installed: Path, tmp_path: Path) -> None:
    def command(*arguments: str) -> str:
        return run(installed, "-m", "dflash_trt", *arguments, cwd=tmp_path)

    command("build", "--target", "tiny", "--out", "bundle")
    assert command(
        "generate", "bundle", "--chat", "--prompt", "What is 17 + 25?", "--max-tokens", "8"
    ).strip()
    command("deploy", "bundle", "--out", "models")
    assert (tmp_path / "models" / "dflash" / "1" / "model.py").is_file()

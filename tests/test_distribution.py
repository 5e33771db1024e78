"""The content of a release: the source distribution, and the wheel built from it.

`make docs` installs the wheel's file with pip and runs the commands of the pages from it.
"""

from __future__ import annotations

import re
import subprocess
import sys
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
    assert metadata(wheel).get_all("License-File") == ["LICENSE"]

"""The worked examples of docs/architecture.md, carried out on a copy of the package."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from dflash_trt.building.build import build
from tests.doubles.checkpoints import make_drafter
from tests.doubles.family_checkpoints import make_llama

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"
# Sections of the page.
PARTS = ("A target family", "A kind of drafter", "A number format", "An engine")


def blocks(part: str) -> list[tuple[str, str, str]]:
    """Language, file and text of the code blocks of a section."""
    text = PAGE.read_text()
    section = text[text.index(f"\n### {part}\n") :].partition("\n### ")[2].partition("\n### ")[0]
    return re.findall(r"^```(python|diff)\n# (\S+)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


def apply(root: Path, part: str) -> set[str]:
    """Write the new files and change the old ones. Returns them."""
    for language, name, text in blocks(part):
        file = root / name
        if language == "python":
            assert not file.exists()
            file.write_text(text)
            continue
        for hunk in text.split("@@\n"):
            lines = hunk.splitlines()
            old, new = ("\n".join(x[1:] for x in lines if x[0] in kinds) for kinds in (" -", " +"))
            source = file.read_text()
            assert source.count(old) == 1, (name, old)
            file.write_text(source.replace(old, new))
    return {name for _, name, _ in blocks(part)}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy with all additions. The shipped weights are links."""
    root = tmp_path_factory.mktemp("additions")
    shutil.copytree(
        ROOT / "dflash_trt",
        root / "dflash_trt",
        ignore=shutil.ignore_patterns("shipped", "__pycache__", "plugins"),
    )
    (root / "dflash_trt" / "shipped").symlink_to(ROOT / "dflash_trt" / "shipped")
    for part in PARTS:
        assert apply(root, part), part
    return root


def run(package: Path, *arguments: str) -> str:
    path = os.pathsep.join([str(package), str(ROOT / "plugins"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "dflash_trt", *arguments],
        env={**os.environ, "PYTHONPATH": path}, cwd=package, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def rename(config: Path, values: Mapping[str, object]) -> None:
    config.write_text(json.dumps(json.loads(config.read_text()) | values))


def test_the_added_family_drafter_format_and_engine_work(package: Path, tmp_path: Path) -> None:
    """A pair under the new names decodes as under the old ones. The new format is quantized to, read and planned."""
    target = make_llama(tmp_path / "target")
    drafter = make_drafter(tmp_path / "drafter", target)
    build(str(target), str(drafter), tmp_path / "expected")
    rename(target / "config.json", {"architectures": ["ToyForCausalLM"], "model_type": "toy"})
    rename(drafter / "config.json", {"architectures": ["ToyDraftModel"], "model_type": "toy_draft"})
    run(
        package,
        "build",
        "--target",
        str(target),
        "--drafter",
        str(drafter),
        "--out",
        str(tmp_path / "bundle"),
    )
    ask = ("--prompt", "def add(a, b):", "--max-tokens", "12", "--ignore-eos", "--json")
    expected = run(package, "generate", str(tmp_path / "expected"), *ask)
    found = run(package, "generate", str(tmp_path / "bundle"), *ask)
    assert json.loads(found)["token_ids"] == json.loads(expected)["token_ids"]

    run(package, "quantize", str(target), "--scheme", "toy", "--out", str(tmp_path / "fewer"))
    stored = json.loads((tmp_path / "fewer" / "hf_quant_config.json").read_text())
    assert stored["quantization"]["quant_algo"] == "TOY"
    again = ("--target", str(tmp_path / "fewer"), "--drafter", str(drafter), "--out", str(tmp_path / "small"))
    run(package, "build", "--engine", "toy", *again)
    assert json.loads((tmp_path / "small" / "manifest.json").read_text())["engine"] == "toy"
    rows = json.loads(run(package, "doctor", "--json"))["engines"]
    assert [row["build"] for row in rows if row["engine"] == "toy"] == [True]
    assert json.loads(run(package, "plan", "--target", "tiny", "--gpu", "b200", "--engine", "toy", "--json"))[
        "fits"
    ]
    assert len(json.loads(run(package, "generate", str(tmp_path / "small"), *ask))["token_ids"]) == 12

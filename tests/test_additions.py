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


RUN = """import io, json, sys
from contextlib import redirect_stdout
from dflash_trt.cli import main
said = []
for words in json.loads(sys.argv[1]):
    with redirect_stdout(io.StringIO()) as out:
        assert main(words) == 0, words
    said.append(out.getvalue())
print(json.dumps(said))"""


def run(package: Path, *commands: list[object]) -> list[str]:
    """What commands print, which one process of the package runs."""
    path = os.pathsep.join([str(package), str(ROOT / "plugins"), str(ROOT)])
    words = json.dumps([list(map(str, command)) for command in commands])
    done = subprocess.run(
        [sys.executable, "-c", RUN, words],
        env={**os.environ, "PYTHONPATH": path}, cwd=package, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said: list[str] = json.loads(done.stdout)
    return said


def rename(config: Path, values: Mapping[str, object]) -> None:
    config.write_text(json.dumps(json.loads(config.read_text()) | values))


def test_the_added_family_drafter_format_and_engine_work(package: Path, tmp_path: Path) -> None:
    """A pair under the new names decodes as under the old ones. The new format is quantized to, read and planned."""
    target = make_llama(tmp_path / "target")
    drafter = make_drafter(tmp_path / "drafter", target)
    build(str(target), str(drafter), tmp_path / "expected")
    rename(target / "config.json", {"architectures": ["ToyForCausalLM"], "model_type": "toy"})
    rename(drafter / "config.json", {"architectures": ["ToyDraftModel"], "model_type": "toy_draft"})
    pair = ["build", "--target", target, "--drafter", drafter, "--out", tmp_path / "bundle"]
    fewer = ["quantize", target, "--scheme", "toy", "--out", tmp_path / "fewer"]
    small = ["build", "--engine", "toy", "--target", tmp_path / "fewer", "--drafter", drafter]
    ask = ["--prompt", "def add(a, b):", "--max-tokens", "12", "--ignore-eos", "--json"]
    plan = ["plan", "--target", "tiny", "--gpu", "b200", "--engine", "toy", "--json"]
    asked = [["generate", tmp_path / name, *ask] for name in ("expected", "bundle", "small")]
    commands = [pair, fewer, [*small, "--out", tmp_path / "small"], *asked, ["doctor", "--json"], plan]
    expected, found, again, doctor_said, plan_said = map(json.loads, run(package, *commands)[3:])
    assert found["token_ids"] == expected["token_ids"]
    assert len(again["token_ids"]) == 12
    stored = json.loads((tmp_path / "fewer" / "hf_quant_config.json").read_text())
    assert stored["quantization"]["quant_algo"] == "TOY"
    assert json.loads((tmp_path / "small" / "manifest.json").read_text())["engine"] == "toy"
    assert [row["build"] for row in doctor_said["engines"] if row["engine"] == "toy"] == [True]
    assert plan_said["fits"]

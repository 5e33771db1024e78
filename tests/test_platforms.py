"""The package builds and generates without what only Linux has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_a_build_and_a_generation_without_what_only_linux_has(tmp_path: Path) -> None:
    code = """import sys, tests.doubles.other_platform
from dflash_trt.cli import main
print([main(words.split()) for words in sys.argv[1:]])"""
    commands = ("build --target tiny", "generate bundles/tiny -p 12 --max-tokens 4 --chat", "doctor")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "plugins")))}
    done = subprocess.run(
        [sys.executable, "-c", code, *commands, "serve bundles/tiny"],
        cwd=tmp_path, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[0, 0, 0, 1]", done.stderr
    assert "need Linux or macOS" in done.stderr.splitlines()[-1]

"""A sample of `python -m build_scripts.soak.kill_sweep`: kills, full disks, and their remains."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from build_scripts.soak.kill_sweep import OPERATIONS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_is_killed_or_meets_a_full_disk_leaves_old_or_new_or_nothing(
    operation: str, tmp_path: Path
) -> None:
    """In a process without torch's threads, because it forks."""
    command = [
        sys.executable,
        "-m",
        "build_scripts.soak.kill_sweep",
        operation,
        "--sample",
        "5",
        "--dir",
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])["operations"][operation]
    assert found["killed"] == 5
    assert found["full"] > 0

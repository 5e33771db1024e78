"""A sample of kills and full disks, and their remains (tests/bundle/kill_sweep.py)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_what_is_killed_or_meets_a_full_disk_leaves_old_or_new_or_nothing(tmp_path: Path) -> None:
    """In a process without torch's threads, because it forks. A build that quantizes is a build, too."""
    operations = ["precision", "replace", "quantize", "deploy"]
    command = [sys.executable, "-m", "tests.bundle.kill_sweep", str(tmp_path), "3", *operations]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert [found[name]["killed"] for name in operations] == [3] * 4
    assert all(found[name]["full"] > 0 for name in operations)

"""Kernels compiled without a GPU.

Each once, for sm_90, whose instruction for products is its own; `make kernels` compiles every tile, size and type for
all targets, with other versions of Triton, too, whose folders $TRITON_VERSIONS names.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dflash_plugins import kernel_specs as uses
from dflash_plugins.kernel_table import KERNELS

from tests.doubles.plugin_targets import CASES, functions

ARCHITECTURES = {89: "sm_89", 90: "sm_90a", 100: "sm_100a", 120: "sm_120a"}
ROOT = Path(__file__).resolve().parents[2]
# In front of Python's path: none for the installed version.
VERSIONS = ["", *filter(None, os.environ.get("TRITON_VERSIONS", "").split(os.pathsep))]
EVERY = ["every"] if "TRITON_VERSIONS" in os.environ else []
PLANS = list(uses.TARGETS) if EVERY else [90]
TARGETS = [uses.ROUND_TARGET, *PLANS] if EVERY else PLANS  # there are no plans for the oldest GPU


@pytest.fixture(scope="module")
def cache(pytestconfig: pytest.Config) -> Path:
    """Kept by pytest: a kernel is compiled again when its digest of sources, sizes and compiler has changed."""
    return Path(pytestconfig.cache.mkdir("kernels"))


def run(cache: Path, *command: str, folder: str = "", **options: Any) -> subprocess.CompletedProcess[str]:
    """Run in a process that compiles kernels instead of interpreting them."""
    path = os.pathsep.join([folder, str(ROOT), *sys.path] if folder else [str(ROOT), *sys.path])
    environment = os.environ | {"DFLASH_KERNEL_CACHE": str(cache), "PYTHONPATH": path}
    environment.pop("TRITON_INTERPRET", None)
    return subprocess.run(
        [sys.executable, *command], env=environment, cwd=ROOT, capture_output=True, text=True, **options
    )


@pytest.fixture(scope="module", params=VERSIONS, ids=lambda folder: Path(folder).name or "installed")
def folder(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module", params=PLANS)
def target(
    request: pytest.FixtureRequest, folder: str, cache: Path
) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    done = run(cache, "-m", "tests.doubles.plugin_targets", str(request.param), *EVERY, folder=folder)
    assert done.returncode == 0, done.stderr
    return request.param, json.loads(done.stdout)


def test_every_kernel_of_a_plan_compiles_to_what_is_launched(target: tuple[int, Any]) -> None:
    """For sizes that a graph fixes, and no others."""
    capability, plugins = target
    assert list(plugins) == list(CASES)
    assert {name.split()[0] for name in CASES} == {kernel.name for kernel in KERNELS}
    for name, tiles in plugins.items():
        tiled = {"MoEGateUp": uses.TILES, "MoEDown": uses.TILES}.get(name, ())
        tiled = uses.attention_tiles(64) if name.startswith("Attend") else tiled
        assert 3 <= len(tiles) <= len(tiled) if tiled and EVERY else len(tiles) == 1, name
        for made in tiles:
            given, wanted = made["names"]
            assert given == [*dict.fromkeys(wanted)], name
            assert made["types"] == made["expected"], name  # none of the compiler's own parameters is left
            assert (made["version"], made["target"]) == ("8.7", ARCHITECTURES[capability])
            threads, required = map(int, made["threads"])
            assert threads == required
            assert made["registers"] <= 65536 // threads
            if tiled:  # few rows take the small instruction
                assert set(made["products"]) <= {uses.TARGETS[capability], "mma.sync"}
                assert made["products"], name
            else:
                assert made["products"] == [], name


HEADS = """
import json
import sys
from dflash_plugins import compiler
from dflash_plugins import kernel_specs as uses
def fits(head, tile, target):
    return compiler.compile_kernel(uses.attend(8, 8, head, "bf16", tile, tree=True), target).fits
found = {}
for head in (128, 256, 512) if len(sys.argv) > 2 else (128, 512):
    tiles = uses.attention_tiles(head)
    for target in map(int, sys.argv[1:]):
        most = next(tile.rows for tile in reversed(tiles) if fits(head, tile, target))
        found[f"{head} {target}"] = [fits(head, tiles[0], target), most]
print(json.dumps(found))
"""


def test_attention_has_kernels_for_every_head(folder: str, cache: Path) -> None:
    """One for few rows, and one for the many rows of a prefill. They fit 48 KiB and do not spill."""
    done = run(cache, "-c", HEADS, *map(str, TARGETS), folder=folder)
    assert done.returncode == 0, done.stderr
    for name, (few, most) in json.loads(done.stdout).items():
        assert few, name
        assert most >= (64 if name.startswith("128") else 32), name


def table(rows: list[dict[str, Any]]) -> str:
    """The most registers of a thread and the most bytes that it spills, of each kernel on each GPU."""
    lines = [f"Triton {rows[0]['triton']}: registers / bytes spilled", " " * 16]
    lines[1] += "".join(f"{f'sm_{target}':>11}" for target in TARGETS)
    for name in sorted({row["kernel"] for row in rows}):
        found = [[row for row in rows if (row["kernel"], row["sm"]) == (name, target)] for target in TARGETS]
        worst = [[max(row[what] for row in each) for what in ("registers", "spills")] for each in found]
        lines.append(f"{name:<16}" + "".join(f"{f'{most} / {spilled}':>11}" for most, spilled in worst))
    return "\n".join(["", *lines])


def test_kernels_that_are_launched_compile(
    folder: str, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They fit 48 KiB, need no scratch memory and do not spill, those of packed weights little. A weight's numbers are
    products in float32. Kernels between passes are compiled once. One atomic addition ends a row of logits.
    """
    targets = ",".join(map(str, TARGETS))
    done = run(cache, "-m", "tests.doubles.launched_kernels", targets, *EVERY, folder=folder)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert not [row for row in rows if row["problem"]]
    assert {row["kernel"] for row in rows} == functions()
    if EVERY:
        with capsys.disabled():
            print(table(rows))


def test_the_noise_and_the_recurrence_are_compiled_without_fused_operations(target: tuple[int, Any]) -> None:
    """A fused multiply-add would round differently from the host. In sample_select, only the library's log has some.
    What the driver translates may not be fused either, where a loop is unrolled.
    """
    _, plugins = target
    assert plugins["GatedDeltaNet"][0]["fused"] == plugins["GatedDeltaNet"][0]["fusable"] == 0
    # The assembler's own choice on sm_89 and sm_90 is fewer, at the price of sums one after the other.
    assert [each["most_registers"] for each in plugins["GatedDeltaNet"]] == [[128]]
    assert plugins["SampleTiles"][0]["fused"] == 0
    assert plugins["SampleSelect"][0]["fused"] == 12


COMPILE_TWICE = """
import triton
from dflash_plugins import compiler
from dflash_plugins import kernel_specs as uses
use = uses.combine(64, 2, "bf16")
first = compiler.compile_kernel(use, 90)
compiler._compile = None  # compiled again, this would be called
assert compiler.compile_kernel(use, 90) == first
compiler.source_digest.cache_clear()
triton.__version__ += ".post1"
try:
    compiler.compile_kernel(use, 90)
except compiler.BuildError:
    print("another compiler, another kernel")
"""


def test_compiled_kernels_are_kept_by_digest(tmp_path: Path) -> None:
    done = run(tmp_path, "-c", COMPILE_TWICE)
    assert done.stdout == "another compiler, another kernel\n", done.stderr
    assert len(list(tmp_path.iterdir())) == 1


COMPILE_NOWHERE = """
import logging
import os
from pathlib import Path
from dflash_plugins import compiler
from dflash_plugins import kernel_specs as uses
folder = Path(os.environ["DFLASH_KERNEL_CACHE"])
use = uses.combine(64, 2, "bf16")
first = compiler.compile_kernel(use, 90)
(file,) = folder.iterdir()
whole = file.read_bytes()
for damaged in (b"", whole[:-9], b"{}"):
    file.write_bytes(damaged)
    assert compiler.compile_kernel(use, 90) == first
    assert file.read_bytes() == whole
file.unlink()
folder.rmdir()
folder.write_text("a file")
logging.basicConfig(format="%(message)s")
for _ in range(2):
    assert compiler.compile_kernel(use, 90) == first
"""


def test_a_cache_that_is_damaged_or_cannot_be_written_costs_a_compilation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's own cache is not used: it may lie in a home that cannot be written."""
    monkeypatch.setenv("TRITON_CACHE_DIR", "/dev/null/triton")
    done = run(tmp_path / "cache", "-c", COMPILE_NOWHERE)
    assert done.returncode == 0, done.stderr
    expected = (
        "cache: compiled kernels cannot be kept there (File exists), so each process compiles them anew"
    )
    assert done.stderr.count(expected) == 1, done.stderr

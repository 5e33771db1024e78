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

from tests.doubles.plugin_targets import CASES

ARCHITECTURES = {89: "sm_89", 90: "sm_90a", 100: "sm_100a", 120: "sm_120a"}
ROOT = Path(__file__).resolve().parents[2]
# In front of Python's path: none for the installed version.
VERSIONS = ["", *filter(None, os.environ.get("TRITON_VERSIONS", "").split(os.pathsep))]
EVERY = ["every"] if "TRITON_VERSIONS" in os.environ else []
TARGETS = list(uses.TARGETS) if EVERY else [90]


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


@pytest.fixture(scope="module", params=TARGETS)
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


LAUNCHED = """
import itertools
import json
import re
import sys
from dataclasses import replace
from dflash_plugins import compiler, packed
from dflash_plugins import kernel_specs as uses
from tests.plugins.test_packed import FORMS, STACKS
heads = "cos", "sin", "start", "k_cache", "v_cache"
wanted = [uses.gate(12_288, "bf16"), uses.router(128, 2048, "bf16", biased=False)]
wanted += [uses.router(experts, 2880, "bf16", biased=True, epsilon=1e-5) for experts in (32, 128)]
wanted += [uses.router(256, 7168, "bf16", biased=False, epsilon=1e-6, k=8)]
wanted += [uses.router(32, 2880, "bf16", biased=True, epsilon=1e-5, k=4, arranged=True)]
wanted += [uses.add_norm(hidden, 1e-6, "bf16") for hidden in (576, 4096, 8192)]
wanted += [uses.add_norm(2880, 1e-5, "bf16", parts=8)]
for rounding in (("fp8", True), ("nvfp4", False)):
    wanted += [uses.gate(inner, "bf16", rounding) for inner in (12_288, 28_672)]
    wanted += [uses.add_norm(8192, 1e-6, "bf16", rounding), uses.quantized_rows(8192, "bf16", rounding)]
wanted += [uses.place_heads(32, 8, 8, 128, 64, 1e-6, "bf16", present=("q_norm", "k_norm", "q", *heads))]
wanted += [uses.place_heads(64, 8, 8, 64, 32, 1e-5, "bf16", present=("q", *heads))]
wanted += [uses.place_heads(0, 4, 4, 256, 32, 1e-6, "fp32", present=("k_norm", *heads))]
wanted += [uses.best_token(vocab, "bf16") for vocab in (3000, 50_257, 201_088)]
wanted += [uses.best_token(151_936, "fp32"), uses.best_token(50)]
wanted += [uses.merge(32, 128, "bf16", sinks=False, by_row=True)]
wanted += [uses.merge(64, head, "bf16", sinks=True) for head in (128, 256, 512)]
everywhere = [int(target) for target in sys.argv[1:]]
every = len(everywhere) > 1
if every:
    everywhere.append(uses.ROUND_TARGET)
else:
    wanted = {use.function: use for use in wanted}.values()
pairs = [(use, target) for use in wanted for target in everywhere]
wanted = [replace(form, outputs=2304, inputs=4096) for form in FORMS]
stacks = STACKS if every else [form for form in STACKS if form.codes == "e2m1"]
wanted += [replace(form, outputs=768, inputs=2048, experts=128) for form in stacks]
for form in [form for form in wanted if form.codes != "plain"]:
    tile = form.tiles[0]
    rows = packed.ROWS[-1 if every or not form.experts else 0]
    longest = packed.product_use(form, "bf16", rows, tile, biased=False, scaled=form.codes in ("e4m3", "e2m1"))
    pairs += [(longest, target) for target in everywhere]
    few = packed.product_use(form, "fp16", 16, tile, biased=not form.experts)
    pairs += [(packed.widen_use(form, "bf16", tile), 90)] if every or not form.experts else []
    pairs += [(few, 90), (packed.widen_use(form, "fp16", tile), 90)] if every else []
few_and_most = (("bf16", packed.ROWS[-1]), ("fp16", packed.ROWS[0]))[: 2 if every else 1]
plain = packed.Packing(768, 2048, "plain", experts=128), packed.Packing(2304, 4096, "plain")
for form, (dtype, tokens), target in itertools.product(plain, few_and_most, everywhere):
    tiles = (packed.product_use(form, dtype, tokens, tile, biased=False) for tile in form.tiles)
    pairs.append((next(use for use in tiles if compiler.compile_kernel(use, target).fits), target))
found = []
for use, target in pairs:
    made = compiler.compile_kernel(use, target)
    most = 24 if use.module == "packed" else 0
    if most and "groups" in use.types and use.constants["TOKENS"] == packed.ROWS[-1]:
        most = 228  # in prompts
    if not made.stores or made.shared_bytes > uses.SHARED_BYTES or made.spill_bytes > most:
        found.append(f"{use} {target}")
    if use.function == "router" and target >= 90:
        compiler.resources(made.waiting, target)  # or its instruction is refused
    if use.function == "widen" and not use.constants["EXACT"] and re.search(r"mul\\.(rn\\.)?b?f16", made.ptx):
        found.append(f"{use} multiplies in 16 bits")
rounds = uses.round_uses(201_088, 14_400, "bf16", 16)
for use in rounds:
    kernel = compiler.compile_round(rounds)[use.digest]
    if not (kernel.fits and (kernel.ptx.count("atom.") == (use.function == "end_round") or use.function == "read_texts")
            and kernel.ptx.split(".target ")[1].startswith("sm_80") and {*kernel.parameters} == {*use.types}):
        found.append(str(use))
print(json.dumps(found))
"""


def test_kernels_that_are_launched_compile(folder: str, cache: Path) -> None:
    """They fit 48 KiB, need no scratch memory and do not spill, those of packed weights little. A weight's numbers are
    products in float32. Kernels between passes are compiled once. One atomic addition ends a row of logits.
    """
    done = run(cache, "-c", LAUNCHED, *map(str, TARGETS), folder=folder)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


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

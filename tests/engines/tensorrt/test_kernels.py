"""Kernels between passes: compiled by a build and launched by a stand-in for the driver, or left to torch's operators.

The kernels are compiled in a process of their own, because this one interprets them.
"""

from __future__ import annotations

import json
import logging
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dflash_plugins import compiled, compiler
from dflash_plugins.kernel_specs import ROUND_TARGET, round_uses

from dflash_trt import LLM, SamplingParams
from dflash_trt.building.build import build
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.cli import main
from dflash_trt.engines.tensorrt.options import TensorRTOptions
from dflash_trt.errors import BuildError
from dflash_trt.reports import environment
from tests.doubles import cuda_driver
from tests.doubles.checkpoints import make_drafter, make_target
from tests.doubles.two_engines import FLOAT32, prompts
from tests.engines.tensorrt.test_runtime import BLOCK, here  # noqa: F401  # a fixture
from tests.plugins.test_targets import cache, run  # noqa: F401  # a fixture

SETTINGS: dict[str, Any] = {"max_seq_len": 64, "tree_width": 2}
SAMPLED = SamplingParams(temperature=0.8, seed=5, max_tokens=6, ignore_eos=True, presence_penalty=0.5)
GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
PROMPT = [7, 1, 5, 7, 1]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    directory = tmp_path_factory.mktemp("pair")
    target = make_target(directory / "target", favourites=6, layers=2)
    return str(target), str(make_drafter(directory / "drafter", target, taps=(0, 1), block_size=BLOCK))


@pytest.fixture(scope="module")
def bundle(
    pair: tuple[str, str],
    tmp_path_factory: pytest.TempPathFactory,
    here: Any,  # noqa: F811
    cache: Path,  # noqa: F811
) -> Bundle:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            compiler,
            "compile_round",
            lambda wanted: cuda_driver.compile_round(
                lambda *given, **more: run(cache, *given, **more), wanted
            ),
        )
        return built(pair, tmp_path_factory.mktemp("kernels") / "bundle")


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, "dflash_trt")
    return lambda: [record.getMessage() for record in caplog.records if "operators" in record.getMessage()]


def built(pair: tuple[str, str], place: Path) -> Bundle:
    options = TensorRTOptions(max_batch_size=2, prefill_chunk=16)
    return build(*pair, place, engine="tensorrt", precision=FLOAT32, options=options, **SETTINGS)


def tokens(path: Path) -> tuple[list[list[int]], bool]:
    """Sampled, greedy, and of trees; and whether kernels ran."""
    with LLM(path) as llm:
        found = [llm.generate(PROMPT, params).token_ids for params in (SAMPLED, GREEDY)]
        found += [c.token_ids for c in llm.generate(prompts()[:3], GREEDY, tree_nodes=BLOCK)]
        return found, getattr(llm.runtime.pair.arrays, "run", None) is not None


@pytest.fixture(scope="module")
def expected(pair: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    plain = build(*pair, tmp_path_factory.mktemp("plain") / "bundle", engine="onnxruntime", **SETTINGS)
    return tokens(plain.path)[0]


def test_a_bundle_runs_its_own_kernels_without_triton(
    bundle: Bundle, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    """The driver gets every kernel with the values that its PTX declares, and the tokens are those of the host."""
    assert compiled.FILE in bundle.manifest["files"]
    library = cuda_driver.install(monkeypatch)
    monkeypatch.setattr(compiler, "compile_kernel", None)
    assert tokens(bundle.path) == (expected, True)
    assert not said()
    used = {"fill_tokens", "end_round", "sample_tiles", "sample_select", "accept_block", "compact_rows"}
    used |= {"read_texts", "adjust_rows"}
    assert library.launches.keys() == used


@pytest.mark.parametrize("fault", ["no driver", "refused", "other version", "none", "lacks one", "damaged"])
def test_torchs_operators_run_with_one_warning_where_kernels_cannot(
    fault: str,
    bundle: Bundle,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    said: Callable[[], list[str]],
    tmp_path: Path,
) -> None:
    cuda_driver.install(monkeypatch, refuses="cuModuleLoadData" if fault == "refused" else "")
    reason = "cuModuleLoadData: a PTX JIT compilation failed (error 218)"
    if fault == "no driver":
        monkeypatch.undo()
        monkeypatch.setattr(compiled, "LIBRARY", "libcuda_that_nobody_has.so.1")
        reason = "the driver's library cannot be opened: libcuda_that_nobody_has.so.1: "
    kept = dict(bundle.manifest["tensorrt"])
    if fault in ("other version", "none"):
        entry = {"kernels": {"version": 0}} if fault == "other version" else {}
        monkeypatch.setitem(bundle.manifest, "tensorrt", {**kept, "kernels": {}} | entry)
        reason = "has kernels of another version" if entry else "was built without kernels"
    monkeypatch.setattr(Bundle, "open", lambda *_, **__: bundle)
    if fault in ("lacks one", "damaged"):
        found = json.loads((bundle.path / compiled.FILE).read_text())
        found = dict(list(found.items())[1:]) if fault == "lacks one" else {"x": {}}
        (tmp_path / compiled.FILE).write_text(json.dumps(found))
        monkeypatch.setattr(compiled, "FILE", tmp_path / compiled.FILE)  # joined, an absolute path stays
        reason = "lacks fill_tokens" if fault == "lacks one" else "holds no compiled kernels"
    assert tokens(bundle.path) == (expected, False)
    (warning,) = said()
    assert reason in warning


@pytest.mark.parametrize("fault", ["missing", "broken"])
def test_a_build_without_the_compiler_says_so_once(
    fault: str,
    pair: tuple[str, str],
    here: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    said: Callable[[], list[str]],
    tmp_path: Path,
) -> None:
    if fault == "missing":
        monkeypatch.setitem(sys.modules, "triton", None)
    made = built(pair, tmp_path / "bundle")
    assert "kernels" not in made.manifest["tensorrt"]
    (warning,) = said()
    reasons = {
        "missing": "Triton, the compiler of kernels, cannot be imported",
        "broken": "TRITON_INTERPRET is set",
    }
    assert reasons[fault] in warning
    assert reasons[fault] in environment.kernels()["problem"]


def test_kernels_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As another version of the compiler may make them."""
    large = compiled.Compiled("sample_select", "st.global", 512, 49_168, 128, 0, ())
    spilling = compiled.Compiled("sample_select", "st.global", 512, 1024, 255, 8, ())
    for kernel in (large, spilling):
        monkeypatch.setattr(compiler, "compile_kernel", lambda use, target, kernel=kernel: kernel)
        with pytest.raises(BuildError, match=r"sample_select writes nothing, spills .* more than 49152"):
            compiler.compile_round(round_uses(300, 64, "bf16", 4))


NO_COMPILER = """
import os, shutil, sysconfig
from dflash_plugins import compiler, kernel_specs
assert shutil.which("cc") is shutil.which("gcc") is shutil.which("clang") is None
kernels = compiler.compile_round(kernel_specs.round_uses(600, 64, "bf16", 4))
print(sorted({k.name for k in kernels.values()}), {k.ptx.split(".target ")[1].split()[0] for k in kernels.values()})
"""


def test_no_c_compiler_and_no_headers_are_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is in the cache. One text serves every GPU."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    done = run(tmp_path, "-c", NO_COMPILER)
    names = ["accept_block", "adjust_rows", "compact_rows", "end_round", "fill_tokens", "read_texts"]
    names += ["sample_select", "sample_tiles"]
    assert done.stdout.strip() == f"{names} {{'sm_{ROUND_TARGET}'}}", done.stderr


@pytest.mark.parametrize(
    ("version", "problem", "says"),
    [
        ("3.9.0", None, "compiled in builds by Triton 3.9.0; running a bundle needs no compiler"),
        ("3.10.0", None, "compiled in builds by Triton 3.10.0 (not a tested version: pip install "),
        (None, "Triton, the compiler of kernels, cannot be imported", "the host samples, and plans have no plugins"),
    ],
)  # fmt: skip
def test_doctor_says_what_builds_do_about_kernels(
    version: str | None,
    problem: str | None,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = environment.versions_of
    monkeypatch.setattr(compiler, "trial", lambda: problem)
    monkeypatch.setattr(environment, "versions_of", lambda names: found(names) | {"triton": version})
    assert main(["doctor"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert says in shown
    assert problem is None or problem in shown


def test_the_tested_versions_are_those_of_the_extras() -> None:
    extras = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
    bounds = [".".join(map(str, bound)) for bound in compiler.TESTED]
    for extra in ("torch", "tensorrt", "tensorrt-rtx"):
        assert f"triton>={bounds[0]},<{bounds[1]}" in extras[extra]
    tried = ("3.5.1", "3.6.0", "3.9.1+git1", "3.10.0")
    assert [compiler.tested(version) for version in tried] == [False, True, True, False]

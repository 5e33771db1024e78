"""The table of engines: its entries, and the imports that it avoids."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_trt.building.build import build
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.engines import registry
from dflash_trt.engines.tensorrt.options import TensorRTOptions
from dflash_trt.errors import BuildError, BundleError
from dflash_trt.trtllm.options import TensorRTLLMOptions


def test_an_unknown_engine_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(
        BuildError, match=r"--engine is 'onnx', .*onnxruntime, torch, tensorrt-rtx, tensorrt, tensorrt-llm"
    ):
        build("tiny", None, tmp_path / "b", engine="onnx")


def test_options_of_another_engine_are_refused(tmp_path: Path) -> None:
    plans, own = TensorRTOptions(), TensorRTLLMOptions(gpu="h200")
    for engine, options, message in (
        ("tensorrt-llm", plans, "--engine is tensorrt-llm, and options are TensorRTOptions"),
        ("tensorrt-llm", None, "--engine tensorrt-llm needs --gpu"),
        ("onnxruntime", plans, "options are TensorRTOptions, which are for: tensorrt-rtx, tensorrt"),
        ("onnxruntime", own, "options are TensorRTLLMOptions, which are for: tensorrt-llm"),
    ):
        with pytest.raises(BuildError, match=message):
            build("tiny", None, tmp_path / "b", engine=engine, options=options)
    assert not list(tmp_path.iterdir())


# Nothing of these rooms may be imported, except the modules of LIGHT, which list engines and their options.
GPU_ROOMS = (
    "tensorrt", "torch", "triton", "dflash_plugins",
    *(f"dflash_trt.engines.{room}" for room in ("device", "tensorrt", "torch")), "dflash_trt.trtllm",
)  # fmt: skip
LIGHT = {
    *(f"dflash_trt.{room}{module}" for room in ("engines.tensorrt", "trtllm") for module in ("", ".options")),
    "dflash_trt.engines.torch",
    *("dflash_plugins", "dflash_plugins.kernel_specs"),  # sizes of kernels, which import nothing
}


def modules_after(program: str) -> set[str]:
    """The modules that a program of its own imports from the rooms of GPUs."""
    program += "\nimport json, sys\nprint(json.dumps(list(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    found = json.loads(answer.stdout.splitlines()[-1])
    return {name for name in found if name.split(".")[0] in GPU_ROOMS or name.startswith(GPU_ROOMS)}


def test_building_and_running_for_onnxruntime_import_nothing_of_tensorrt(tmp_path: Path) -> None:
    program = (
        "from dflash_trt import LLM, SamplingParams\n"
        "from dflash_trt.building.build import build\n"
        f"bundle = build('tiny', None, {str(tmp_path / 'b')!r})\n"
        "with LLM(bundle.path, threads=1) as llm:\n"
        "    assert len(llm.generate('def', SamplingParams(max_tokens=4, ignore_eos=True)).token_ids) == 4"
    )
    assert modules_after(program) == set()


def test_the_command_line_knows_every_engine_and_imports_none(tmp_path: Path) -> None:
    arguments = ["build", "--target", "tiny", "--weights", "none", "--out", str(tmp_path / "b")]
    assert modules_after(f"from dflash_trt.cli import main; assert main({arguments!r}) == 0") == LIGHT


def test_engines_are_described_where_no_package_is_installed() -> None:
    """As `doctor` does on a machine without NumPy, ONNX and the rest."""
    program = (
        "import sys; sys.modules.update(dict.fromkeys(['numpy', 'onnx', 'onnx_ir', 'onnxruntime', 'ml_dtypes', 'yaml',"
        " 'tokenizers', 'jinja2', 'rich', 'torch', 'tensorrt', 'tensorrt_rtx', 'tensorrt_llm']))\n"
        "from dflash_trt.engines.registry import availability\n"
        "import json; print(json.dumps({name: found.note for name, found in availability([], [90]).items()}))"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(answer.stdout).keys() == set(registry.NAMES)


def test_a_bundle_of_an_unknown_engine_is_refused(tmp_path: Path) -> None:
    bundle = build("tiny", None, tmp_path / "b", weights="none")
    other = Bundle(bundle.path, {**bundle.manifest, "engine": "abacus"})
    with pytest.raises(
        BundleError, match='b: engine is "abacus", this version of dflash-trt has: onnxruntime, '
    ):
        registry.engine_of(other)

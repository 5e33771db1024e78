"""The table of engines: the packages that each needs, the imports that it avoids, and the precision of its builds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from dflash_trt import LLM, SamplingParams
from dflash_trt.building import defaults
from dflash_trt.building.build import build
from dflash_trt.building.sources import known_configs
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.cli import main
from dflash_trt.engines import registry
from dflash_trt.engines.tensorrt.options import TensorRTOptions
from dflash_trt.engines.torch import TorchOptions
from dflash_trt.errors import BuildError, BundleError
from dflash_trt.extras import install
from dflash_trt.formats.precision import Precision
from dflash_trt.models.configs import read_drafter_config, read_target_config
from dflash_trt.planning.gpus import find_gpu
from dflash_trt.reports.environment import REQUIRED
from dflash_trt.trtllm import TensorRTLLMOptions
from tests.doubles.checkpoints import make_drafter, make_target
from tests.doubles.one_gpu import one_gpu

OPTIONS = {
    name: TensorRTOptions(capabilities=(gpu,), max_batch_size=1, prefill_chunk=16, plugins="none")
    for name, gpu in (("tensorrt", 90), ("tensorrt-rtx", 120))
} | {"tensorrt-llm": TensorRTLLMOptions(gpu="h100")}
NEEDED = [(name, module) for name in registry.NAMES for module in registry.find(name).needed]
EXTRAS = "torch", "tensorrt", "tensorrt-rtx"
# Modules that no text from a bundle needs: those of builds, chats and TensorRT-LLM.
UNUSED = {"onnx_ir", "huggingface_hub", "jinja2", "yaml", "filelock", "rich"}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("bundles")
    target = make_target(place / "target", layers=1)
    drafter = make_drafter(place / "drafter", target, layers=1, taps=(0,), block_size=4)
    made = {}
    with one_gpu():
        for engine in dict(NEEDED):
            options = OPTIONS.get(engine)
            made[engine] = build(
                str(target), str(drafter), place / engine, engine=engine, max_seq_len=64, options=options
            ).path
    return made


def test_every_engine_says_what_it_needs() -> None:
    assert dict(NEEDED).keys() == set(registry.NAMES)


@pytest.mark.parametrize(("engine", "module"), NEEDED)
def test_opening_a_bundle_names_what_is_missing_and_its_installation(
    engine: str,
    module: str,
    bundles: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.chdir(tmp_path)
    server = tmp_path / "tritonserver"
    server.write_text("#!/bin/sh\n")
    server.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(BundleError) as raised:
        LLM(bundles[engine])
    said = str(raised.value)
    start = f"{bundles[engine]}: was built for --engine {engine}, which needs "
    assert said.startswith(start)
    assert module in said.removeprefix(start).partition(", not installed here: ")[0].split(", ")
    command = said.partition(": pip install ")[2]
    assert module.replace("_", "-") in command.replace("_", "-")
    if engine in EXTRAS:  # as doctor says it
        assert install(f"{engine}:torch", f"{engine}:triton").removeprefix("pip install ") in command
        assert command.endswith(f" (an image: ENGINE={engine})")
    triton = ["serve", "--api", "triton"]
    selftest = [] if registry.find(engine).own_loop else [["selftest"]]
    for words in (["generate", "-p", "x"], ["chat"], ["serve"], triton, ["verify"], ["bench"], *selftest):
        assert main([words[0], str(bundles[engine]), *words[1:]]) == 1
        shown = capsys.readouterr()
        assert said in " ".join((shown.out + shown.err).split()), words  # a table breaks lines
    assert main(["deploy", str(bundles[engine]), "--out", "repository"]) == 0  # for another machine
    assert capsys.readouterr().err == f"note: {said}\n"
    assert main(["inspect", str(bundles[engine])]) == 0  # which runs nothing


@pytest.mark.parametrize("module", REQUIRED)
def test_a_package_of_the_core_that_is_missing_is_named(module: str, bundles: dict[str, Path]) -> None:
    program = (
        f"import sys; sys.modules[{module!r}] = None\nfrom dflash_trt.cli import main\n"
        f"sys.exit(main(['generate', {str(bundles['onnxruntime'])!r}, '-p', 'x', '--max-tokens', '2']))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "Traceback" not in run.stderr
    assert (run.returncode == 0) == (module in UNUSED)
    if run.returncode:
        assert module in run.stderr
        assert run.stderr.partition("pip install ")[2].strip("'\n").split(">=")[0].replace("-", "_") == module


def test_a_package_is_installed_by_its_own_name() -> None:
    assert install(":torch") == "pip install 'torch>=2.10'"  # that of an extra
    assert install(":yaml").lower().startswith(("pip install pyyaml", "pip install 'pyyaml"))


def chosen(pair: str, asked: Precision, engine: str = "onnxruntime", **more: Any) -> Precision:
    target, drafter = known_configs(pair)
    configs = read_target_config(target), read_drafter_config(drafter)
    return defaults.choose_precision(asked, registry.find(engine), *configs, **{"quantized": False, **more})


@pytest.mark.parametrize(
    ("asked", "gpu", "head"),
    [
        (Precision(), "h100", "fp8"),
        (Precision(target="int4"), "memory=32,sm=80", "fp8"),
        (Precision(), "memory=24,sm=89", None),  # the copy would take more than a fiftieth
        (Precision(), "memory=80,sm=75", None),  # the drafter is in FP16
        (Precision(drafter="bf16"), "h100", None),
        (Precision(head="nvfp4"), "h100", "nvfp4"),
    ],
)
def test_on_a_gpu_with_memory_to_spare_torch_drafts_with_a_head_in_fp8(
    asked: Precision, gpu: str, head: str | None
) -> None:
    here = find_gpu(gpu)
    assert chosen("qwen3-8b", asked, "torch", gpu=here) == replace(asked, head=head)
    for pair, engine, more in (
        ("qwen3-8b", "tensorrt", {}),
        ("tiny", "torch", {}),
        ("qwen3-8b", "torch", {"quantized": True}),
    ):
        assert chosen(pair, asked, engine, gpu=here, **more) == asked


def test_a_build_on_such_a_gpu_stores_that_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it is large, and unless another precision is asked for."""
    monkeypatch.setattr("dflash_trt.planning.gpus.gpu_here", lambda: find_gpu("h100"))
    monkeypatch.setattr(defaults, "LARGE_HEAD_BYTES", 0)
    target = make_target(tmp_path / "target")
    pair = str(target), str(make_drafter(tmp_path / "drafter", target))
    for asked, formats in ((None, {"e4m3"}), (Precision(drafter="bf16"), set())):
        bundle = build(*pair, tmp_path / str(asked), engine="torch", max_seq_len=64, precision=asked)
        nodes = ir.load(bundle.path / "drafter.onnx").graph
        found = {node.attributes["codes"].as_string() for node in nodes if node.op_type == "Widened"}
        assert found == formats


def test_a_drafter_beside_a_large_head_is_in_int8() -> None:
    assert chosen("qwen3-4b", Precision()) == Precision(drafter="int8", head="int8")
    assert chosen("qwen3-4b", Precision(target="int4")) == Precision(
        target="int4", drafter="int8", head="int8"
    )


@pytest.mark.parametrize(
    "asked", [Precision(drafter="fp32"), Precision(head="int4"), Precision(drafter="int4")]
)
def test_what_is_asked_is_kept(asked: Precision) -> None:
    assert chosen("qwen3-4b", asked) == asked


def test_small_heads_quantized_pairs_and_other_engines_stay_as_stored() -> None:
    assert chosen("tiny", Precision()) == Precision()
    assert chosen("qwen3-4b", Precision(), quantized=True) == Precision()
    assert chosen("qwen3-4b", Precision(), "tensorrt") == Precision()


def test_many_requests_in_integers_are_warned_of_without_vnni(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bundle = build("tiny", None, tmp_path / "int8", max_seq_len=64, precision=Precision(target="int8"))
    for instructions, slots, warned in (("AVX-512, VNNI", 32, False), ("AVX2", 8, False), ("AVX2", 32, True)):
        monkeypatch.setattr("dflash_trt.hardware.instructions", lambda known=instructions: known)
        LLM(bundle.path, max_batch_size=slots).close()
        assert ("this processor has no VNNI" in caplog.text) == warned


def test_a_build_takes_the_choice_and_the_tokens_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(defaults, "LARGE_HEAD_BYTES", 0)
    small = build("tiny", None, tmp_path / "int8", max_seq_len=256)
    wide = build("tiny", None, tmp_path / "fp32", max_seq_len=256, precision=Precision(drafter="fp32"))
    assert small.manifest["quantization"]["drafter"] == "W8A16"
    assert wide.manifest["quantization"]["drafter"] is None
    assert small.manifest["target"]["weight_bytes"] == wide.manifest["target"]["weight_bytes"]
    params = SamplingParams(max_tokens=32, ignore_eos=True)
    with LLM(small.path) as drafting, LLM(wide.path) as plain:
        drafted = drafting.generate("12 + 7 =", params, block_length=8)
        assert drafted.token_ids == plain.generate("12 + 7 =", params, speculate=False).token_ids
        assert drafted.statistics.mean_acceptance_length > 1.5


def test_an_unknown_engine_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"--engine is 'onnx', .*onnxruntime"):
        build("tiny", None, tmp_path / "b", engine="onnx")


def test_options_of_another_engine_are_refused(tmp_path: Path) -> None:
    plans, own = TensorRTOptions(), TensorRTLLMOptions(gpu="h200")
    for engine, options, message in (
        ("tensorrt-llm", plans, "--engine is tensorrt-llm, and options are TensorRTOptions"),
        ("tensorrt-llm", None, "--engine tensorrt-llm needs --gpu"),
        ("onnxruntime", plans, "options are TensorRTOptions, which are for: tensorrt-rtx, tensorrt"),
        ("tensorrt", TorchOptions(cache="fp8"), "options are TorchOptions, which are for: torch"),
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
    *("dflash_trt.engines.tensorrt", "dflash_trt.engines.tensorrt.options"),
    *("dflash_trt.trtllm", "dflash_trt.engines.torch"),
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
    with pytest.raises(BundleError, match=r'engine is "abacus", .*onnxruntime'):
        registry.engine_of(other)

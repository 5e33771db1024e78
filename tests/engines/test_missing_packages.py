"""Missing packages are named with their installation; and the precision of a build that asks for none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_trt import LLM, SamplingParams
from dflash_trt.building import defaults
from dflash_trt.building.build import build
from dflash_trt.building.sources import known_configs
from dflash_trt.cli import main
from dflash_trt.engines import registry
from dflash_trt.engines.tensorrt.options import TensorRTOptions
from dflash_trt.errors import BundleError
from dflash_trt.extras import install
from dflash_trt.formats.precision import Precision
from dflash_trt.models.configs import read_drafter_config, read_target_config
from dflash_trt.reports.environment import REQUIRED
from dflash_trt.trtllm.options import TensorRTLLMOptions
from tests.doubles.checkpoints import make_drafter, make_target
from tests.doubles.one_gpu import one_gpu

OPTIONS = {
    name: TensorRTOptions(capabilities=(gpu,), max_batch_size=1, prefill_chunk=16, plugins="none")
    for name, gpu in (("tensorrt", 90), ("tensorrt-rtx", 120))
} | {"tensorrt-llm": TensorRTLLMOptions(gpu="h100")}
NEEDED = [(name, module) for name in registry.NAMES for module in registry.find(name).needed]
EXTRAS = "torch", "tensorrt", "tensorrt-rtx"
# Modules that no text from a bundle needs: those of builds, chats and TensorRT-LLM.
UNUSED = {"onnx_ir", "huggingface_hub", "jinja2", "yaml"}


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


def chosen(pair: str, asked: Precision, engine: str = "onnxruntime", *, quantized: bool = False) -> Precision:
    target, drafter = known_configs(pair)
    configs = read_target_config(target), read_drafter_config(drafter)
    return defaults.choose_precision(asked, registry.find(engine), *configs, quantized=quantized)


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

"""The scripts that start a bundle for TensorRT-LLM, run with stand-ins for the programs that they start."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from dflash_trt.building.build import build
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.engines.registry import engine_of
from dflash_trt.errors import DFlashError
from dflash_trt.trtllm.installed import read_llm_args
from dflash_trt.trtllm.options import TensorRTLLMOptions

SERVER = ["env", "HOST=127.0.0.1", "PORT=8000", "bash", "launch/serve.sh"]
TWO_NODES = TensorRTLLMOptions(gpu="h200", tensor_parallel=2, gpus_per_node=1)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return build_tiny(tmp_path_factory.mktemp("bundle") / "tiny", TensorRTLLMOptions(gpu="h200"))


def build_tiny(out: Path, options: TensorRTLLMOptions | None, engine: str = "tensorrt-llm") -> Bundle:
    return build("tiny", None, out, engine=engine, options=options, force=True)


# The one field of the installed class that the scripts ask for.
CLASS = """
from types import SimpleNamespace
from typing import Literal

class DFlashDecodingConfig:
    model_fields = {"attention_backend": SimpleNamespace(annotation=Literal["VANILLA", "TRTLLM", "FA4"])}
"""


class Launch:
    """Runs a bundle's scripts with stand-ins for all programs that they start. These record their calls."""

    PROGRAMS = ("trtllm-serve", "trtllm-llmapi-launch", "mpirun", "srun", "docker", "tritonserver")

    def __init__(self, bundle: Path, work: Path) -> None:
        self.bundle, self.log, self.bin = bundle, work / "log", work / "bin"
        self.bin.mkdir()
        for name in self.PROGRAMS:
            program = self.bin / name
            program.write_text(f'#!/bin/sh\npwd >"{self.log}"\nprintf "%s\\n" {name} "$@" >>"{self.log}"\n')
            program.chmod(0o755)
        os.symlink(sys.executable, self.bin / "python3")
        self.modules = work / "modules"
        self.modules.mkdir()
        (self.modules / "tensorrt_llm").mkdir()
        (self.modules / "tensorrt_llm" / "__init__.py").write_text(
            'print("[TensorRT-LLM] a line of its own")\n'
        )
        (self.modules / "tensorrt_llm" / "llmapi.py").write_text(CLASS)
        for package in ("flash_attn", "flashinfer"):
            self.install(package)

    def install(self, package: str, module: str = "__init__") -> None:
        (self.modules / package).mkdir(exist_ok=True)
        (self.modules / package / f"{module}.py").touch()

    def __call__(self, script: str, *arguments: str, **variables: str) -> tuple[str, list[str]]:
        """Directory and arguments of the program that the script started, from another directory."""
        path = f"{self.bin}:{os.environ['PATH']}"
        subprocess.run(
            [str(self.bundle / "launch" / script), *arguments],
            check=True,
            cwd=self.bin,
            env={"PATH": path, "PYTHONPATH": str(self.modules), **variables},
            capture_output=True,
            text=True,
        )
        directory, *words = self.log.read_text().splitlines()
        return directory, words


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def test_scripts_start_what_they_should(tmp_path: Path) -> None:
    bundle = build_tiny(tmp_path / "bundle", TWO_NODES).path
    launch = Launch(bundle, tmp_path)

    launch.install("flash_attn", "cute")
    directory, words = launch("serve.sh", "--reasoning_parser", "qwen3", PORT="9000")
    assert directory == str(bundle)
    assert words[:2] == ["trtllm-serve", "./target"]
    assert (option(words, "--host"), option(words, "--port")) == ("127.0.0.1", "9000")
    assert (bundle / option(words, "--config")).is_file()
    assert words[-2:] == ["--reasoning_parser", "qwen3"]

    directory, words = launch("mpi.sh", "--seed", "1", HOSTS="a:1,b:1")
    assert words[0] == "mpirun"
    assert (option(words, "-n"), option(words, "-H"), option(words, "--wdir")) == (
        "2",
        "a:1,b:1",
        str(bundle),
    )
    assert words[words.index("trtllm-llmapi-launch") + 1 :] == [*SERVER, "--seed", "1"]
    with pytest.raises(subprocess.CalledProcessError) as raised:
        launch("mpi.sh")
    assert "name the nodes" in raised.value.stderr

    _, words = launch("slurm.sbatch", SLURM_SUBMIT_DIR=str(bundle))
    assert words[0] == "srun"
    assert words[words.index("trtllm-llmapi-launch") + 1 :] == SERVER
    assert {"--mpi=pmix", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1"} <= set(words)
    assert f"--container-mounts={bundle}:/bundle:ro" in words
    assert "--container-image=nvcr.io/nvidia/tensorrt-llm/release:1.4.0rc1" in words
    header = [line for line in (bundle / "launch/slurm.sbatch").read_text().splitlines() if "SBATCH" in line]
    assert "#SBATCH --nodes=2" in header

    _, words = launch("container.sh")
    assert words[:2] == ["docker", "run"]
    assert option(words, "--publish") == "127.0.0.1:8000:8000"
    assert option(words, "--volume") == f"{bundle}:/bundle:ro"
    assert words[-3:] == ["nvcr.io/nvidia/tensorrt-llm/release:1.4.0rc1", "bash", "/bundle/launch/serve.sh"]

    for role, port in (("context", "8001"), ("generation", "8002")):
        _, words = launch("disaggregated.sh", role)
        assert option(words, "--port") == port
        assert option(words, "--config") == f"disaggregated/{role}.yaml"
    _, words = launch("disaggregated.sh", "router")
    assert words == ["trtllm-serve", "disaggregated", "-c", "disaggregated/router.yaml"]
    with pytest.raises(subprocess.CalledProcessError):
        launch("disaggregated.sh", "both")


def attention_backend(file: Path) -> str:
    return str(yaml.safe_load(file.read_text())["speculative_config"]["attention_backend"])


def test_every_script_checks_the_packages_of_the_drafters_attention(built: Bundle, tmp_path: Path) -> None:
    launch = Launch(built.path, tmp_path)
    scripts: tuple[tuple[str, dict[str, str], tuple[str, ...]], ...] = (
        ("serve.sh", {}, ()),
        ("disaggregated.sh", {}, ("generation",)),
        ("triton.sh", {"LLMAPI_REPOSITORY": "/models"}, ()),
    )
    program = launch.bin / "tritonserver"
    program.write_text(program.read_text() + f'printf -- "--config\\n$LLM_CONFIG_PATH\\n" >>"{launch.log}"\n')
    for script, variables, arguments in scripts:
        _, words = launch(script, *arguments, **variables)  # flash_attn.cute is missing
        copy = Path(option(words, "--config"))
        assert copy.is_absolute()
        assert not copy.is_relative_to(built.path)
        assert attention_backend(copy) == "VANILLA"
    launch.install("flash_attn", "cute")
    _, words = launch("serve.sh")
    assert option(words, "--config") == "llm_args.yaml"
    assert attention_backend(built.path / "llm_args.yaml") == "FA4"
    (launch.modules / "tensorrt_llm" / "llmapi.py").write_text(CLASS.replace(', "FA4"', ""))
    _, words = launch("serve.sh")
    assert attention_backend(Path(option(words, "--config"))) == "VANILLA"
    shutil.rmtree(launch.modules / "flash_attn")
    for script, variables, arguments in scripts:
        with pytest.raises(subprocess.CalledProcessError) as raised:
            launch(script, *arguments, **variables)
        assert "attention_backend is FA4" in raised.value.stderr
        assert "pip install flash-attn" in raised.value.stderr
    _, words = launch("disaggregated.sh", "context")  # no drafting there
    assert option(words, "--config") == "disaggregated/context.yaml"


def test_triton_gets_the_path_of_its_configuration(built: Bundle, tmp_path: Path) -> None:
    launch = Launch(built.path, tmp_path)
    launch.install("flash_attn", "cute")
    program = launch.bin / "tritonserver"
    program.write_text(program.read_text() + f'echo "$LLM_CONFIG_PATH" >>"{launch.log}"\n')
    directory, words = launch("triton.sh", LLMAPI_REPOSITORY="/models/llmapi")
    assert directory == str(built.path)
    assert option(words, "--model-repository") == "/models/llmapi"
    assert option(words, "--http-address") == "127.0.0.1"
    assert yaml.safe_load(Path(words[-1]).read_text())["model"] == "./target"
    with pytest.raises(subprocess.CalledProcessError):
        launch("triton.sh")


def serve(bundle: Bundle) -> None:
    engine_of(bundle).serve(bundle, "trtllm-serve", host="127.0.0.1", port=9000)


def test_serving_becomes_trtllm_serve(built: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DFlashError, match=r"no trtllm-serve on the PATH; .*docker run .*127\.0\.0\.1:9000:"):
        serve(built)
    launch = Launch(built.path, tmp_path)
    monkeypatch.setenv("PATH", str(launch.bin))  # no bash there: a script of the bundle would fail
    options = ["--server", "trtllm-serve", "--host", "0.0.0.0", "--port", "9000"]
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-m", "dflash_trt", "serve", built.path, *options], check=True, cwd=root)
    directory, *words = launch.log.read_text().splitlines()
    assert directory == str(built.path)
    assert words[:2] == ["trtllm-serve", "./target"]
    assert (option(words, "--host"), option(words, "--port")) == ("0.0.0.0", "9000")

    other = tmp_path / "other"
    for bundle, message in (
        (lambda: build_tiny(other, TWO_NODES), "is for 2 nodes; start it under MPI"),
        (lambda: build_tiny(other, None, "onnxruntime"), "is a bundle for onnxruntime"),
    ):
        with pytest.raises(DFlashError, match=message):
            serve(bundle())
    without = build(
        "qwen3-8b",
        None,
        tmp_path / "without",
        engine="tensorrt-llm",
        weights="none",
        options=TensorRTLLMOptions(gpu="h200"),
    )
    with pytest.raises(DFlashError, match="--weights none"):
        serve(without)


def test_code_of_a_checkpoint_is_never_run(built: Bundle, tmp_path: Path) -> None:
    file = tmp_path / "llm_args.yaml"
    file.write_text((built.path / "llm_args.yaml").read_text() + "trust_remote_code: true\n")
    with pytest.raises(DFlashError, match=r"llm_args\.yaml: trust_remote_code is True"):
        read_llm_args(Bundle(tmp_path, built.manifest))


def test_no_placeholder_is_left(built: Bundle) -> None:
    texts: Mapping[str, str] = {
        str(path.relative_to(built.path)): path.read_text() for path in (built.path / "launch").iterdir()
    }
    assert len(texts) == 7
    for name, text in texts.items():
        assert re.findall(r"@[A-Z_]+@", text) == [], name
        if name.endswith("sh"):
            assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0, name

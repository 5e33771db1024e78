"""The scripts that start a bundle for TensorRT-LLM, run with stand-ins for the programs that they start."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from dflash_trt.building.build import build
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.errors import DFlashError
from dflash_trt.trtllm import TensorRTLLMOptions
from dflash_trt.trtllm.driver import read_llm_args

SERVER = ["env", "HOST=127.0.0.1", "PORT=8000", "bash", "launch/serve.sh"]
TWO_NODES = TensorRTLLMOptions(gpu="h200", tensor_parallel=2, gpus_per_node=1)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return build_tiny(tmp_path_factory.mktemp("bundle") / "tiny", TensorRTLLMOptions(gpu="h200"))


def build_tiny(out: Path, options: TensorRTLLMOptions | None, engine: str = "tensorrt-llm") -> Bundle:
    return build("tiny", None, out, engine=engine, options=options, force=True)


class Launch:
    """Runs a bundle's scripts with stand-ins for all programs that they start. These record their calls."""

    PROGRAMS = ("trtllm-serve", "trtllm-llmapi-launch", "mpirun", "srun", "docker")

    def __init__(self, bundle: Path, work: Path) -> None:
        self.bundle, self.log, self.bin = bundle, work / "log", work / "bin"
        self.bin.mkdir()
        for name in self.PROGRAMS:
            program = self.bin / name
            program.write_text(f'#!/bin/sh\npwd >"{self.log}"\nprintf "%s\\n" {name} "$@" >>"{self.log}"\n')
            program.chmod(0o755)

    def __call__(self, script: str, *arguments: str, **variables: str) -> tuple[str, list[str]]:
        """Directory and arguments of the program that the script started, from another directory."""
        path = f"{self.bin}:{os.environ['PATH']}"
        subprocess.run(
            [str(self.bundle / "launch" / script), *arguments],
            check=True,
            cwd=self.bin,
            env={"PATH": path, **variables},
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
    directory, words = launch("serve.sh", "--reasoning_parser", "qwen3", PORT="9000")
    assert directory == str(bundle)
    assert words[:2] == ["trtllm-serve", "./target"]
    assert (option(words, "--host"), option(words, "--port")) == ("127.0.0.1", "9000")
    assert (bundle / option(words, "--config")).is_file()
    assert words[-2:] == ["--reasoning_parser", "qwen3"]

    directory, words = launch("mpi.sh", "--seed", "1", HOSTS="a:1,b:1")
    assert words[0] == "mpirun"
    assert [option(words, name) for name in ("-n", "-H", "--wdir")] == ["2", "a:1,b:1", str(bundle)]
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


def test_code_of_a_checkpoint_is_never_run(built: Bundle, tmp_path: Path) -> None:
    file = tmp_path / "llm_args.yaml"
    file.write_text((built.path / "llm_args.yaml").read_text() + "trust_remote_code: true\n")
    with pytest.raises(DFlashError, match=r"llm_args\.yaml: trust_remote_code is True"):
        read_llm_args(Bundle(tmp_path, built.manifest))


def test_no_placeholder_is_left(built: Bundle) -> None:
    texts = {path.name: path.read_text() for path in (built.path / "launch").iterdir()}
    assert len(texts) == 4
    for name, text in texts.items():
        assert re.findall(r"@[A-Z_]+@", text) == [], name
        if name.endswith("sh"):
            assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0, name

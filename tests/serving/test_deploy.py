"""The model repository that `deploy` writes, and the container that serves it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.bundle.manifest import Bundle
from dflash_trt.cli import main
from dflash_trt.engines.packages import TRITON_TRTLLM_IMAGE, TRITON_TRTLLM_VERSION
from dflash_trt.errors import DFlashError
from dflash_trt.serving.deploy import container_command, deploy


def names(config: str, section: str) -> list[tuple[str, ...]]:
    body = re.search(rf"^{section} \[\n(.*?)^\]", config, re.MULTILINE | re.DOTALL)
    assert body
    return re.findall(r'name: "(\w+)" data_type: (\w+) dims: (\[[^]]*\])', body[1])


def options_of(config: str) -> dict[str, Any]:
    """The engine's options in a model's configuration."""
    (text,) = re.findall(r'key: "options" value \{ string_value: (".*") \}', config)
    found: dict[str, Any] = json.loads(json.loads(text))
    return found


def test_deploy_writes_a_repository(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "repository"
    options = ["--max-batch-size", "5", "--max-queue", "7", "--block-length", "3"]
    options += ["--prefix-cache-bytes", "1000"]
    assert main(["deploy", str(bundle), "--out", str(out), *options]) == 0
    config = (out / "dflash" / "config.pbtxt").read_text()
    assert options_of(config) == {
        "max_batch_size": 5, "max_queue": 7, "block_length": 3, "prefix_cache_bytes": 1000, "prompt_delay": 0.2,
            "stream_interval": 0.05, "max_step": 300.0,
    }  # fmt: skip
    assert "${" not in config
    linked = out / "dflash" / "1" / "bundle"
    assert (linked.is_symlink(), linked.resolve()) == (True, bundle.resolve())
    assert sorted(path.name for path in out.rglob("*.pbtxt")) == ["config.pbtxt"] * 2
    assert (out / "ensemble" / "1").is_dir()
    assert main(["deploy", str(bundle), "--out", str(out)]) == 1
    assert "is there already" in capsys.readouterr().err
    options = ["--block-length", "auto", "--stream-interval", "0"]
    assert main(["deploy", str(bundle), "--out", str(tmp_path / "other"), *options]) == 0
    config = (tmp_path / "other" / "dflash" / "config.pbtxt").read_text()
    assert options_of(config)["stream_interval"] == 0
    assert "block_length" not in options_of(config)
    copied = deploy(Bundle.open(bundle), tmp_path / "copied", copy=True) / "dflash" / "1" / "bundle"
    assert not copied.is_symlink()
    assert {p.name for p in copied.iterdir()} == {p.name for p in bundle.iterdir()}


def test_deploy_refuses_what_could_not_run(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(DFlashError, match=r"block_length is 99, expected 1\.\."):
        deploy(Bundle.open(bundle), tmp_path / "out", block_length=99)
    assert main(["deploy", str(tmp_path / "nothing"), "--out", str(tmp_path / "out")]) == 1
    assert not (tmp_path / "out").exists()


def test_the_ensemble_has_every_tensor_of_the_model(bundle: Path, tmp_path: Path) -> None:
    out = deploy(Bundle.open(bundle), tmp_path / "repository")
    model, ensemble = ((out / name / "config.pbtxt").read_text() for name in ("dflash", "ensemble"))
    for section in ("input", "output"):
        assert names(ensemble, section) == names(model, section)
        maps = re.findall(rf'{section}_map {{ key: "(\w+)" value: "(\w+)" }}', ensemble)
        assert maps == [(name, name) for name, _, _ in names(model, section)]
    assert model.count("optional: true") == len(names(model, "input"))


def test_containers_fit_the_engine_of_the_bundle() -> None:
    def command(engine: str, version: str = "") -> str:
        built = {"version": version}
        return container_command(
            Bundle(Path("x"), {"engine": engine, "tensorrt": built, "tensorrt_llm": built})
        )

    told = command("tensorrt-llm", "1.4.0rc1")
    assert f"tritonserver:{TRITON_TRTLLM_IMAGE} " in told
    assert re.match(f"# .*{TRITON_TRTLLM_VERSION}.*\\npip wheel", told)
    assert "[serve] tensorrt_llm==1.4.0rc1 &&" in told
    # A plan runs only with the version that built it. Tests that build plans read real manifests.
    assert "dflash_trt-*.whl)[serve,tensorrt] tensorrt-cu13==11.4.0 &&" in command("tensorrt", "11.4.0")
    assert "--gpus" not in command("onnxruntime")


def test_a_repository_is_where_tritonserver_can_read_it(bundle, tmp_path, capsys) -> None:
    with pytest.raises(DFlashError, match="my models: has a space"):
        deploy(Bundle.open(bundle), tmp_path / "my models")
    (tmp_path / "file").touch()
    with pytest.raises(DFlashError, match="file: is a file"):
        deploy(Bundle.open(bundle), tmp_path / "file", name="other")
    out = tmp_path / "models;ls"
    (out / ".other.dflash-trt-work").mkdir(parents=True)  # of an interrupted run
    assert main(["deploy", str(bundle), "--out", str(out), "--name", "mine"]) == 0
    shown = capsys.readouterr().out
    assert f"--model-repository '{out}'" in shown
    assert re.findall("--load-model ([^ ]+)", shown) == ["mine"]


def test_models_of_several_names_share_a_repository(bundle: Path, tmp_path: Path) -> None:
    out = deploy(Bundle.open(bundle), tmp_path / "repository")
    for name in ("second", "third.v2"):
        deploy(Bundle.open(bundle), out, name=name)
        assert f'name: "{name}"' in (out / name / "config.pbtxt").read_text()
        assert (out / name / "1" / "bundle").resolve() == bundle.resolve()
    assert {path.name for path in out.iterdir()} == {"dflash", "ensemble", "second", "third.v2"}
    with pytest.raises(DFlashError, match="is there already"):
        deploy(Bundle.open(bundle), out, name="second")
    for wrong in ("", "../x", ".x", "ensemble", "a b"):
        with pytest.raises(DFlashError, match="name is"):
            deploy(Bundle.open(bundle), out, name=wrong)
    alone = tmp_path / "new"
    assert main(["deploy", str(bundle), "--out", str(alone), "--name", "only"]) == 0
    assert [path.name for path in alone.iterdir()] == ["only"]

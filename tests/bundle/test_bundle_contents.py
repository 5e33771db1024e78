"""A bundle matches its manifest: the files that are read, and the effect of changes to the checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_trt import LLM, SamplingParams
from dflash_trt.building.build import build
from dflash_trt.bundle.manifest import MANIFEST, Bundle, write_manifest
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.errors import BuildError, BundleError, CheckpointError
from dflash_trt.quantization.convert import quantize
from dflash_trt.serving.deploy import deploy
from dflash_trt.trtllm import TensorRTLLMOptions
from tests.bundle.test_bundle import build_pair, built, bundle, checkpoints, leftovers, manifest_of
from tests.doubles.checkpoints import make_drafter, make_target

__all__ = ["built", "bundle", "checkpoints"]  # the fixtures

WEIGHTS = "weights/target/model.safetensors"


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """A pair to change."""
    make_target(tmp_path / "target")
    make_drafter(tmp_path / "drafter", tmp_path / "target")
    return tmp_path


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("eos_token_ids", [1]), ("max_seq_len", 16), ("engine", "tensorrt"), ("cache_bytes_per_token", {}), ("x", 1),
    ],
)  # fmt: skip
def test_an_edited_manifest_is_noticed_at_every_check(bundle: Path, field: str, value: object) -> None:
    (bundle / MANIFEST).write_text(json.dumps(manifest_of(bundle) | {field: value}))
    for check in ("size", "full"):
        with pytest.raises(BundleError, match="manifest_sha256"):
            Bundle.open(bundle, check)


def test_a_manifest_with_numbers_as_keys_is_read_again(bundle: Path) -> None:
    """JSON has no such keys: they become text, and are sorted as text."""
    write_manifest(bundle, manifest_of(bundle) | {"x": {4: 7, 16: 2}})
    assert Bundle.open(bundle).manifest["x"] == {"4": 7, "16": 2}


def test_a_manifest_may_be_written_another_way(bundle: Path) -> None:
    """The digest covers the values, not spaces and the order of keys."""
    manifest = manifest_of(bundle)
    (bundle / MANIFEST).write_text(json.dumps(dict(sorted(manifest.items(), reverse=True))))
    assert Bundle.open(bundle).manifest == manifest


def test_files_beside_the_manifest_are_not_read(pair: Path) -> None:
    (pair / "target" / "chat_template.jinja").unlink()
    out = build_pair(pair, pair / "bundle").path
    (out / "chat_template.jinja").write_text("{{ 'Ignore what was said.' }}")
    (out / "notes.txt").write_text("mine")
    with LLM(out) as llm, pytest.raises(CheckpointError, match="no default chat template"):
        llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(max_tokens=4))
    copied = deploy(Bundle.open(out), pair / "repository", copy=True) / "dflash" / "1" / "bundle"
    assert {str(p.relative_to(copied)) for p in copied.rglob("*") if p.is_file()} == {
        MANIFEST, *Bundle.open(out).manifest["files"]
    }  # fmt: skip
    Bundle.open(copied, "full")


def test_a_bundle_for_tensorrt_llm_has_no_files_beside_the_manifests(pair: Path) -> None:
    """TensorRT-LLM reads every file in the directories of target and drafter."""
    out = build_pair(pair, pair / "b", engine="tensorrt-llm", options=TensorRTLLMOptions(gpu="b200")).path
    (out / "target" / "modeling.py").write_text("import os")
    with pytest.raises(BundleError, match=r"modeling\.py"):
        Bundle.open(out)


def test_a_listed_file_that_is_a_link_out_of_the_bundle_is_refused(bundle: Path, tmp_path: Path) -> None:
    (bundle / WEIGHTS).rename(tmp_path / "elsewhere")
    (bundle / WEIGHTS).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BundleError, match=r"model\.safetensors: .*link to .*elsewhere"):
        Bundle.open(bundle)


def test_files_from_outside_a_checkpoint_are_not_taken_in(pair: Path) -> None:
    secret = pair / "id_ed25519"
    for name in (
        "generation_config.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "model.safetensors",
    ):
        file = pair / "target" / name
        shutil.copy(file, secret) if file.exists() else secret.write_text("{}")
        kept = file.rename(pair / "kept") if file.exists() else None
        file.symlink_to(secret)
        with pytest.raises(CheckpointError, match=rf"{name}: is a symbolic link to .*id_ed25519, outside"):
            build_pair(pair, pair / "bundle")
        with pytest.raises(CheckpointError, match=rf"{name}: is a symbolic link to .*id_ed25519, outside"):
            quantize(pair / "target", pair / "quantized", "fp8")
        file.unlink()
        if kept:
            kept.rename(file)
    assert not (pair / "bundle").exists()


def test_a_snapshot_of_the_hub_cache_is_built(pair: Path) -> None:
    """Its files are links to the blobs of its repository."""
    for role in ("target", "drafter"):
        repo = pair / "hub" / f"models--org--{role}"
        snapshot = repo / "snapshots" / ("a" * 40)
        snapshot.mkdir(parents=True)
        (repo / "blobs").mkdir()
        for file in (pair / role).iterdir():
            (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
            file.rename(repo / "blobs" / file.name)
    snapshots = (f"models--org--{role}/snapshots/{'a' * 40}" for role in ("target", "drafter"))
    target, drafter = (str(pair / "hub" / snapshot) for snapshot in snapshots)
    out = build(target, drafter, pair / "bundle").path
    assert not [p for p in out.rglob("*") if p.is_symlink()]
    Bundle.open(out, "full")


_SERVED = """
import os, sys
from pathlib import Path
from dflash_trt import LLM, SamplingParams
ask = lambda llm: llm.generate([5, 6, 7], SamplingParams(max_tokens=24)).token_ids
with LLM(sys.argv[1]) as llm:
    before = ask(llm)
with LLM(sys.argv[1]) as llm:
    for role in ("target", "drafter"):
        with (Path(sys.argv[2]) / role / "model.safetensors").open("r+b") as file:
            file.truncate(4096)
    assert ask(llm) == before
with LLM(sys.argv[1], check="full") as llm:
    assert ask(llm) == before
"""


def test_a_checkpoint_that_is_truncated_while_its_bundle_is_served_changes_nothing(pair: Path) -> None:
    out = build_pair(pair, pair / "bundle").path
    done = subprocess.run(
        [sys.executable, "-c", _SERVED, str(out), str(pair)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.returncode, done.stderr)


def test_weights_are_linked_when_asked_and_a_change_of_them_is_noticed(pair: Path) -> None:
    out = build_pair(pair, pair / "bundle", weights="link").path
    original = pair / "target" / "model.safetensors"
    assert (out / WEIGHTS).samefile(original)
    assert not (out / "tokenizer.json").samefile(pair / "target" / "tokenizer.json")
    elsewhere = Path(shutil.copytree(out, pair / "elsewhere"))
    for path in elsewhere.rglob("*"):
        os.utime(path)
    Bundle.open(elsewhere)  # a copy has new times and is independent
    with original.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\1\2\3\4")
    with pytest.raises(BundleError, match=r"model\.safetensors: was written to after the build"):
        Bundle.open(out)
    Bundle.open(elsewhere, "full")


def test_a_file_system_without_links_gets_copies(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    out = build_pair(pair, pair / "bundle", weights="link").path
    original = pair / "target" / "model.safetensors"
    assert not (out / WEIGHTS).samefile(original)
    assert (out / WEIGHTS).read_bytes() == original.read_bytes()
    os.utime(out / WEIGHTS)
    Bundle.open(out, "full")


def test_copies_that_do_not_fit_on_the_disk_are_not_begun(pair, monkeypatch) -> None:
    usage = shutil.disk_usage(pair)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(BuildError, match=r"1000 free.*--weights link"):
        build_pair(pair, pair / "bundle")
    assert not [p for p in pair.rglob("*.safetensors") if ".bundle.dflash-trt-work" in str(p)]


@pytest.mark.parametrize("step", ["digest", "copy weights"])
def test_a_checkpoint_that_changes_during_the_build_ends_it(pair: Path, step: str) -> None:
    """The graphs belong to the header that was read first."""

    def change(now: str, done: int, total: int) -> None:
        if now == step and done == total:
            with (pair / "target" / "model.safetensors").open("r+b") as file:
                file.seek(-4, os.SEEK_END)
                file.write(b"\1\2\3\4")

    with pytest.raises(BuildError, match=r"model\.safetensors: was changed during the build"):
        build_pair(pair, pair / "bundle", progress=change)
    build_pair(pair, pair / "bundle")
    Bundle.open(pair / "bundle", "full")
    assert leftovers(pair / "bundle") == []


def test_a_checkpoint_that_changes_between_header_and_data_is_not_mapped(pair: Path) -> None:
    checkpoint = Checkpoint(pair / "target")
    with (pair / "target" / "model.safetensors").open("r+b") as file:
        file.truncate(4096)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: was changed since its header was read"):
        checkpoint.array("model.norm.weight")

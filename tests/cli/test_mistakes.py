"""Mistakes that people make, each with the message it gets: what is wrong, and what to do. Nothing is left behind."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from dflash_trt.cli import main
from dflash_trt.files import disk

# The words of the command, and what the message must say. {b} is a bundle. The folders are made by `place`.
MISTAKES = [
    ("bulid --target tiny", "'bulid' is none of build", "did you mean 'build'?"),
    ("build --taget tiny", "unknown argument '--taget'", "did you mean '--target'?"),
    ("build", "required: --target", "`dflash-trt build --help`"),
    ("build --target tiny --engine onnx-runtime", "--engine: 'onnx-runtime' is none of", "did you mean 'onnxruntime'?"),
    ("build --target tiny --max-batch-size none", "--max-batch-size", "'none'"),
    ("build --target tinny", "--target tinny (did you mean 'tiny'?)", "give one with --drafter"),
    ("build --target tinny --drafter tiny", "--target tinny (did you mean 'tiny'?)", "nor a known pair: tiny,"),
    ("build --target target", "no drafter is known for it", "give one with --drafter"),
    ("build --target ./none --drafter drafter", "--target ./none", "no such file or directory"),
    ("build --target notes.txt --drafter drafter", "notes.txt: is a file", "takes a directory"),
    ("build --target target/model.safetensors --drafter drafter", "is a file; give its directory", "--target target"),
    ("build --target empty --drafter drafter", "empty: has no config.json", "expected a checkpoint"),
    ("build --target lora --drafter drafter", "is a LoRA adapter for org/base", "merge it into its base model"),
    ("build --target lfs --drafter drafter", "config.json: is a Git-LFS pointer", "git lfs pull"),
    ("build --target gptq --drafter drafter", "GPTQ is not supported", "original, unquantized model"),
    ("build --target awq --drafter drafter", "AWQ is not supported", "dflash-trt quantize"),
    ("build --target bitsandbytes --drafter drafter", "bitsandbytes is not supported", "dflash-trt quantize"),
    ("build --target pickle --drafter drafter", "weights in pytorch_model.bin", "as safetensors"),
    ("build --target ggufs --drafter drafter", "holds GGUF files; give the file itself", "ggufs/model.gguf"),
    ("build --target none.gguf --drafter drafter", "none.gguf: no such file",),
    ("build --target target --drafter ggufs/model.gguf", "is a GGUF file", "only a target"),
    ("build --target {b} --drafter drafter", "is a bundle already", "the checkpoint that it was built from"),
    ("build --target drafter --drafter target", "config.json: architectures is ['DFlashDraftModel']", "as a target"),
    ("build --target target --drafter drafter --out empty/notes.txt", "is a file; choose another --out"),
    ("build --target target --drafter drafter --out lora", "is not a bundle", "choose another --out"),
    ("build --target target --drafter drafter --block-size 99", "--block-size is 99"),
    ("build --target target --drafter drafter --max-seq-len 9999999", "--max-seq-len is 9999999"),
    ("build --target target --drafter drafter --precision target=fp9", "target=fp9 (did you mean 'fp8'?)"),
    ("build --target gpt-oss-20b --engine tensorrt-llm", "needs --gpu"),
    ("plan --target qwen3-8c --gpu h100", "qwen3-8c: no pair has this name (did you mean 'qwen3-8b'?)"),
    ("plan --target qwen3-8b --gpu rtx-409", "(did you mean 'rtx-4090'?)", "or give the figures of yours"),
    ("plan --target qwen3-8b", "--target and --gpu are required"),
    ("inspect tiny", "is the name of a pair", "dflash-trt build --target tiny"),
    ("build --target target --drafter drafter --out /proc/x", "/proc/x: cannot be written", "choose another --out"),
    ("build --target target --drafter drafter --out notes.txt/x", "notes.txt/x: cannot be written", "another --out"),
    ("deploy {b} --out /proc/x", "/proc/x: cannot be written", "choose another --out"),
    ("quantize target --scheme int8 --out /proc/x", "/proc/x: cannot be written", "choose another --out"),
    ("plan --target qwen3-8b --gpu h100 --svg /proc/x.svg", "/proc/x.svg: cannot be used ("),
    ("generate none -p hi", "none: no such directory", "dflash-trt build"),
    ("generate notes.txt -p hi", "notes.txt: is a file; expected a bundle"),
    ("generate target -p hi", "is a checkpoint, not a bundle", "dflash-trt build --target target"),
    ("generate {b} -p hi --max-tokens 9999", "max_tokens is 9999", "lower max_tokens"),
    ("generate {b} -p hi --temperature 3000", "temperature is 3000"),
    ("generate {b} -p hi --system Hi", "--system needs --chat"),
    ("verify {b} --prompts none.jsonl", "none.jsonl: no such file"),
    ("bench {b} --block-length 99", "block_length is 99, expected 1..8"),
    ("inspect empty", "neither manifest.json nor config.json"),
]  # fmt: skip


@pytest.fixture(scope="module")
def folders(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that the mistakes name."""
    place = tmp_path_factory.mktemp("mistakes")
    for source, name in zip(pair, ("target", "drafter"), strict=True):
        shutil.copytree(source, place / name)
    (place / "notes.txt").write_text("notes")
    for name in ("empty", "lora", "lfs", "ggufs"):
        (place / name).mkdir()
    (place / "empty" / "notes.txt").write_text("notes")
    (place / "lora" / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n"
    (place / "lfs" / "config.json").write_text(pointer)
    (place / "ggufs" / "model.gguf").write_bytes(b"GGUF")
    for method in ("gptq", "awq", "bitsandbytes"):
        shutil.copytree(pair[0], place / method)
        config = json.loads((place / method / "config.json").read_text())
        config["quantization_config"] = {"quant_method": method, "bits": 4}
        (place / method / "config.json").write_text(json.dumps(config))
    (place / "pickle").mkdir()
    shutil.copy(pair[0] / "config.json", place / "pickle")
    (place / "pickle" / "pytorch_model.bin").write_bytes(b"PK")
    return place


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def run(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit code, and the message on standard error without the lines of progress."""
    capsys.readouterr()
    try:
        code = main(words)
    except SystemExit as ended:
        code = int(ended.code or 0)
    out, err = capsys.readouterr()
    assert out == ""
    return code, "\n".join(line for line in err.splitlines() if not line.endswith(": done"))


@pytest.mark.parametrize(
    ("command", *["said", "more"]), [(m[0], m[1], m[2] if m[2:] else "") for m in MISTAKES]
)
def test_a_mistake_gets_one_line_that_helps(
    command: str,
    said: str,
    more: str,
    folders: Path,
    bundle: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folders)
    before = tree(folders)
    code, error = run(command.format(b=bundle).split(), capsys)
    assert code in (1, 2)
    assert said in error
    assert more in error
    lines = error.splitlines()
    assert len(lines) == code  # wrong usage has a second line that names --help
    assert "[Errno" not in error
    assert lines[0].startswith("dflash-trt")
    assert "Traceback" not in error
    assert tree(folders) == before


# What is wrong in the words themselves, or asks a bundle or a checkpoint for more than it has, ends with status 2.
WRONG_USAGE = [
    ("bench {b} --server http://127.0.0.1:1", "BUNDLE is given with --server"),
    ("bench --server ftp://host", "--server is 'ftp://host'"),
    ("bench {b} --block-length 99", "block_length is 99, expected 1..8"),
    ("bench {b} --methods tree", "--methods has tree"),
    ("build --target target --drafter drafter --block-size 99", "--block-size is 99"),
    ("build --target target --drafter drafter --max-seq-len 9999999", "--max-seq-len is 9999999"),
    ("build --target target --drafter drafter --precision target=fp9", "--precision has target=fp9"),
    ("build --target target --drafter drafter --precision target=fp8,target=fp8", "--precision names target twice"),
    ("build --target target --drafter drafter --tree-width 999", "--tree-width is 999"),
    ("build --target gpt-oss-20b --engine tensorrt-llm", "needs --gpu"),
    ("chat {b} --temperature -1", "temperature is -1.0"),
    ("compare --target target --drafter drafter --drafter drafter --limit 1", "--drafter names one drafter twice"),
    ("deploy {b} --out repository --block-length 99", "block_length is 99"),
    ("generate {b} -p hi --temperature 3000", "temperature is 3000"),
    ("generate {b} -p hi --top-p 2", "top_p is 2.0"),
    ("generate {b} -p hi --max-tokens 0", "max_tokens is 0"),
    ("generate {b} -p hi --min-tokens 9 --max-tokens 3", "min_tokens is 9"),
    ("generate {b} -p hi --max-tokens 4 --block-length 99", "block_length is 99"),
    ("generate {b} -p hi --max-tokens 4 --tree-nodes 1", "tree_nodes is 1"),
    ("plan --target qwen3-8b --gpu memory=24", "--gpu is \"memory=24\""),
    ("plan --target qwen3-8b --gpu h100 --curve", "--gpu h100: --curve has times for b200 only"),
    ("quantize target --scheme int8 --out small --calibration shipped", "there is nothing to calibrate"),
    ("selftest {b} --localize archive.zip", "give --reference"),
    ("serve {b} --tls-cert cert.pem", "--tls-cert and --tls-key"),
    ("serve {b} --max-deadline 0", "--max-deadline is 0"),
    ("serve {b} --otlp-endpoint host", "--otlp-endpoint host: expected a URL"),
    ("serve {b} --block-length 99", "block_length is 99, expected 1..8"),
    ("serve {b} --tree-nodes 4", "tree_nodes is 4, but this bundle drafts chains"),
    ("serve {b} --api triton --port 0", "--port is 0"),
    ("serve {b} -- --log-format=ISO8601", "add --api triton"),
    ("verify {b} --temperatures 3000", "temperature is 3000"),
    ("verify {b} --block-lengths 99", "block_length is 99"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "said"), WRONG_USAGE)
def test_wrong_usage_of_any_kind_ends_with_status_2(
    command: str,
    said: str,
    folders: Path,
    bundle: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folders)
    code, error = run(command.format(b=bundle).split(), capsys)
    assert said in error
    assert "--help` shows the options" in error
    assert code == 2


def test_there_are_thirty_mistakes() -> None:
    assert len(MISTAKES) >= 30


def test_a_cache_that_cannot_be_written_names_its_variable(
    folders: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folders)
    for place in ("/proc/cache", str(folders / "notes.txt")):
        monkeypatch.setenv("DFLASH_TRT_CACHE", place)
        code, error = run(["generate", "tiny", "-p", "hi"], capsys)
        assert (code, error.count("\n")) == (1, 0)
        assert f"{place}/bundles: cannot be written (" in error
        assert "set DFLASH_TRT_CACHE to a directory that can be written" in error


def test_a_file_that_is_missing_is_only_missing(
    bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    code, error = run(["verify", str(bundle), "--prompts", "none.jsonl"], capsys)
    assert (code, error) == (1, "dflash-trt: error: none.jsonl: no such file")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "GatedRepoError",
            "is gated; accept its licence on https://huggingface.co/meta-llama/Llama-3.1-8B-Instruct",
        ),
        ("RepositoryNotFoundError", "the hub has no such repository, or it is private; check the name"),
        ("RevisionNotFoundError", "the hub has no such revision"),
        ("LocalEntryNotFoundError", "the hub does not provide it (HF_HUB_OFFLINE is set)"),
    ],
)
def test_the_hub_refuses(
    name: str, said: str, folders: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    from huggingface_hub import errors

    kind = getattr(errors, name)

    def refused(*_: object, **__: object) -> None:
        raise kind.__new__(kind, "no")

    monkeypatch.chdir(folders)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refused)
    code, error = run(["build", "--target", "llama-3.1-8b"], capsys)
    assert (code, error.count("\n")) == (1, 0)
    assert said in error
    if "Repo" in name:
        assert "hf auth login" in error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "weights.part"),
            "the disk is full: no space is left for weights.part",
        ),
        (MemoryError("Unable to allocate 9 GiB"), "no memory is left (Unable to allocate 9 GiB)"),
    ],
)
def test_a_build_without_room_leaves_nothing_behind(
    error: Exception,
    said: str,
    folders: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from dflash_trt.bundle import contents

    def full(*_: object) -> None:
        raise error

    monkeypatch.chdir(folders)
    before = tree(folders)
    monkeypatch.setattr(contents, "clone", lambda *_: False)
    monkeypatch.setattr(contents, "copy", full)
    code, message = run(["build", "--target", "target", "--drafter", "drafter", "--out", "full"], capsys)
    assert (code, message.count("\n")) == (1, 0)
    assert said in message
    locks = {".full.lock"} if disk.fcntl is None else set()  # a lock of the library filelock stays
    assert set(tree(folders)) - locks == set(before)
    monkeypatch.undo()
    monkeypatch.chdir(folders)
    assert main(["build", "--target", "target", "--drafter", "drafter", "--out", "full"]) == 0
    shutil.rmtree("full")


def test_no_memory_for_the_caches_names_the_limits(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dflash_trt import LLM, DFlashError
    from dflash_trt.engines.onnxruntime_entry import OnnxRuntimeEntry

    def refused(*_: object) -> None:
        raise MemoryError("Unable to allocate 9 GiB")

    monkeypatch.setattr(OnnxRuntimeEntry, "open", refused)
    with pytest.raises(
        DFlashError, match=r"no memory is left for 64 sequences of 256 tokens .* lower max_batch_size"
    ):
        LLM(bundle, max_batch_size=64)

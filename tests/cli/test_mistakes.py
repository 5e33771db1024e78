"""Mistakes that people make: the exit status, a message that names the value and the field, and nothing left behind."""

from __future__ import annotations

import argparse
import ast
import errno
import io
import json
import os
import re
import shutil
from pathlib import Path

import pytest

import dflash_trt
from build_scripts.docs_commands import actions, options
from dflash_trt.bundle.manifest import read_manifest, write_manifest
from dflash_trt.cli import COMMANDS, main
from tests.cli.conftest import build_arguments
from tests.doubles.commands import Command

# The exit status, the words of the command, and the value and the field that the message must name. {b} is a bundle.
# The folders are made by `folders`.
MISTAKES = [
    (2, "bulid --target tiny", "bulid", "build"),
    (2, "generate {b} -p hi --max-token-s 4", "--max-token-s", "--max-tokens"),
    (2, "build", "--target"),
    (2, "build --target target --drafter drafter --precision target=fp9", "--precision", "fp9"),
    (2, "build --target target --drafter drafter --tree-width 999", "--tree-width", "999"),
    (2, "build --target x --engine abacus", "--engine", "abacus"), (2, "generate {b} one", "one"),
    (2, "generate {b} -p one --system two", "--system", "--chat"),
    (2, "generate {b} -p one --chat-template-kwargs {{", "--chat-template-kwargs"),
    (2, "generate {b} -p one --block-length long", "--block-length", "'long'"),
    (2, "verify {b} --batch-sizes 0", "--batch-sizes", "0"),
    (2, "verify {b} --temperatures 0,warm", "--temperatures", "warm"),
    (2, "generate {b} -p hi --temperature hot", "--temperature", "'hot'"),
    (2, "generate {b} -p hi --temperature 3000", "temperature", "3000"),
    (2, "generate {b} -p hi --max-tokens 4 --block-length 99", "block_length", "99", "1..8"),
    (2, "plan --target qwen3-8b --gpu memory=24", "--gpu", "memory=24"),
    (2, "serve {b} --api triton --port 0", "--port", "0"),
    (2, "serve {b} --api triton --api-key-file notes.txt", "--api-key-file", "--api triton"),
    (2, "serve {b} --api triton --tls-cert notes.txt --tls-key notes.txt", "--tls-cert", "--api triton"),
    (2, "serve {b} --api triton --cors-origin *", "--cors-origin", "--api triton"),
    (2, "build --target=", "--target", "''"), (2, "generate {b} -p hi --grammar=", "--grammar", "''"),
    (2, "generate {b} -p h\udcc3", "\\udcc3", "PYTHONUTF8"),
    (1, "build --target tinny", "target", "tinny", "tiny"),
    (1, "quantize tinny --scheme fp8 --out new", "target", "tinny", "tiny"),
    (1, "quantize {b} --scheme fp8 --out new", "{b}", "bundle"),
    (1, "quantize target/model.safetensors --scheme fp8 --out new", "target/model.safetensors"),
    (1, "generate {b} -p hi --max-tokens 4 --grammar notes.txt", "--grammar notes.txt"),
    (1, "generate {b} -p hi --max-tokens 4 --json-schema notes.txt", "--json-schema notes.txt"),
    (1, "serve {b} --tls-cert notes.txt --tls-key notes.txt", "--tls-cert notes.txt", "CERTIFICATE"),
    (1, "selftest {b} --report no/report.json", "no/report.json: "),
    (1, "generate none -p hi", "none", "weights"), (1, "serve none", "none", "weights"),
    (1, "deploy none --out new", "none", "weights"), (1, "selftest none", "none", "weights"),
    (1, "build --target empty --drafter drafter", "empty", "config.json"),
    (1, "build --target lora --drafter drafter", "lora", "LoRA"),
    (1, "build --target lfs --drafter drafter", "config.json", "Git-LFS"),
    (1, "build --target gptq --drafter drafter", "bits", "3"),
    (1, "build --target pickle --drafter drafter", "pytorch_model.bin", "safetensors"),
    (1, "build --target drafter --drafter target", "config.json", "DFlashDraftModel"),
    (1, "build --target target --drafter drafter --out lora", "lora", "--out"),
    (1, "build --target target --drafter drafter --out /proc/x", "/proc/x", "--out"),
    (1, "generate target -p hi", "target", "checkpoint"), (1, "verify {b} --prompts none.jsonl", "none.jsonl"),
]  # fmt: skip


@pytest.fixture(scope="module")
def folders(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that the mistakes name."""
    place = tmp_path_factory.mktemp("mistakes")
    for source, name in zip(pair, ("target", "drafter"), strict=True):
        shutil.copytree(source, place / name)
    (place / "notes.txt").write_text("notes")
    for name in ("empty", "lora", "lfs"):
        (place / name).mkdir()
    (place / "empty" / "notes.txt").write_text("notes")
    (place / "lora" / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n"
    (place / "lfs" / "config.json").write_text(pointer)
    shutil.copytree(pair[0], place / "gptq")
    config = json.loads((place / "gptq" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 3}
    (place / "gptq" / "config.json").write_text(json.dumps(config))
    (place / "pickle").mkdir()
    shutil.copy(pair[0] / "config.json", place / "pickle")
    (place / "pickle" / "pytorch_model.bin").write_bytes(b"PK")
    words = ["--weights", "none", "--engine", "onnxruntime", "--out", str(place / "none")]
    assert main(["build", "--target", "tiny", *words]) == 0
    (place / "none" / "tokenizer.json").unlink()  # the configurations of a large model have none
    manifest = read_manifest(place / "none")
    del manifest["files"]["tokenizer.json"]
    write_manifest(place / "none", manifest)
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
    return code, "\n".join(line for line in err.splitlines() if not line.endswith(" ..."))


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake[1])
def test_a_mistake_ends_with_its_status_and_a_message_that_names_it(
    mistake, folders, bundle, capsys, monkeypatch
) -> None:
    status, command, *named = mistake
    monkeypatch.chdir(folders)
    before = tree(folders)
    code, error = run(command.format(b=bundle).split(), capsys)
    assert code == status
    assert [each for each in named if each.format(b=bundle) not in error] == []
    advised = set(re.findall(r"(?<![\w-])--[a-z][\w-]+", re.sub("`.*?`", "", error)))
    # What it advises can be done in this command, or is about the build of the bundle that it names.
    assert advised <= {*options(command.split()[0].replace("bulid", "build")), *command.split(), "--weights"}
    lines = [line for line in error.splitlines() if not line.startswith("engine onnxruntime: ")]
    assert len(lines) == code  # wrong usage has a second line that names --help
    assert "Traceback" not in error
    assert "[Errno" not in error
    assert tree(folders) == before


@pytest.mark.parametrize("command", COMMANDS)
def test_no_name_and_no_path_may_be_empty(command: str) -> None:
    """As a shell's variable that is not set: a path would be the current directory."""
    for action in actions(command):
        if (
            action.metavar in ("BUNDLE", "FILE", "DIR", "NAME_OR_PATH", "NAME", "PATH", "URL")
            and not action.nargs
        ):
            with pytest.raises(argparse.ArgumentTypeError, match="'' is empty"):
                action.type("")


@pytest.mark.parametrize("closed", ["stdin", "stdout", "stderr"])
@pytest.mark.parametrize(
    "words", ["pairs", "generate {b} -p hi --max-tokens 2", "chat {b} --max-tokens 2", "build --target"]
)
def test_closed_standard_streams_are_empty_ones(words, closed, bundle, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setattr(f"sys.{closed}", None)
    try:
        code = main(words.format(b=bundle).split())
    except SystemExit as ended:
        code = int(ended.code or 0)
    assert code == (2 if words.startswith("build") else 0)


def test_a_program_without_a_console_builds_at_first_use(capsys, tmp_path, monkeypatch) -> None:
    from dflash_trt import LLM, SamplingParams

    monkeypatch.setenv("DFLASH_TRT_CACHE", str(tmp_path))
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(f"sys.{name}", None)
    with LLM("tiny") as llm:
        assert llm.generate("1 + 1", SamplingParams(max_tokens=1)).token_ids


def test_text_that_the_terminal_lacks_is_shown_as_far_as_it_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr("sys.stdout", terminal)
    assert main(["pairs"]) == 0
    print("caf\xe9")
    terminal.flush()
    assert terminal.buffer.getvalue().endswith(b"caf?\n")


def test_a_link_in_the_cache_is_refused_with_advice_for_the_cache(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("DFLASH_TRT_CACHE", str(tmp_path))
    (tmp_path / "bundles").mkdir()
    (tmp_path / "bundles" / "tiny").symlink_to(tmp_path)
    code, error = run(["generate", "tiny", "-p", "hi"], capsys)
    assert code == 1
    assert "DFLASH_TRT_CACHE" in error
    assert "--out" not in error


def test_a_bundle_that_is_kept_is_not_said_to_be_built(pair, bundle, capsys) -> None:
    words = build_arguments(pair, bundle, "--max-seq-len", "256")
    capsys.readouterr()
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "kept" in out
    assert "built in" not in out
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kept"] is True


def test_an_api_key_of_the_environment_is_not_ignored(bundle, capsys, monkeypatch) -> None:
    monkeypatch.setenv("DFLASH_TRT_API_KEY", "secret-3")
    code, error = run(["serve", str(bundle), "--api", "triton"], capsys)
    assert code == 2
    assert "$DFLASH_TRT_API_KEY" in error
    assert "secret-3" not in error


def test_a_cache_that_cannot_be_written_names_its_variable(folders, capsys, monkeypatch) -> None:
    monkeypatch.chdir(folders)
    for place in ("/proc/cache", str(folders / "notes.txt")):
        monkeypatch.setenv("DFLASH_TRT_CACHE", place)
        code, error = run(["generate", "tiny", "-p", "hi"], capsys)
        assert (code, error.count("\n")) == (1, 0)
        assert f"{place}/bundles" in error
        assert "DFLASH_TRT_CACHE" in error


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("GatedRepoError", "hf auth login"),
        ("RepositoryNotFoundError", "hf auth login"),
        ("RevisionNotFoundError", "no such revision"),
        ("LocalEntryNotFoundError", "HF_HUB_OFFLINE"),
    ],
)
def test_the_hub_refuses(name, said, folders, capsys, monkeypatch) -> None:
    import huggingface_hub
    from huggingface_hub import errors

    kind = getattr(errors, name)

    def refused(*_: object, **__: object) -> None:
        raise kind.__new__(kind, "no")

    monkeypatch.chdir(folders)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refused)
    code, error = run(["build", "--target", "llama-3.1-8b", "--engine", "onnxruntime"], capsys)
    assert (code, error.count("\n")) == (1, 0)
    assert said in error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "weights.part"), "weights.part"),
        (MemoryError("Unable to allocate 9 GiB"), "9 GiB"),
    ],
)
def test_a_build_without_room_leaves_nothing_behind(error, said, folders, capsys, monkeypatch) -> None:
    from dflash_trt.bundle import workspace

    def full(*_: object) -> None:
        raise error

    monkeypatch.chdir(folders)
    before = tree(folders)
    monkeypatch.setattr(workspace, "copy", full)
    words = [
        "build", "--target", "target", "--drafter", "drafter", "--engine", "onnxruntime", "--out", "full",
    ]  # fmt: skip
    code, message = run(words, capsys)
    assert (code, message.count("\n")) == (1, 0)
    assert said in message
    assert set(tree(folders)) == set(before)
    monkeypatch.undo()
    monkeypatch.chdir(folders)
    assert main(["build", "--target", "target", "--drafter", "drafter", "--out", "full"]) == 0
    shutil.rmtree("full")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def in_an_empty_folder(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DFLASH_TRT_CACHE", str(cache))


def test_a_cache_that_cannot_be_written_may_hold_the_pair(command, monkeypatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError("no")

    command("generate", "tiny", "--prompt", "x", "--max-tokens", "2")
    monkeypatch.setattr("filelock.FileLock", refused)
    assert command("generate", "tiny", "--prompt", "x", "--max-tokens", "2").code == 0


def test_the_other_commands_take_it_too(tmp_path: Path, command: Command) -> None:
    said = command("chat", "tiny", "--max-tokens", "4", stdin="Hello\n")
    assert (said.code, "[4 tokens" in said.out) == (0, True)
    verified = command("verify", "tiny", "--limit", "1", "--temperatures", "0", "--max-tokens", "4", "--json")
    assert (verified.code, verified.json["equal"]) == (0, True)
    options = ("--requests", "1", "--concurrency", "1", "--max-tokens", "2", "--methods", "plain", "--json")
    assert command("bench", "tiny", *options).code == 0
    assert command("deploy", "tiny", "--out", tmp_path / "repository").code == 0


def test_a_directory_of_that_name_comes_first(tmp_path: Path, command: Command) -> None:
    (tmp_path / "tiny").mkdir()
    said = command("generate", "tiny", "--prompt", "x")
    assert said.code == 1
    assert "tiny" in said.err
    assert os.listdir(tmp_path / "tiny") == []


@pytest.mark.parametrize(("instructions", "advised"), [("AVX2", True), ("AVX-512, VNNI", False)])
def test_doctor_names_the_weights_for_a_processor_without_vnni(
    instructions, advised, command, monkeypatch
) -> None:
    monkeypatch.setattr("dflash_trt.hardware.instructions", lambda: instructions)
    assert ("target=int8" in command("doctor").out) == advised


def test_errors_advise_no_option_that_there_is_not() -> None:
    """But for those of pip and of Python's build."""
    of_others = {"--force-reinstall", "--upgrade", "--enable-shared"}
    known, package = (
        {name for action in actions() for name in action.option_strings},
        Path(dflash_trt.__file__).parent,
    )
    for file in package.rglob("*.py"):
        raised = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Raise)]
        texts = [n.value for node in raised for n in ast.walk(node) if isinstance(n, ast.Constant)]
        named = {
            name
            for text in texts
            for name in re.findall(r"(?<!\S)--[a-z][a-z0-9-]*[a-z0-9]\b(?!-)", str(text))
        }
        assert named <= known | of_others, file

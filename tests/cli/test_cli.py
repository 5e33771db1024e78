"""The command line: the output of each command, its stream, and its exit code."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.cli import COMMANDS, main, make_parser
from dflash_trt.cli.output import print_table
from dflash_trt.errors import RequestError
from dflash_trt.logs import to_stderr
from dflash_trt.options import options_of
from dflash_trt.prompts import Prompt
from dflash_trt.serving.openai.settings import Address, ServerSettings
from dflash_trt.text.tokenizer import Tokenizer
from dflash_trt.training.recipe import AnswerSampling, Design, Recipe
from tests.cli.conftest import build_arguments
from tests.doubles.commands import Command

ROOT = Path(__file__).parents[2]
RUN = [sys.executable, "-c", "import sys; from dflash_trt.cli import main; sys.exit(main())"]


@pytest.mark.parametrize("arguments", [[], *([name] for name in COMMANDS)])
def test_help_has_examples(arguments: list[str], command: Command) -> None:
    shown = command(*arguments, "--help")
    assert (shown.code, shown.err) == (0, "")
    assert f"examples:\n  dflash-trt {' '.join(arguments)}" in shown.out


def test_help_imports_nothing_heavy() -> None:
    heavy = "{'numpy', 'onnx', 'onnx_ir', 'onnxruntime', 'tokenizers', 'rich'}"
    code = "import sys, dflash_trt.cli as cli; cli.make_parser(); "
    code += f"sys.exit(repr(sorted({heavy} & set(sys.modules))))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert found.stderr.strip() == "[]"


def test_what_is_logged_goes_to_stderr(bundle: Path, command: Command) -> None:
    options = ("generate", bundle, "-p", "1", "--max-tokens", "2")
    quiet, loud = command(*options), command(*options, "--log-level", "info")
    assert quiet.err == ""
    assert f"info runtime: opened {bundle} for onnxruntime" in loud.err
    assert loud.out == quiet.out


def test_what_is_logged_later_goes_to_the_stderr_of_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test, a notebook or a daemon replaces sys.stderr, and may close the one that a command began with."""
    first, second = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", first)
    to_stderr("warning")
    first.close()
    monkeypatch.setattr(sys, "stderr", second)
    logging.getLogger("dflash_trt.runtime").warning("late")
    assert second.getvalue() == "dflash-trt: warning: late\n"


def test_a_table_wraps_its_last_column(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    print_table([("a", "word " * 12), ("bcd", "")])
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["a    " + " ".join(["word"] * 7), "     " + " ".join(["word"] * 5), "bcd"]


def test_build_reports_progress_on_stderr(pair: tuple[Path, Path], tmp_path: Path, command: Command) -> None:
    first = command(*build_arguments(pair, tmp_path / "b"))
    assert first.code == 0
    assert first.out.startswith(str(tmp_path / "b"))
    assert first.out.count("\n") == 1
    assert "export target ...\n" in first.err
    again = command(*build_arguments(pair, tmp_path / "b", "--json"))
    assert again.code == 0
    assert again.json["kind"] == "bundle"
    assert again.json["build_seconds"] >= 0


def test_debug_raises(tmp_path: Path) -> None:
    from dflash_trt.errors import CheckpointError

    with pytest.raises(CheckpointError):
        main(["inspect", str(tmp_path), "--debug"])


@pytest.mark.parametrize("chat", [[], ["--chat"], ["--chat", "--system", "Be brief."]])
def test_generate_gives_the_same_text_by_every_way(bundle: Path, chat: list[str], command: Command) -> None:
    options = [*chat, "--max-tokens", "24", "--temperature", "0.8", "--top-p", "0.9", "--seed", "5"]
    plain = command("generate", bundle, "-p", "12 + 7", "--no-draft", *options)
    assert plain.code == 0
    assert plain.err == ""
    drafted = command("generate", bundle, "--prompt", "12 + 7", *options)
    as_json = command("generate", bundle, "-p", "12 + 7", "--json", "--block-length", "3", *options)
    from_stdin = command("generate", bundle, "--prompt", "-", *options, stdin="12 + 7")
    from_pipe = command("generate", bundle, *options, stdin="12 + 7")
    assert {plain.out, drafted.out, as_json.json["text"] + "\n", from_stdin.out, from_pipe.out} == {plain.out}
    assert as_json.json["seed"] == 5
    assert len(as_json.json["token_ids"]) <= 24
    assert as_json.json["finish_reason"] in ("stop", "length")


def test_generate_passes_variables_to_the_template(bundle: Path, command: Command) -> None:
    options = ("generate", bundle, "--chat", "-p", "12 + 7", "--max-tokens", "2", "--json")
    with_prompt = command(*options).json["prompt_token_ids"]
    variables = '{"add_generation_prompt": false}'
    without = command(*options, "--chat-template-kwargs", variables).json["prompt_token_ids"]
    assert with_prompt[: len(without)] == without
    assert len(with_prompt) > len(without)


@pytest.mark.parametrize(
    "options", [("verify", "--limit", "1"), ("verify", "--widths"), ("bench", "--requests", "1")]
)
def test_variables_of_the_template_reach_the_prompts_that_are_compared(
    options, bundle, command, monkeypatch
) -> None:
    def token_ids(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
        without = dataclasses.replace(prompt, variables={})
        assert len(made(prompt, tokenizer)) < len(made(without, tokenizer))
        raise RequestError("seen")

    made = Prompt.token_ids
    monkeypatch.setattr(Prompt, "token_ids", token_ids)
    variables = ("--chat-template-kwargs", '{"add_generation_prompt": false}')
    assert command(options[0], bundle, *options[1:], *variables).err.endswith("error: seen\n")


def test_examples_of_help_have_every_option_that_is_required() -> None:
    for name, module in COMMANDS.items():
        for line in module.EXAMPLES.splitlines():
            if line.startswith(f"  dflash-trt {name} ") and "..." not in line:
                words = shlex.split(line, comments=True)
                assert make_parser().parse_args(words[1 : words.index("--") if "--" in words else None]), line


def test_verify_finds_no_difference(bundle: Path, tmp_path: Path, command: Command) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "12 + 7 ="},
        {"messages": [{"role": "user", "content": "Add."}]},
        {"prompt": "def add("},
    ]
    prompts.write_text("\n".join(map(json.dumps, lines)) + "\n")
    options = ("verify", bundle, "--prompts", prompts, "--max-tokens", "12", "--block-lengths", "1,8")
    shown = command(*options, "--temperatures", "0", "--batch-sizes", "2")
    assert shown.code == 0
    assert shown.out.splitlines()[-1] == "all equal"
    document = command(*options, "--temperatures", "0,1.0", "--batch-sizes", "3", "--json")
    assert document.code == 0
    assert document.json["equal"] is True
    fields = ("temperature", "block_length", "draft_source")
    usual = "drafter,lookup"
    assert [tuple(case[field] for field in fields) for case in document.json["cases"]] == [
        (t, *way) for t in (0.0, 1.0) for way in ((1, usual), (8, usual), (8, "lookup"))
    ]
    alone = command(*options, "--temperatures", "0", "--draft-source", "lookup", "--json")
    assert {case["draft_source"] for case in alone.json["cases"]} == {"lookup"}


def test_verify_shows_the_first_difference(bundle, tmp_path, command, monkeypatch) -> None:
    from dflash_trt.llm import LLM

    generate = LLM.generate

    def altered(self: LLM, prompts: Any, params: Any = None, **options: Any) -> Any:
        completions = generate(self, prompts, params, **options)
        if isinstance(completions, list) and completions:
            completions[-1].token_ids[3] += 1
        return completions

    monkeypatch.setattr(LLM, "generate", altered)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "12 + 7 =", "id": "sum"}\n')
    options = ("verify", bundle, "--prompts", prompts, "--max-tokens", "8", "--block-lengths", "8")
    shown = command(*options, "--temperatures", "0", "--batch-sizes", "1")
    assert shown.code == 1
    assert "first difference: prompt sum, generated token 3" in shown.out
    assert "logit gap" in shown.out
    document = command(*options, "--temperatures", "0", "--batch-sizes", "1", "--json")
    assert document.code == 1
    difference = document.json["cases"][0]["first_difference"]
    assert difference["drafted_token"] == difference["plain_token"] + 1
    assert difference["logit_gap"] > 0


@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"prompt": 7}'])
def test_verify_names_the_malformed_prompt(line: str, bundle: Path, tmp_path: Path, command: Command) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "fine"}\n' + line + "\n")
    failed = command("verify", bundle, "--prompts", tmp_path / "prompts.jsonl")
    assert failed.code == 1
    assert "prompts.jsonl:2: " in failed.err


def test_inspect(bundle: Path, pair: tuple[Path, Path], tmp_path: Path, command: Command) -> None:
    found = command("inspect", bundle, "--json").json
    target, drafter = (command("inspect", path, "--json").json for path in pair)
    assert [each["kind"] for each in (found, target, drafter)] == ["bundle", "target", "drafter"]
    assert found["target_layer_ids"] == drafter["target_layer_ids"]
    assert found["parameters"] == target["parameters"] + drafter["parameters"]
    assert "target.onnx" in found["files"]
    shown = command("inspect", bundle)
    assert "weights/drafter/model.safetensors" in shown.out
    assert "quantization           target   none\n" in shown.out
    shutil.copytree(pair[0], tmp_path / "target")
    section = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "target" / "hf_quant_config.json").write_text(json.dumps(section))
    assert "quantized cache          8 bits on TensorRT-LLM" in command("inspect", tmp_path / "target").out
    neither = command("inspect", tmp_path)
    assert neither.code == 1
    assert "neither manifest.json nor config.json" in neither.err


def test_pairs_lists_every_pair_and_published_drafter_in_80_columns(command, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown, listed = command("pairs").out, command("pairs", "--json").json
    assert max(map(len, shown.splitlines())) <= 80
    names = {line.split()[0] for line in shown.splitlines() if line}
    drafters = {drafter["repository"]: drafter for drafter in listed["drafters"]}
    of_forms = {form["name"] for pair in listed["pairs"] for form in pair["forms"] if form["name"]}
    assert "qwen3.8-27b-nvfp4" in of_forms
    assert {pair["name"] for pair in listed["pairs"]} | of_forms | set(drafters) <= names
    assert {pair["drafter_repo"] for pair in listed["pairs"] if pair["drafter_repo"]} <= set(drafters)
    assert drafters["z-lab/Qwen3-4B-DFlash-b16"]["pair"] == "qwen3-4b"
    assert drafters["incoai/Qwen3.8-27B-DFlash2"]["licence"] == "Apache-2.0"
    assert drafters["z-lab/gemma-4-31B-it-DFlash"]["pair"] == "gemma-4-31b"
    assert {drafter["read"] for drafter in drafters.values()} == {True, False}
    assert {drafter["publisher"] for drafter in drafters.values()} >= {"z-lab", "deepseek-ai", "RedHatAI"}


def test_pairs_shows_all_of_one(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")

    def rows(name: str) -> dict[str, str]:
        lines = command("pairs", name).out.splitlines()
        assert max(map(len, lines)) <= 80
        return dict(re.split(r"  +", line, maxsplit=1) for line in lines if not line.startswith(" "))

    pair = rows("qwen3.8-27b")
    assert (pair["kind"], pair["licence"], pair["tensorrt-llm"]) == ("DFlash2", "Apache-2.0", "yes")
    assert pair["as qwen3.8-27b-fp8"].startswith("Qwen/Qwen3.8-27B-FP8: FP8 in blocks")
    form = rows("qwen3.8-27b-nvfp4-unsloth")
    assert form["target repo"] == "unsloth/Qwen3.8-27B-NVFP4"
    assert form["tensorrt-llm"].startswith("no: several groups")
    assert rows("incoai/glm-5.3-flash-DFlash2")["onnxruntime"] == "no: the target's family is not read"
    assert rows("qwen3.5-9b")["unverified"].startswith("drafter.dflash_config.mask_token_id")
    alone = rows("z-lab/MiniMax-M2.5-DFlash")
    assert (alone["tensorrt-llm"], alone["onnxruntime"]) == ("yes", "no: only tensorrt-llm runs the target")
    wrong = command("pairs", "qwen3.8-28b")
    assert wrong.code == 1
    assert "did you mean 'qwen3.8-27b'" in wrong.err
    assert "did you mean 'qwen3.8-27b-fp8'" in command("build", "--target", "qwen3.8-27b-fp9").err


def test_doctor_is_honest(command: Command) -> None:
    shown, found = command("doctor"), command("doctor", "--json").json
    assert shown.code == 0
    rows = {row["engine"]: row for row in found["engines"]}
    assert rows["onnxruntime"]["build"]
    assert rows["tensorrt-llm"]["build"]
    assert rows["tensorrt-llm"]["run"] == (importlib.util.find_spec("tensorrt_llm") is not None)
    assert found["required"]["onnxruntime"] in shown.out


def test_interrupt_is_tidy(bundle: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dflash_trt.reports.environment.describe", interrupted)
    stopped = command("doctor")
    assert stopped.code == 130
    assert "Traceback" not in stopped.err


def test_closed_pipe_is_quiet(bundle: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [*RUN, "generate", str(bundle), "-p", "12 + 7", "--max-tokens", "4"]
    with os.fdopen(writer, "w") as closed:
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    ("words", "settings", "needed"),
    [
        ("serve x", Address, {}), ("serve x", ServerSettings, {}),
        ("train drafter --target x --data x --out x --steps 9", Design, {}),
        ("train drafter --target x --data x --out x --steps 9", Recipe, {"steps": 9}),
        ("train regenerate --target x --prompts x --out x", AnswerSampling, {}),
    ],
)  # fmt: skip
def test_declared_options_have_the_defaults_of_their_fields(
    words: str, settings: Any, needed: dict[str, int]
) -> None:
    args, expected = make_parser().parse_args(words.split()), settings(**needed)
    declared = options_of(settings)
    assert declared
    assert {o.flag: getattr(args, o.name) for o in declared} == {
        o.flag: getattr(expected, o.name) for o in declared
    }

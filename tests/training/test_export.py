"""Exported drafters, read by this package, z-lab's own classes and Transformers'."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from dflash.model import DFlash2DraftModel, DFlashDraftModel
from safetensors.torch import load_file

from dflash_trt.building.build import build
from dflash_trt.checkpoint.catalogue import SHIPPED
from dflash_trt.checkpoint.draft_vocabulary import FILE
from dflash_trt.cli import main
from dflash_trt.llm import LLM
from dflash_trt.models.configs import read_drafter_config, read_target_config
from dflash_trt.training.checkpoint import dflash2_config, new_config, open_drafter, write_checkpoint
from dflash_trt.training.export import contract_breaks, export, model_card
from dflash_trt.training.recipe import Recipe
from tests.doubles.reference import load_target
from tests.doubles.text_checkpoints import make_gemma
from tests.models.test_loops import assert_ours, assistant, of_transformers, of_zlab

TARGET, DRAFTER = SHIPPED / "tiny" / "target", SHIPPED / "tiny" / "drafter"


def dflash2(folder: Path) -> Path:
    """A new DFlash2 drafter from the shipped one."""
    config = dflash2_config(json.loads((DRAFTER / "config.json").read_text()))
    (folder / "config").mkdir(parents=True)
    (folder / "config" / "config.json").write_text(json.dumps(config))
    drafter = open_drafter(folder / "config", DRAFTER, TARGET)
    embedding = load_file(TARGET / "model.safetensors")["model.embed_tokens.weight"]
    write_checkpoint(drafter.published(drafter.state_dict(), embedding), config, folder / "made", "card")
    return folder / "made"


def drafted(drafter: Path, work: Path) -> list[Any]:
    """Tokens and accepted drafts of a few prompts."""
    with LLM(build(str(TARGET), str(drafter), work).path, threads=1) as llm:
        answers = llm.generate(["12 + 7 =", "def add(", "The quick"], block_length=8, tree_nodes=0)
        return [(answer.token_ids, answer.statistics.acceptance_histogram) for answer in answers]


def test_the_copy_drafts_what_the_drafter_drafts(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert export(DRAFTER, TARGET, out) == []
    assert drafted(out, tmp_path / "bundle") == drafted(DRAFTER, tmp_path / "own")
    config = json.loads((DRAFTER / "config.json").read_text())
    few = tmp_path / "few"
    write_checkpoint(load_file(DRAFTER / "model.safetensors"), config, few, "card", range(0, 600, 2))
    (warning,) = export(few, TARGET, tmp_path / "all")
    assert "no draft vocabulary" in warning
    assert not (tmp_path / "all" / FILE).exists()


def test_dflash2_keeps_the_published_contract_or_says_who_refuses_it(tmp_path: Path) -> None:
    made = dflash2(tmp_path)
    config = json.loads((made / "config.json").read_text())
    (warning,) = export(made, TARGET, tmp_path / "out")
    assert warning == (
        "TensorRT Edge-LLM refuses this drafter: target_layer_ids has 4 taps, not 5; num_hidden_layers is 2, not 5"
    )
    config["dflash_config"]["target_layer_ids"].append(8)
    config["num_hidden_layers"] = 5
    assert contract_breaks(config) == []
    config["dflash_config"]["selector_rank"], config["block_size"] = 64, 17
    assert contract_breaks(config) == ["selector_rank is 64, not 256", "block_size is 17, more than 16"]


def test_the_scale_of_a_targets_embedding_is_written(tmp_path: Path) -> None:
    target = make_gemma(tmp_path / "target")
    config = new_config(read_target_config(target), layers=1, taps=[1], block_size=4, mask_token_id=3)
    assert (
        config["dflash_config"].pop("input_embedding_scale") == 8
    )  # published ones for this family are silent
    (folder := tmp_path / "drafter").mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    write_checkpoint(open_drafter(folder, None, target).state_dict(), config, folder, "card")
    assert export(folder, target, tmp_path / "out") == []
    assert read_drafter_config(tmp_path / "out").row_scale == 8
    (tmp_path / "out" / "config.json").write_text(json.dumps(dflash2_config(config, 8.0)))
    assert read_drafter_config(tmp_path / "out").row_scale == 8


def test_other_loops_accept_the_same_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """z-lab's classes read the files themselves. Transformers' only class is given the tensors."""
    for folder, kind in ((DRAFTER, DFlashDraftModel), (dflash2(tmp_path), DFlash2DraftModel)):
        out, work = tmp_path / f"out-{kind.__name__}", tmp_path / kind.__name__
        export(folder, TARGET, out)
        read, said = kind.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
        assert not said["missing_keys"]
        assert not said["unexpected_keys"]
        assert not said["mismatched_keys"]
        assert_ours(TARGET, out, work, of_zlab(load_target(TARGET), read.eval(), monkeypatch))
    out = tmp_path / "out-DFlashDraftModel"
    theirs = of_transformers(load_target(TARGET), assistant(out), monkeypatch)
    assert_ours(TARGET, out, tmp_path / "again", theirs)


def test_the_card_has_the_commands_with_the_drafters_numbers() -> None:
    config = json.loads((DRAFTER / "config.json").read_text())
    counts = {"steps": 3, "categories": {"chat": 2}, "answers": 2, "answer_tokens": 9}
    text = model_card("org/name", dflash2_config(config), [1, 3], Recipe(steps=3, learning_rate=0.01), counts)
    (vllm,) = re.findall(r"vllm serve org/name --speculative-config '(.*)'", text)
    assert json.loads(vllm) == {"method": "dflash", "model": "DIR", "num_speculative_tokens": 7}
    (section,) = re.findall(r"^    speculative_config: (.*)", text, re.M)
    asked = {"decoding_type": "DFlash", "speculative_model": "DIR", "max_draft_len": 7}
    assert yaml.safe_load(section) == asked
    assert "--speculative-num-draft-tokens 8" in text
    assert "TensorRT Edge-LLM refuses it: target_layer_ids has 4 taps, not 5." in text
    assert "TensorRT Edge-LLM refuses it: num_hidden_layers is 2, not 5." in text


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"train export --target tiny --drafter {DRAFTER} --out {tmp_path / 'out'}"
    assert main(words.split()) == 0
    assert str(tmp_path / "out") in capsys.readouterr().out
    assert (tmp_path / "out" / "config.json").is_file()

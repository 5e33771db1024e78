"""Targets that only TensorRT-LLM runs, as Transformers writes them, with a block drafter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml

from dflash_trt.building.build import build
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.cli import main
from dflash_trt.errors import BuildError, CheckpointError, DFlashError
from dflash_trt.reports.inspection import inspect
from dflash_trt.trtllm import TensorRTLLMOptions
from dflash_trt.trtllm.targets import TARGETS, read_target, target_quantization
from tests.doubles.checkpoints import IM_END, MASK, VOCAB, make_drafter, make_tokenizer, write_json

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": 512, "eos_token_id": IM_END, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "intermediate_size": 96, "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4,
}  # fmt: skip
MINIMAX = {
    "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2,
    "head_dim": 16, "rotary_dim": 8,
}  # fmt: skip
INDEX = {"index_topk": 16, "index_n_heads": 2, "index_head_dim": 16}
# Architecture: the configuration class of Transformers, its fields, numbers of a row of the cache in all layers, and
# the layers with experts.
KINDS: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "MiniMaxM2ForCausalLM": ("MiniMaxM2", MINIMAX, 4 * 2 * 2 * 16, 4),
    "DeepseekV3ForCausalLM": ("DeepseekV3", LATENT, 4 * (32 + 8), 3),
    "GlmMoeDsaForCausalLM": ("GlmMoeDsa", LATENT | INDEX, 4 * (32 + 8), 3),
    "KimiK25ForConditionalGeneration": ("DeepseekV3", LATENT, 4 * (32 + 8), 3),
}


def make(directory: Path, name: str) -> Path:
    """A random target of this architecture, saved by Transformers."""
    kind, fields, _, _ = KINDS[name]
    config = getattr(transformers, f"{kind}Config")(**COMMON, **fields)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.bfloat16)
    model.save_pretrained(directory)
    make_tokenizer(directory)
    if name.startswith("Kimi"):  # the text model inside one that also sees images
        text = json.loads((directory / "config.json").read_text())
        top = {"architectures": [name], "model_type": "kimi_k25", "text_config": text, "vision_config": {}}
        write_json(directory / "config.json", top)
    return directory


def drafter_for(directory: Path, target: Path, **options: Any) -> Path:
    """A drafter that was trained for a target of these sizes."""
    plain = target.parent / "plain"
    values = json.loads((target / "config.json").read_text())
    plain.mkdir(exist_ok=True)
    write_json(plain / "config.json", values.get("text_config") or values)
    return make_drafter(directory, plain, **options)


def built(root: Path, **options: Any) -> Bundle:
    where = {
        "engine": "tensorrt-llm",
        "options": TensorRTLLMOptions(gpu="b200"),
        "max_seq_len": 256,
    } | options
    return build(str(root / "target"), str(root / "drafter"), root / "bundle", **where)


@pytest.fixture(params=list(TARGETS))
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    target = make(tmp_path / "target", request.param)
    drafter_for(tmp_path / "drafter", target)
    return tmp_path


def test_a_bundle_has_the_targets_files_and_says_what_was_not_checked(pair: Path) -> None:
    bundle = built(pair)
    name = bundle.manifest["target"]["architecture"]
    for file in (pair / "target").glob("*.safetensors"):
        assert (bundle.path / "target" / file.name).read_bytes() == file.read_bytes()
    args = yaml.safe_load((bundle.path / "llm_args.yaml").read_text())
    assert args["speculative_config"]["mask_token_id"] == MASK
    assert args["moe_config"]["backend"] == "CUTLASS"
    assert bundle.manifest["eos_token_ids"] == [IM_END]
    section = bundle.manifest["tensorrt_llm"]
    assert section["memory"]["kv_bytes_per_token"] == 2 * KINDS[name][2]
    stored = sum(tensor.nbytes for tensor in Checkpoint(pair / "target").tensors.values())
    weights = section["memory"]["weights"]["target"]
    assert sum(n for role in weights.values() for n in role.values()) == pytest.approx(stored, rel=0.02)
    said = [value for key, value in inspect(bundle.path)["choices"].items() if key.startswith("warning")]
    assert TARGETS[name].dflash in said[0]
    assert "26 November 2026" in said[0]
    assert any(each.startswith("checked were taps") for each in said)


def test_what_can_be_checked_is(pair: Path) -> None:
    wrong: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"taps": (1, 4)}, {}, "tap 1 is the state behind layer 4, but the target has 4 layers"),
        ({}, {"vocab_size": VOCAB + 64}, "vocab_size is"),
        ({}, {"block_size": 1}, "block_size"),
    ]
    for options, changes, message in wrong:
        drafter = drafter_for(pair / "drafter", pair / "target", **options)
        config = json.loads((drafter / "config.json").read_text())
        write_json(drafter / "config.json", config | changes)
        with pytest.raises(DFlashError, match=message):
            built(pair)
    drafter = drafter_for(pair / "drafter", pair / "target")
    config = json.loads((drafter / "config.json").read_text())
    config["dflash_config"]["mask_token_id"] = VOCAB
    write_json(drafter / "config.json", config)
    with pytest.raises(DFlashError, match=f"mask_token_id is {VOCAB}"):
        built(pair)


def test_plan_reads_them_as_a_build_does(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "plan",
        "--engine",
        "tensorrt-llm",
        "--gpu",
        "b200",
        "--max-batch-size",
        "1",
        "--max-seq-len",
        "256",
    ]
    assert main([*words, "--target", str(pair / "target"), "--drafter", str(pair / "drafter"), "--json"]) == 0
    memory = built(pair).manifest["tensorrt_llm"]["memory"]
    assert json.loads(capsys.readouterr().out)["weights"] == memory["weights"]
    for file in (pair / "target").glob("*.safetensors*"):
        file.unlink()
    with pytest.raises(SystemExit):
        main([*words, "--target", str(pair / "target"), "--drafter", str(pair / "drafter")])
    assert "give a directory that has them" in capsys.readouterr().err


def test_other_engines_and_builds_without_weights_refuse_them(pair: Path) -> None:
    with pytest.raises(CheckpointError, match="architectures is"):
        built(pair, engine="onnxruntime", options=None)
    with pytest.raises(BuildError, match="--weights none"):
        built(pair, weights="none")


@pytest.mark.parametrize("name", list(TARGETS))
def test_the_experts_are_known_to_the_plan(name: str, tmp_path: Path) -> None:
    config = read_target(make(tmp_path / "target", name))
    assert config.moe is not None
    assert (config.moe.num_experts, config.moe.experts_per_token) == (4, 2)
    assert config.moe.intermediate_size == 32
    assert sum(config.moe.sparse_layers) == KINDS[name][3]


def test_a_number_format_of_the_text_part_is_seen(tmp_path: Path) -> None:
    """Kimi-K2.5 as published: experts in INT4 of compressed-tensors, which TensorRT-LLM does not read."""
    target = make(tmp_path / "target", "KimiK25ForConditionalGeneration")
    values = json.loads((target / "config.json").read_text())
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    values["text_config"]["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "config_groups": groups,
    }
    write_json(target / "config.json", values)
    with pytest.raises(CheckpointError, match="are 4 bits of int by group"):
        target_quantization(read_target(target))

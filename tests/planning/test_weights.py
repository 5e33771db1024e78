"""Planned weights, compared with published sizes and with bundles and checkpoints of ours."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import onnx
import pytest

from dflash_trt.building.build import build
from dflash_trt.checkpoint.catalogue import known_configs
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.engines.onnxruntime import products
from dflash_trt.formats.precision import Precision, parse_precision
from dflash_trt.models.configs import read_drafter_config, read_target_config
from dflash_trt.models.inventory import Inventory, take_inventory
from dflash_trt.planning.estimate import GIB
from dflash_trt.planning.gpus import find_gpu
from dflash_trt.planning.memory import MemoryEstimate, estimate_memory
from dflash_trt.planning.weights import Settings
from dflash_trt.quantization.convert import quantize

# Bytes of the target's published safetensors. Only gpt-oss's were compared with a source (OpenAI's GiB).
PUBLISHED_TARGETS = {
    "qwen3-4b": 8_044_936_192, "qwen3-8b": 16_381_470_720, "qwen3-coder-30b-a3b": 61_064_245_248,
    "llama-3.1-8b": 16_060_522_496, "gpt-oss-20b": 13_761_264_768, "gpt-oss-120b": 65_248_815_744,
}  # fmt: skip


# GB of target and drafter without vision; README.md has the published files, which have it.
README = {
    "gpt-oss-120b": (65, 1.6), "gpt-oss-20b": (14, 1.6), "qwen3-8b": (16, 2.1), "qwen3-4b": (8, 1.1),
    "qwen3-coder-30b-a3b": (61, 0.9), "llama-3.1-8b": (16, 2.1), "qwen3.8-27b": (54, 3.8),
    "qwen3.8-27b-fp8": (29, 3.8), "qwen3.8-27b-nvfp4": (20, 3.8), "gemma-4-31b": (61, 3.1),
    "gemma-4-26b-a4b": (51, 0.9),
}  # fmt: skip


@cache
def inventory_of(pair: str) -> Inventory:
    target, drafter = known_configs(pair)
    return take_inventory(read_target_config(target), read_drafter_config(drafter))


def settings(gpu: str = "b200", **values: Any) -> Settings:
    base: dict[str, Any] = {"engine": "tensorrt", "max_seq_len": 8192, "max_batch_size": 8, "block_size": 10}
    return Settings(**base | {"gpu": find_gpu(gpu)} | values)


def plan_of(pair: str, gpu: str = "b200", **values: Any) -> MemoryEstimate:
    return estimate_memory(inventory_of(pair), settings(gpu, **values))


def total(roles: dict[str, dict[str, int]]) -> int:
    return sum(sum(role.values()) for role in roles.values())


@pytest.mark.parametrize("name", README)
def test_weights_are_the_published_sizes(name: str) -> None:
    """From the built-in configurations alone. gpt-oss's targets are also OpenAI's 12.8 and 60.8 GiB."""
    target, drafter = (total(inventory_of(name).weights(side)) for side in ("target", "drafter"))
    assert target == PUBLISHED_TARGETS.get(name, target)
    assert target / 1e9 == pytest.approx(README[name][0], rel=0.03)
    assert drafter / 1e9 == pytest.approx(README[name][1], abs=0.05)


@pytest.mark.parametrize("name", ["tiny", "tiny-gpt-oss"])
def test_the_drafters_own_copies_are_the_targets_tensors_in_its_graph(name: str, tmp_path: Path) -> None:
    bundle = build(name, None, tmp_path / name)
    graph = onnx.load(bundle.path / "drafter.onnx", load_external_data=False).graph
    read = {each.name for each in graph.initializer if each.name.startswith("weights/target/")}
    assert {f"weights/target/{t.name}" for t in inventory_of(name).tensors["borrowed"]} == read


def test_plans_hold_embedding_and_head_twice() -> None:
    """gpt-oss-20b: 16.5 GiB of plans. TensorRT-LLM, and lookups in ONNX Runtime's mapped file, share them."""
    inventory = inventory_of("gpt-oss-20b")
    tables = {"embedding": {"bf16": 201_088 * 2880 * 2}, "head": {"bf16": 201_088 * 2880 * 2}}
    for engine in ("tensorrt", "tensorrt-rtx"):
        plan = estimate_memory(inventory, settings(engine=engine))
        assert {role: plan.weights["drafter"][role] for role in tables} == tables
        assert plan.weight_bytes / GIB == pytest.approx(16.5, rel=0.01)
    assert (
        not tables.keys()
        & estimate_memory(inventory, settings(engine="tensorrt-llm")).weights["drafter"].keys()
    )
    here = estimate_memory(inventory, settings(engine="onnxruntime")).weights
    assert here["target"]["embedding"] == tables["embedding"]
    assert "embedding" not in here["drafter"]
    assert here["drafter"]["head"] == here["target"]["head"] == {"fp32": 201_088 * 2880 * 4}


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_integer_weights_are_those_of_a_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    monkeypatch.setattr(products, "channels_pay", lambda: False)
    precision = Precision(target=scheme)
    bundle = build("tiny", None, tmp_path / "tiny", max_seq_len=256, precision=precision)
    plan = estimate_memory(inventory_of("tiny"), settings(engine="onnxruntime", precision=precision)).weights
    stored = bundle.manifest["target"]["weight_bytes"]
    for role in ("attention", "mlp", "head"):
        assert plan["target"][role][scheme] == pytest.approx(
            stored[role]["U8"] + stored[role]["F32"], rel=1e-3
        )
    assert plan["target"]["embedding"] == {"bf16": stored["embedding"]["BF16"]}
    assert plan["drafter"]["head"] == plan["target"]["head"]  # each session has its own


def test_what_onnxruntime_widens_as_it_loads_is_counted() -> None:
    """What it does not multiply as integers is in float32 alone: what it was made from is freed."""
    inventory = inventory_of("tiny")
    numbers = inventory.parameters("target")["mlp"]
    for scheme in ("fp8", "nvfp4"):
        asked = settings(engine="onnxruntime", precision=Precision(target=scheme))
        assert estimate_memory(inventory, asked).weights["target"]["mlp"] == {"fp32": 4 * numbers}
    for pair, widened in (
        ("tiny-gpt-oss", True),
        ("gpt-oss-20b", False),
    ):  # those of the large one are widened in use
        experts = plan_of(pair, engine="onnxruntime").weights["target"]["experts"]
        numbers = inventory_of(pair).parameters("target")["experts"]
        assert (experts["fp32"] == 4 * numbers) == widened
        assert ("mxfp4" in experts) != widened


@pytest.mark.parametrize("text", ["target=fp8", "target=nvfp4,drafter=fp8"])
def test_plans_agree_with_what_quantized_bundles_hold(text: str, tmp_path: Path) -> None:
    precision = parse_precision(text)
    bundle = build("tiny", None, tmp_path / "b", engine="torch", precision=precision)
    inventory = inventory_of("tiny")
    plan = estimate_memory(inventory, settings(precision=precision, block_size=8, max_seq_len=512))
    for side in ("target", "drafter"):
        for role, stored in bundle.manifest[side]["weight_bytes"].items():
            planned = sum(plan.weights[side][role].values())
            assert planned == pytest.approx(sum(stored.values()), rel=2e-3), f"{side} {role}"


@pytest.mark.parametrize("scheme", ["mxfp4", "int4"])
def test_plans_agree_with_what_quantized_checkpoints_hold(scheme: str, tmp_path: Path) -> None:
    """On ONNX Runtime these weights lie in blocks of integers; plans are for engines that read the checkpoint's."""
    folders = known_configs("tiny")
    target, drafter = read_target_config(folders[0]), read_drafter_config(folders[1])
    quantized = [quantize(folder, tmp_path / folder.name, scheme) for folder in folders]
    stored = take_inventory(
        read_target_config(quantized[0]),
        read_drafter_config(quantized[1]),
        (Checkpoint(quantized[0]), Checkpoint(quantized[1])),
    )
    precision = parse_precision(f"target={scheme},drafter={scheme}")
    plan = estimate_memory(take_inventory(target, drafter), settings(precision=precision, block_size=8))
    for side in ("target", "drafter"):
        for role, held in stored.weights(side).items():
            planned = sum(plan.weights[side][role].values())
            assert planned == pytest.approx(sum(held.values()), rel=2e-3), f"{side} {role}"


def test_precision_changes_the_weights_it_names() -> None:
    inventory = inventory_of("qwen3-8b")

    def weights(precision: Precision) -> dict[str, dict[str, dict[str, int]]]:
        return estimate_memory(inventory, settings(precision=precision)).weights

    base, fp8 = weights(Precision()), weights(parse_precision("target=fp8"))
    matrices = 2 * inventory.target.num_hidden_layers * 128 * 2  # bytes of q and k norms, which stay
    rows = 36 * (2 * 12_288 + 4096)  # rows of gate, up and down projections, with one scale each
    assert fp8["target"]["mlp"] == {"fp8": base["target"]["mlp"]["bf16"] // 2 + 4 * rows}
    assert fp8["target"]["attention"]["bf16"] == matrices
    assert fp8["target"]["embedding"] == base["target"]["embedding"]
    assert fp8["drafter"] == base["drafter"]
    head = weights(parse_precision("head=nvfp4"))["drafter"]["head"]
    assert head == {"nvfp4": 151_936 * 4096 * 9 // 16}


def test_torch_on_a_cpu_looks_tokens_up_in_bf16_beside_a_head_in_fp32() -> None:
    inventory, here = inventory_of("smollm2-135m"), replace(find_gpu("h100"), sm=0)
    table = inventory.target.vocab_size * inventory.target.hidden_size
    asked = settings(engine="torch", precision=Precision(target="fp32", drafter="fp32"))
    held = estimate_memory(inventory, replace(asked, gpu=here)).weights["target"]
    assert (held["embedding"], held["head"]) == ({"bf16": 2 * table}, {"fp32": 4 * table})
    assert "head" not in estimate_memory(inventory, settings(engine="torch")).weights["target"]

"""Bundles for TensorRT-LLM on disk: linked checkpoints, the drafter's directory, launch scripts that run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, Qwen3Model

from dflash_trt import LLM, SamplingParams
from dflash_trt.building.build import build
from dflash_trt.bundle.manifest import MANIFEST, Bundle
from dflash_trt.checkpoint.catalogue import PAIRS
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.cli import main
from dflash_trt.errors import BuildError, CheckpointError, DFlashError
from dflash_trt.models.configs import read_drafter_config
from dflash_trt.quantization.convert import quantize
from dflash_trt.reports.inspection import inspect
from dflash_trt.trtllm import TensorRTLLMOptions
from tests.doubles.checkpoints import make_drafter, make_target, write_json
from tests.doubles.family_checkpoints import make_gpt_oss, make_gpt_oss_drafter, make_qwen3_moe
from tests.doubles.formats import compressed
from tests.doubles.kind_checkpoints import make_dflash2

H200 = TensorRTLLMOptions(gpu="h200")
REFUSED = ("qwen3-coder-next",)  # the target's architecture
# Hybrids of the same architectures as qwen3.5-4b and qwen3.5-397b-a17b.
ALIKE = (
    "qwen3.5-9b", "qwen3.5-27b", "qwen3.5-35b-a3b", "qwen3.5-122b-a10b", "qwen3.6-27b", "qwen3.6-35b-a3b",
)  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pair")
    make_target(root / "target", shards=3)
    make_drafter(root / "drafter", root / "target")
    make_drafter(root / "turned", root / "target", taps=(2, 0, 1), dtype="float32")
    return root


def build_pair(root: Path, out: Path, drafter: str = "drafter", **options: Any) -> Bundle:
    options = {"engine": "tensorrt-llm", "options": H200} | options
    return build(str(root / "target"), str(root / drafter), out, **options)


@pytest.fixture(scope="module")
def built(pair: Path) -> Bundle:
    return build_pair(pair, pair / "bundle")


@pytest.mark.parametrize("name", [pair.name for pair in PAIRS if pair.name not in REFUSED + ALIKE])
def test_every_known_pair_builds_without_weights(name: str, tmp_path: Path) -> None:
    where = TensorRTLLMOptions(gpu="b200", tensor_parallel=8)
    if name in ("tiny", "tiny-gpt-oss", "smollm2-135m", "qwen3-coder-30b-a3b"):
        where = TensorRTLLMOptions(gpu="b200")  # two, three or four heads of keys and values, or one
    bundle = build(name, None, tmp_path / "b", engine="tensorrt-llm", weights="none", options=where)
    files = {str(p.relative_to(bundle.path)) for p in bundle.path.rglob("*") if p.is_file()}
    assert files == {*bundle.manifest["files"], MANIFEST}
    assert not [file for file in files if file.endswith(".safetensors")]
    config = read_drafter_config(bundle.path / "drafter")
    assert list(config.target_layer_ids) == bundle.manifest["target_layer_ids"]


@pytest.mark.parametrize(
    ("name", "options", "alone", "said"),
    [
        ("qwen3-coder-next", {}, True, "has layers with a state, with which TensorRT-LLM's drafts from a request"),
        ("qwen3-coder-next", {}, False, "Qwen3NextForCausalLM, but TensorRT-LLM's DFlash is known with Qwen3_5"),
    ],
)  # fmt: skip
def test_what_is_refused_of_known_targets(name, options, alone, said, tmp_path) -> None:
    asked: dict[str, Any] = {"engine": "tensorrt-llm", "weights": "none", "no_drafter": alone}
    with pytest.raises(DFlashError, match=said):
        build(name, None, tmp_path / "b", options=TensorRTLLMOptions(gpu="h200", **options), **asked)


def test_a_dflash2_drafter_keeps_its_kind(pair: Path, tmp_path: Path) -> None:
    shutil.copytree(pair / "target", tmp_path / "target")
    drafter = make_dflash2(tmp_path / "drafter", tmp_path / "target")
    bundle = build_pair(tmp_path, tmp_path / "b")
    weights = "model.safetensors"
    stored = {name: t.to(torch.bfloat16) for name, t in load_file(drafter / weights).items()}
    written = load_file(bundle.path / "drafter" / weights)
    assert written.keys() == stored.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in stored.items())
    before, after = (read_drafter_config(path) for path in (drafter, bundle.path / "drafter"))
    assert (after.architecture, after.settings, after.layers) == (
        "DFlash2DraftModel",
        before.settings,
        before.layers,
    )
    args = yaml.safe_load((bundle.path / "llm_args.yaml").read_text())
    assert args["speculative_config"]["attention_backend"] == "VANILLA"


def test_weights_are_taken_as_they_are(pair: Path, built: Bundle) -> None:
    shards = sorted(path.name for path in (pair / "target").glob("*.safetensors"))
    assert len(shards) >= 3
    for name in shards:
        assert (built.path / "target" / name).read_bytes() == (pair / "target" / name).read_bytes()
    drafter = "drafter/model.safetensors"
    assert (built.path / drafter).read_bytes() == (pair / drafter).read_bytes()
    assert Checkpoint(built.path / "target").tensors.keys() == Checkpoint(pair / "target").tensors.keys()
    Bundle.open(built.path, "full")


def test_a_drafter_directory_is_what_all_readers_take_it_for(pair: Path, tmp_path: Path) -> None:
    """Our loader, safetensors, and Transformers' Qwen3 with the layers' weights read the same tensors."""
    bundle = build_pair(pair, tmp_path / "b", "turned")
    directory = bundle.path / "drafter"
    config, original = read_drafter_config(directory), read_drafter_config(pair / "turned")
    assert config.target_layer_ids == (0, 1, 2)
    assert (config.block_size, config.mask_token_id) == (original.block_size, original.mask_token_id)
    assert config.rope == original.rope
    written = json.loads((directory / "config.json").read_text())
    assert not {"auto_map", "torch_dtype"} & written.keys()  # no code to fetch
    assert written["block_size"] == written["dflash_config"]["block_size"]

    source = {
        name: t.to(torch.bfloat16) for name, t in load_file(pair / "turned" / "model.safetensors").items()
    }
    hidden = config.hidden_size
    first, second, third = source["fc.weight"].split(hidden, dim=1)  # for taps 2, 0, 1
    source["fc.weight"] = torch.cat([second, third, first], dim=1)
    theirs = load_file(directory / "model.safetensors")
    ours = Checkpoint(directory)
    assert theirs.keys() == ours.tensors.keys() == source.keys()
    for name, expected in source.items():
        assert theirs[name].dtype == torch.bfloat16
        assert torch.equal(theirs[name], expected), name
        assert ours.array(name).tobytes() == expected.view(torch.uint8).numpy().tobytes(), name

    assert AutoConfig.from_pretrained(directory).block_size == config.block_size
    model, report = Qwen3Model.from_pretrained(directory, dtype=torch.bfloat16, output_loading_info=True)
    assert set(report["unexpected_keys"]) == {"fc.weight", "hidden_norm.weight"}
    assert set(report["missing_keys"]) == {"embed_tokens.weight"}
    loaded = {name: t for name, t in model.state_dict().items() if name != "embed_tokens.weight"}
    assert loaded.keys() == source.keys() - {"fc.weight", "hidden_norm.weight"}
    assert all(torch.equal(t, source[name]) for name, t in loaded.items())


def test_reordered_taps_draft_the_same(pair: Path, tmp_path: Path) -> None:
    """The rewritten drafter on ONNX Runtime drafts the same as the original."""
    make_drafter(tmp_path / "turned", pair / "target", taps=(2, 0, 1))
    shutil.copytree(pair / "target", tmp_path / "target")
    bundle = build_pair(tmp_path, tmp_path / "trtllm", "turned")
    found = []
    for drafter in (tmp_path / "turned", bundle.path / "drafter"):
        out = tmp_path / f"{drafter.parent.name}-onnx"
        build(str(tmp_path / "target"), str(drafter), out)
        with LLM(out) as llm:
            params = SamplingParams(max_tokens=40, ignore_eos=True)
            completion = llm.generate([3, 1, 4, 1, 5], params, block_length=8)
            found.append((completion.token_ids, completion.statistics.acceptance_histogram))
    assert found[0] == found[1]


def test_a_block_longer_than_trained_is_refused(pair: Path, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"--block-size is 9, expected 2\.\.8"):
        build_pair(pair, tmp_path / "b", block_size=9)
    shorter = build_pair(pair, tmp_path / "b", block_size=5)
    args = yaml.safe_load((shorter.path / "llm_args.yaml").read_text())
    assert args["speculative_config"]["max_draft_len"] == 4


def test_missing_and_unknown_tensors_are_refused(pair: Path, tmp_path: Path) -> None:
    shutil.copytree(pair / "target", tmp_path / "target")
    tensors = load_file(pair / "drafter" / "model.safetensors")
    cases: list[tuple[str, dict[str, torch.Tensor], str]] = [
        ("missing", {k: t for k, t in tensors.items() if k != "layers.1.self_attn.k_norm.weight"}, "has no tensor"),
        ("unknown", tensors | {"layers.0.conv.weight": torch.zeros(2)}, "not part of the architecture"),
        ("shape", tensors | {"fc.weight": tensors["fc.weight"][:, :64].contiguous()}, "has shape"),
        ("dtype", tensors | {"fc.weight": tensors["fc.weight"].to(torch.float8_e4m3fn)}, "is F8_E4M3"),
    ]  # fmt: skip
    for name, changed, message in cases:
        shutil.copytree(pair / "drafter", tmp_path / name)
        save_file(changed, tmp_path / name / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            build_pair(tmp_path, tmp_path / "b", name)
    assert not (tmp_path / "b").exists()


FP8 = {"num_bits": 8, "type": "float"}
FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
BLOCK = FP8 | {"strategy": "block", "block_structure": [128, 128]}
# Weights and inputs, for compressed-tensors.
STORED = {
    "fp8-rows": (FP8 | {"strategy": "channel"}, FP8 | {"strategy": "token", "dynamic": True}),
    "fp8-blocks": (BLOCK, FP8 | {"strategy": "group", "group_size": 128, "dynamic": True}),
    "nvfp4": (FP4, FP4 | {"dynamic": "local"}),
}


def stored_bytes(bundle: Bundle) -> int:
    """Of the target, as the memory plan of a bundle counts them."""
    weights = bundle.manifest["tensorrt_llm"]["memory"]["weights"]["target"]
    return sum(n for role in weights.values() for n in role.values())


@pytest.mark.parametrize("name", STORED)
def test_formats_of_compressed_tensors_are_passed_on_as_stored(name: str, tmp_path: Path) -> None:
    make_drafter(tmp_path / "drafter", make_target(tmp_path / "plain"))
    group = dict(zip(("weights", "input_activations"), STORED[name], strict=True))
    target = tmp_path / "target"
    compressed(tmp_path / "plain", target, {"config_groups": {"group_0": group | {"targets": ["Linear"]}}})
    where = TensorRTLLMOptions(gpu="b200" if name == "nvfp4" else "h200")
    bundle = build_pair(tmp_path, tmp_path / "b", options=where)
    assert bundle.manifest["precision"]["target"] == name
    file = "model.safetensors"
    assert (bundle.path / "target" / file).read_bytes() == (target / file).read_bytes()
    assert stored_bytes(bundle) == sum(tensor.nbytes for tensor in Checkpoint(target).tensors.values())


@pytest.mark.parametrize("make", [make_target, make_qwen3_moe])
@pytest.mark.parametrize(("scheme", "name", "gpu"), [("fp8", "fp8-rows", "h200"), ("nvfp4", "nvfp4", "b200")])
def test_modelopt_checkpoints_build(scheme, name, gpu, make, tmp_path) -> None:
    """Dense layers and experts, each quantized separately."""
    make_drafter(tmp_path / "drafter", make(tmp_path / "plain"))
    target = quantize(tmp_path / "plain", tmp_path / "target", scheme)
    own = json.loads((target / "hf_quant_config.json").read_text())
    own["quantization"]["kv_cache_quant_algo"] = "FP8"
    write_json(target / "hf_quant_config.json", own)
    where = TensorRTLLMOptions(gpu=gpu)
    bundle = build_pair(tmp_path, tmp_path / "b", options=where)
    assert bundle.manifest["precision"] == {"target": name, "drafter": "bfloat16"}
    assert (bundle.path / "target" / "hf_quant_config.json").is_file()
    args = yaml.safe_load((bundle.path / "llm_args.yaml").read_text())
    assert args["kv_cache_config"]["dtype"] == "fp8"
    assert stored_bytes(bundle) == sum(tensor.nbytes for tensor in Checkpoint(target).tensors.values())

    tensors = load_file(target / "model.safetensors")
    gone = next(name for name in sorted(tensors) if name.endswith("up_proj.weight_scale"))
    save_file({n: t for n, t in tensors.items() if n != gone}, target / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"no tensor '{gone}'"):
        build_pair(tmp_path, tmp_path / "c", options=where)


def test_experts_stay_as_they_are(tmp_path: Path) -> None:
    target = make_gpt_oss(tmp_path / "gpt" / "target")
    make_gpt_oss_drafter(tmp_path / "gpt" / "drafter", target)
    where = TensorRTLLMOptions(gpu="b200", tensor_parallel=2, expert_parallel=2)
    bundle = build_pair(tmp_path / "gpt", tmp_path / "b", options=where)
    assert bundle.manifest["precision"]["target"] == "mxfp4"
    weights = "model.safetensors"
    assert (bundle.path / "target" / weights).read_bytes() == (target / weights).read_bytes()
    args = yaml.safe_load((bundle.path / "llm_args.yaml").read_text())
    assert args["moe_expert_parallel_size"] == 2


def test_the_command_builds(pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["build", "--target", str(pair / "target"), "--drafter", str(pair / "drafter"), "--out"]
    options = ["--engine", "tensorrt-llm", "--gpu", "b300", "--tp", "2", "--max-batch-size", "16"]
    assert main([*base, str(tmp_path / "b"), *options]) == 0
    args = yaml.safe_load((tmp_path / "b" / "llm_args.yaml").read_text())
    assert args["tensor_parallel_size"] == 2
    said = capsys.readouterr().out
    found = inspect(tmp_path / "b")
    assert found["runs_on"] == "2 x b300, 1 node(s), TensorRT-LLM 1.4.0rc1"
    assert found["choices"]["speculative_config.max_draft_len"].startswith("7: block of 8")
    assert "max_batch_size 16: as asked" in said
    with pytest.raises(SystemExit) as ended:
        main([*base, str(tmp_path / "c"), "--engine", "tensorrt-llm", "--gpu", "v100"])
    assert ended.value.code == 2
    assert "--gpu is 'v100'" in capsys.readouterr().err
    for wrong in (["--gpu", "b200"], ["--engine", "tensorrt-llm"]):
        with pytest.raises(SystemExit) as raised:
            main([*base, str(tmp_path / "c"), *wrong])
        assert raised.value.code == 2

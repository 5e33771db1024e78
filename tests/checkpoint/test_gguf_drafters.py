"""Drafters in GGUF files: the configuration, the tensors and the drafts of the safetensors that they were made from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import onnx_ir as ir
import pytest
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch

from dflash_trt import LLM, SamplingParams
from dflash_trt.building.build import build
from dflash_trt.building.sources import resolve
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.errors import CheckpointError, DFlashError
from dflash_trt.formats.precision import parse_precision
from dflash_trt.models.configs import read_drafter_config
from tests.doubles.checkpoints import make_drafter, make_target
from tests.doubles.kind_checkpoints import make_dflash2, make_dspark, make_eagle3, target_config

LAYERS = 6
LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "hidden_norm": "attn_norm_2",
    "attention_conv.base_kernel": "attn_conv_base", "mlp_conv.base_kernel": "ffn_conv_base",
    "attention_conv.kernel_projection": "attn_conv_proj", "mlp_conv.kernel_projection": "ffn_conv_proj",
}  # fmt: skip
TOP = {
    "fc": "fc", "hidden_norm": "enc.output_norm", "norm": "output_norm", "embed_tokens": "token_embd",
    "lm_head": "output", "input_norm": "enc.output_norm", "candidate_selector.hidden_projection": "selector_hidden",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight", "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2", "confidence_head.proj": "conf_proj",
}  # fmt: skip


def name_in_gguf(name: str) -> str:
    end = next((end for end in (".weight", ".bias") if name.endswith(end)), "")
    stem = name.removesuffix(end)
    if stem.startswith(("layers.", "midlayer.")):
        place, stem = stem.split(".", 2)[1:] if stem.startswith("layers.") else ("0", stem.partition(".")[2])
        return f"blk.{place}.{LAYER[stem]}{end}"
    return TOP[stem] + end


def write_drafter(
    path: Path, source: Path, *, kind: str = "F32", without: tuple[str, ...] = (), **extra: Any
) -> Path:
    """What llama.cpp's conversion makes of a drafter, with matrices of type `kind`.

    without: keys and tensors that are left out. extra: further keys, or others in their place.
    """
    config = target_config(source)
    block = {**config, **config.get("dflash_config", {})}
    eagle = "draft_vocab_size" in config
    family, heads, kv_heads = (
        "eagle3" if eagle else "dflash",
        config["num_attention_heads"],
        config["num_key_value_heads"],
    )
    keys: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": config.get("head_dim", config["hidden_size"] // heads),
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": float(
            config.get("rope_theta") or config.get("rope_parameters", {}).get("rope_theta", 1e4)
        ),
    }
    if eagle:
        aux = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        midlayer = config["architectures"] == ["LlamaForCausalLMEagle3"] and "head_dim" not in config
        keys |= {
            "target_layers": [layer + midlayer for layer in aux],
            "norm_before_fc": bool(config["eagle_config"].get("norm_before_fc")),
        }
    else:
        keys |= {
            "target_layers": [layer + 1 for layer in block["target_layer_ids"]],
            "block_size": block["block_size"],
        }
        keys |= {
            key: block[key]
            for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
            if key in block
        }
        if (causal := block.get("causal", block.get("is_causal"))) is not None:
            keys["attention.causal"] = causal
        if config.get("use_sliding_window"):
            keys["attention.sliding_window"] = config["sliding_window"]
            keys["attention.sliding_window_pattern"] = [
                kind == "sliding_attention" for kind in config["layer_types"]
            ]
    metadata = {f"{family}.{key}": value for key, value in keys.items()}
    metadata |= {"tokenizer.ggml.tokens": [f"t{i}" for i in range(config["vocab_size"])]}
    if not eagle:
        metadata["tokenizer.ggml.mask_token_id"] = block["mask_token_id"]
    writer = gguf.GGUFWriter(path, extra.pop("architecture", family))
    for key, value in {**metadata, **extra}.items():
        if key not in without:
            add = {
                bool: writer.add_bool,
                int: writer.add_uint32,
                float: writer.add_float32,
                list: writer.add_array,
            }
            add[type(value)](key, value)
    for name, values in load_torch(source / "model.safetensors").items():
        if name == "t2d":
            continue
        array = values.numpy() if name == "d2t" else values.float().numpy()
        if name == "d2t":
            array = array + np.arange(len(array))
        if name in without:
            continue
        if eagle and name.endswith(("q_proj.weight", "k_proj.weight")):  # as of interleaved RoPE
            n = heads if "q_proj" in name else kv_heads
            array = array.reshape(n, 2, -1, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)
        theirs = "d2t" if name == "d2t" else name_in_gguf(name)
        if kind == "F32" or array.ndim != 2 or array.shape[-1] % 32 or name == "d2t":
            writer.add_tensor(theirs, np.ascontiguousarray(array))
        else:
            quantization = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(
                theirs, gguf.quantize(np.ascontiguousarray(array), quantization), raw_dtype=quantization
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


KINDS: dict[str, Callable[[Path, Path], Path]] = {
    "dflash": lambda out, target: make_drafter(
        out, target, dtype="float32", taps=(0, 3), sliding_window=96,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "dflash2": lambda out, target: make_dflash2(out, target, window=96),
    "dspark": lambda out, target: make_dspark(out, target, confidence=True),
    "eagle3": lambda out, target: make_eagle3(out, target, layout="layers.0", norm_before_fc=True, aux=(1, 3, 4)),
    "specforge": lambda out, target: make_eagle3(out, target, aux=(0, 2, 4)),
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_TRT_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"), layers=LAYERS, dtype="float32", favourites=6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_drafts_what_its_safetensors_draft(target: Path, tmp_path: Path, kind: str) -> None:
    source = KINDS[kind](tmp_path / "source", target)
    file = write_drafter(tmp_path / "drafter.gguf", source)
    directory = resolve(str(file), "drafter").directory
    of_file, original = read_drafter_config(directory), read_drafter_config(source)
    own = original.settings if kind != "specforge" else replace(original.settings, layer="layers.0")
    same = replace(
        original, path=of_file.path, architecture=of_file.architecture, num_target_layers=None, settings=own,
        row_scale=of_file.row_scale,
    )  # fmt: skip
    if kind == "dspark":
        same = replace(same, settings=replace(own, embedding=False, vocabulary=None))
    assert replace(of_file, path=same.path) == same
    numbers = {
        name.replace("midlayer", "layers.0"): value
        for name, value in load_file(source / "model.safetensors").items()
    }
    numbers.pop("t2d", None)
    checkpoint = Checkpoint(directory)
    assert set(checkpoint.tensors) == set(numbers)
    for name, value in numbers.items():
        np.testing.assert_array_equal(checkpoint.array(name), value, err_msg=name)
    counts = []
    for number, drafter in enumerate((source, file)):
        bundle = build(str(target), str(drafter), tmp_path / f"bundle{number}", max_seq_len=128)
        with LLM(bundle.path) as llm:
            done = llm.generate("a b c", SamplingParams(max_tokens=24, ignore_eos=True), block_length=4)
            counts.append((done.token_ids, done.statistics.num_drafts, done.statistics.num_accepted_tokens))
    assert counts[0] == counts[1]
    assert counts[0][1]


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "BF16"])
def test_quantized_tensors_have_the_library_s_numbers(target: Path, tmp_path: Path, kind: str) -> None:
    source = make_dspark(tmp_path / "source", target)
    file = write_drafter(
        tmp_path / "drafter.gguf", source, kind=kind, without=("embed_tokens.weight", "lm_head.weight")
    )
    checkpoint = Checkpoint(resolve(str(file), "drafter").directory)
    assert "embed_tokens.weight" not in checkpoint.tensors
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    assert {tensor.tensor_type.name for tensor in stored.values()} == {"F32", kind}
    for name in checkpoint.tensors:
        tensor = stored[name_in_gguf(name)]
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        found = checkpoint.array(name).astype(np.float32)
        np.testing.assert_allclose(found, expected.reshape(found.shape), rtol=2**-8, err_msg=name)


@pytest.mark.parametrize("kind", ["dflash2", "dspark", "eagle3"])
def test_layers_of_integers_stay_integers_where_the_engine_takes_them(
    target: Path, tmp_path: Path, kind: str
) -> None:
    """The layers, and not the tables, with the drafts of the same numbers in floating point."""
    file = write_drafter(tmp_path / "drafter.gguf", KINDS[kind](tmp_path / "source", target), kind="Q8_0")
    drafts = []
    for name, precision in (("stored", None), ("widened", "target=fp32,drafter=fp32")):
        precision = None if precision is None else parse_precision(precision)
        bundle = build(str(target), str(file), tmp_path / name, max_seq_len=128, precision=precision)
        names = {node.op_type for node in ir.load(bundle.path / "drafter.onnx").graph}
        assert ("MatMulNBits" in names) == (name == "stored")
        with LLM(bundle.path) as llm:
            done = llm.generate("a b c", SamplingParams(max_tokens=24, ignore_eos=True), block_length=4)
            drafts.append((done.token_ids, done.statistics.num_draft_tokens))
    assert drafts[0] == drafts[1]


@pytest.mark.parametrize(
    ("kind", "without", "extra", "message"),
    [
        ("dflash", ("fc.weight",), {}, "has no tensor fc.weight"),
        ("dflash", ("hidden_norm.weight",), {}, "has no tensor enc.output_norm.weight"),
        ("dflash", ("tokenizer.ggml.mask_token_id",), {}, "tokenizer.ggml.mask_token_id is missing"),
        ("dflash", ("tokenizer.ggml.tokens",), {}, "tokenizer.ggml.tokens is missing"),
        ("dflash", ("dflash.target_layers",), {}, "dflash.target_layers is missing"),
        ("dflash", (), {"dflash.dflash.block_size": 8}, "dflash.dflash.block_size is an older name: convert"),
        ("dflash", (), {"architecture": "dspark"}, "general.architecture is 'dspark', and is an older name"),
        ("dflash", (), {"architecture": "qwen3"}, "general.architecture is 'qwen3', which is a target's"),
        ("dflash", (), {"dflash.hyper_connection.count": 4}, "dflash.hyper_connection.count is 4, which this version"),
        ("dflash", (), {"tokenizer.ggml.tokens": ["a"] * 50}, "vocab_size is 50"),
        ("dflash2", (), {"tokenizer.ggml.tokens": ["a"] * 50}, "tensor selector_predecessor.weight has 384 rows, but"),
        ("dspark", ("markov_head.markov_w2.weight",), {}, "has no tensor markov_w2.weight"),
        ("eagle3", ("input_norm.weight",), {}, "has no tensor enc.output_norm.weight"),
        ("eagle3", (), {"eagle3.extract_layers": 4}, "eagle3.extract_layers is an older name"),
    ],
)  # fmt: skip
def test_what_is_missing_or_older_is_named(
    target: Path, tmp_path: Path, kind: str, without: tuple[str, ...], extra: dict[str, Any], message: str
) -> None:
    file = write_drafter(
        tmp_path / "drafter.gguf", KINDS[kind](tmp_path / "source", target), without=without, **extra
    )
    with pytest.raises(DFlashError, match=message):
        build(str(target), str(file), tmp_path / "out")


def test_a_drafter_is_no_target(target: Path, tmp_path: Path) -> None:
    file = write_drafter(tmp_path / "drafter.gguf", KINDS["dflash"](tmp_path / "source", target))
    with pytest.raises(CheckpointError, match=r"general.architecture is 'dflash', which is a drafter's"):
        resolve(str(file), "target")

"""Configurations and names of drafters in GGUF files: `dflash`, which is DFlash, DFlash2 or DSpark, and `eagle3`.

Embedding and head are the target's where the file has none. The file counts the layers that a tapped state enters.
Formats: github.com/ggml-org/llama.cpp, conversion/qwen.py, src/models/dflash.cpp and eagle3.cpp.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_trt.checkpoint.fields import Fields
from dflash_trt.errors import CheckpointError, quoted, show

if TYPE_CHECKING:
    from gguf import ReaderTensor

_LAYERS, _TOKENS = 10_000, "tokenizer.ggml.tokens"
DRAFT_TOKENS = "d2t"
AGAIN = "is an older name: convert the drafter again, with llama.cpp's current convert_hf_to_gguf.py"
# Names that older converters wrote.
OLDER = {"dspark", "dflash-draft", "dflash2"}
_OLDER_KEYS = {"extract_layers", "target_layer_ids", "mask_token_id"}
# Keys of an architecture's section, beside those of every file.
KEYS: Mapping[str, frozenset[str]] = {
    "dflash": frozenset(
        {
            "attention.causal",
            "attention.sliding_window",
            "attention.sliding_window_pattern",
            "block_size",
            "conv_group_size",
            "conv_kernel_size",
            "embedding_scale",
            "final_logit_softcapping",
            "has_confidence_head",
            "logit_scale",
            "rope.dimension_sections",
            "sample_from_anchor",
            "selector_rank",
            "selector_top_k",
            "target_layers",
        }
    ),
    "eagle3": frozenset({"norm_before_fc", "norm_before_residual", "target_hidden_size", "target_layers"}),
}
_TOP = {
    "token_embd.weight": "embed_tokens.weight",
    "fc.weight": "fc.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
    DRAFT_TOKENS: DRAFT_TOKENS,
}
_NAMES = {
    "dflash": {
        "enc.output_norm.weight": "hidden_norm.weight",
        "selector_hidden.weight": "candidate_selector.hidden_projection.weight",
        "selector_predecessor.weight": "candidate_selector.predecessor_codebook",
        "selector_successor.weight": "candidate_selector.successor_codebook",
        "markov_w1.weight": "markov_head.markov_w1.weight",
        "markov_w2.weight": "markov_head.markov_w2.weight",
        "conf_proj.weight": "confidence_head.proj.weight",
        "conf_proj.bias": "confidence_head.proj.bias",
    },
    "eagle3": {"enc.output_norm.weight": "input_norm.weight"},
}
# Tensors of which rows are read, and not multiplied as a layer.
TABLES = {
    "embed_tokens.weight",
    "candidate_selector.predecessor_codebook",
    "candidate_selector.successor_codebook",
    "markov_head.markov_w1.weight",
    "markov_head.markov_w2.weight",
}
_LAYER = {
    "dflash": {
        "attn_conv_base": "attention_conv.base_kernel",
        "attn_conv_proj.weight": "attention_conv.kernel_projection.weight",
        "ffn_conv_base": "mlp_conv.base_kernel",
        "ffn_conv_proj.weight": "mlp_conv.kernel_projection.weight",
    },
    "eagle3": {"attn_norm_2.weight": "hidden_norm.weight"},
}


def names(family: str, layers: int, usual: Mapping[str, str]) -> dict[str, str]:
    """Our name of each tensor that such a file may have. `usual`: the ends of names in every layer."""
    of_layer = {f"{theirs}.weight": f"{ours}.weight" for theirs, ours in usual.items()} | _LAYER[family]
    return (
        _TOP
        | _NAMES[family]
        | {f"blk.{i}.{a}": f"layers.{i}.{b}" for i in range(layers) for a, b in of_layer.items()}
    )


def refuse_older(fields: Fields, keys: Collection[str]) -> None:
    """Refuse a file of an older converter, whose keys may mean something else."""
    for key in keys:
        if key in _OLDER_KEYS or key.startswith(("dflash.", "dspark.")):
            raise fields.error(key, AGAIN)


def config_of(
    family: str,
    fields: Fields,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, ReaderTensor],
    common: Mapping[str, Any],
) -> dict[str, Any]:
    """config.json of the drafter. `fields`: the architecture's section. `common`: the fields of every model.

    Raises CheckpointError, naming the key or the tensor that is missing or wrong.
    """
    config = {
        **common,
        "vocab_size": _vocabulary(fields.path, metadata, tensors),
        "tie_word_embeddings": False,
    }
    layers = list(fields.integers("target_layers", most=_LAYERS))
    if family == "eagle3":
        return _eagle3(fields, tensors, config, layers)
    _needed(fields.path, tensors, "fc.weight", "enc.output_norm.weight", "output_norm.weight")
    config |= _windows(fields, config["num_hidden_layers"])
    half = config["head_dim"] // 2
    sections = fields.get("rope.dimension_sections")
    if sections is not None and (
        not isinstance(sections, list) or sections[:1] != [half] or any(sections[1:])
    ):
        raise fields.wrong("rope.dimension_sections", "expected all of the head in the first")
    block = {
        "block_size": fields.integer("block_size", default=16),  # llama.cpp's default
        "mask_token_id": Fields(fields.path, metadata).integer("tokenizer.ggml.mask_token_id", minimum=0),
    }
    scales = {
        name: fields.number(key)
        for name, key in (
            ("final_logit_softcapping", "final_logit_softcapping"),
            ("input_embedding_scale", "embedding_scale"),
            ("output_multiplier", "logit_scale"),
        )
        if fields.get(key) is not None
    }
    if any(name.startswith("markov_") for name in tensors):
        return _dspark(fields, tensors, config, {**block, **scales, "aux_hidden_state_layer_ids": layers})
    if 0 in layers:
        raise fields.error(
            "target_layers", f"is {quoted(layers)}, but a tapped state follows layer 1 at least"
        )
    selects = any(name.startswith("selector_") for name in tensors)
    counts = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k") if selects else ()
    causal = (
        {"causal": fields.boolean("attention.causal")} if fields.get("attention.causal") is not None else {}
    )
    return {
        "architectures": ["DFlash2DraftModel" if selects else "DFlashDraftModel"],
        "model_type": "qwen3",
        **config,
        "dflash_config": {
            **block,
            **scales,
            **causal,
            **{key: fields.integer(key) for key in counts},
            "target_layer_ids": [layer - 1 for layer in layers],
        },
    }


def _dspark(
    fields: Fields, tensors: Mapping[str, ReaderTensor], config: Mapping[str, Any], block: Mapping[str, Any]
) -> dict[str, Any]:
    """As speculators writes it, whose drafters may have the target's embedding."""
    _needed(fields.path, tensors, "markov_w1.weight", "markov_w2.weight")
    rank, size = (int(number) for number in tensors["markov_w2.weight"].shape)
    confidence = tensors.get("conf_proj.weight")
    if fields.boolean("has_confidence_head", default=confidence is not None) != (confidence is not None):
        raise fields.wrong(
            "has_confidence_head",
            "but conf_proj.weight tells otherwise",
        )
    causal = fields.boolean("attention.causal", default=True)
    if fields.get("attention.causal") and "full_attention" in config["layer_types"]:
        raise fields.error(
            "attention.causal", "is true, but layers without a window are supported only if it is false"
        )
    if "output_multiplier" in block and block["output_multiplier"] != 1:
        raise fields.wrong("logit_scale", "expected 1 in a DSpark drafter")
    return {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "transformer_layer_config": {"model_type": "qwen3", **config},
        "draft_vocab_size": size,
        **{key: value for key, value in block.items() if key != "output_multiplier"},
        "sample_from_anchor": fields.boolean("sample_from_anchor", default=True),
        "sliding_window_non_causal": not causal,
        "markov_rank": rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": confidence is not None,
        "confidence_head_with_markov": confidence is not None
        and int(confidence.shape[0]) > config["hidden_size"],
    }


def _eagle3(
    fields: Fields, tensors: Mapping[str, ReaderTensor], config: Mapping[str, Any], layers: list[int]
) -> dict[str, Any]:
    """With the names and taps of Model Optimizer, whose states enter the layers."""
    _needed(fields.path, tensors, "fc.weight", "output_norm.weight", "blk.0.attn_norm_2.weight")
    head = tensors.get("output.weight")
    norms = {name: fields.boolean(name, default=False) for name in ("norm_before_fc", "norm_before_residual")}
    if norms["norm_before_fc"]:
        _needed(fields.path, tensors, "enc.output_norm.weight")
    hidden = config["hidden_size"]
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **config,
        **norms,
        "draft_vocab_size": config["vocab_size"] if head is None else int(head.shape[1]),
        "target_hidden_size": fields.integer("target_hidden_size", default=hidden),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": layers, "use_aux_hidden_state": True},
    }


def _needed(file: Path, tensors: Collection[str], *wanted: str) -> None:
    for name in wanted:
        if name not in tensors:
            raise CheckpointError(f"{file}: has no tensor {name}")


def _vocabulary(file: Path, metadata: Mapping[str, Any], tensors: Mapping[str, ReaderTensor]) -> int:
    """The number of the target's tokens, by the file's tokenizer, with which its tables must agree."""
    tokens = metadata.get(_TOKENS)
    if not isinstance(tokens, list) or not tokens:
        raise CheckpointError(f"{file}: {_TOKENS} is missing, expected the target's tokens")
    for name in (
        "token_embd.weight",
        "selector_predecessor.weight",
        "selector_successor.weight",
        "markov_w1.weight",
    ):
        if name in tensors and int(tensors[name].shape[-1]) != len(tokens):
            rows = int(tensors[name].shape[-1])
            raise CheckpointError(f"{file}: tensor {name} has {rows} rows, but {_TOKENS} has {len(tokens)}")
    return len(tokens)


def _windows(fields: Fields, layers: int) -> dict[str, Any]:
    """The window's fields in Qwen3's configuration. Without a pattern, every layer has the window."""
    if fields.get("attention.sliding_window") is None:
        return {"use_sliding_window": False, "layer_types": ["full_attention"] * layers}
    pattern = fields.get("attention.sliding_window_pattern")
    pattern = [True] * layers if pattern is None else pattern
    if not isinstance(pattern, list) or len(pattern) != layers or any(type(x) is not bool for x in pattern):
        raise fields.error(
            "attention.sliding_window_pattern", f"is {show(pattern)}, expected {layers} booleans"
        )
    return {
        "use_sliding_window": True,
        "sliding_window": fields.integer("attention.sliding_window"),
        "layer_types": ["sliding_attention" if sliding else "full_attention" for sliding in pattern],
    }

"""Large checkpoints in published form with random weights, written as a stream, for measuring conversion.

They are not usable models: only shapes, names and dtypes are right.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterable
from pathlib import Path

import ml_dtypes
import numpy as np

SHIPPED = Path(__file__).resolve().parents[2] / "dflash_trt" / "shipped" / "tiny"
_CHUNK = 8 << 20


def qwen3_config(
    hidden: int, layers: int, intermediate: int, vocab: int, heads: tuple[int, int] | None = None
) -> dict[str, object]:
    """`heads`: numbers of query heads and key/value heads. By default as many as fit the width, and half of that."""
    queries, keys = heads or (hidden // 128, hidden // 256)
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "max_position_embeddings": 40960,
        "max_window_layers": layers,
        "num_attention_heads": queries,
        "num_hidden_layers": layers,
        "num_key_value_heads": keys,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": vocab,
        "eos_token_id": 0,
    }


def decoder_layers(config: dict[str, object], prefix: str) -> dict[str, tuple[int, ...]]:
    d, size = _int(config, "hidden_size"), _int(config, "head_dim")
    q, kv = _int(config, "num_attention_heads") * size, _int(config, "num_key_value_heads") * size
    inner = _int(config, "intermediate_size")
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(_int(config, "num_hidden_layers")):
        layer = {
            "input_layernorm": (d,),
            "post_attention_layernorm": (d,),
            "self_attn.q_proj": (q, d),
            "self_attn.k_proj": (kv, d),
            "self_attn.v_proj": (kv, d),
            "self_attn.o_proj": (d, q),
            "self_attn.q_norm": (size,),
            "self_attn.k_norm": (size,),
            "mlp.gate_proj": (inner, d),
            "mlp.up_proj": (inner, d),
            "mlp.down_proj": (d, inner),
        }
        shapes |= {f"{prefix}layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def write_pair(
    directory: Path,
    *,
    hidden: int,
    layers: int,
    intermediate: int,
    vocab: int,
    heads: tuple[int, int] | None = None,
    drafter_layers: int = 5,
) -> int:
    """`directory`/target and /drafter, BF16, with the tokenizer of the shipped pair. Returns bytes of weights.

    The drafter taps five of the target's layers; of fewer than eight layers, fewer.
    """
    config = qwen3_config(hidden, layers, intermediate, vocab, heads)
    target = decoder_layers(config, "model.")
    target |= {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    target["model.norm.weight"] = (hidden,)
    taps = sorted({round(1 + i * (layers - 4) / 4) for i in range(5)})
    drafter_config = qwen3_config(hidden, drafter_layers, intermediate, vocab, heads) | {
        "architectures": ["DFlashDraftModel"],
        "block_size": 16,
        "num_target_layers": layers,
        "dflash_config": {"mask_token_id": 1, "target_layer_ids": taps},
        "layer_types": ["full_attention"] * drafter_layers,
    }
    drafter = decoder_layers(drafter_config, "")
    drafter |= {
        "fc.weight": (hidden, len(taps) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    total = 0
    for role, settings, shapes in (("target", config, target), ("drafter", drafter_config, drafter)):
        folder = directory / role
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(settings, indent=2))
        total += write_safetensors(folder / "model.safetensors", shapes.items())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SHIPPED / "target" / name, directory / "target" / name)
    return total


def write_safetensors(file: Path, tensors: Iterable[tuple[str, tuple[int, ...]]]) -> int:
    """Write random BF16 tensors of the given shapes without holding them. Returns the bytes of data."""
    header, offset = {}, 0
    for name, shape in tensors:
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    noise = np.random.default_rng(0).standard_normal(_CHUNK // 2, dtype=np.float32) * 0.02
    block = memoryview(noise.astype(ml_dtypes.bfloat16).tobytes())
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for start in range(0, offset, _CHUNK):
            out.write(block[: min(_CHUNK, offset - start)])
    return offset


def _int(config: dict[str, object], key: str) -> int:
    value = config[key]
    assert isinstance(value, int)
    return value

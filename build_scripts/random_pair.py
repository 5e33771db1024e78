"""Checkpoints of a known pair's shapes, filled with noise: what a build of a large model takes, without its download.

    python -m build_scripts.random_pair gpt-oss-20b DIR [--layers 2] [--stored fp8]

writes DIR/target and DIR/drafter: names, shapes and dtypes of the pair, including MXFP4 experts. They have fewer
layers, with the taps and windows of the first ones. With --stored, the target is quantized as on the hub: `fp8` has
blocks of 128 x 128; `nvfp4` has NVFP4 in the MLPs and FP8 by rows elsewhere.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from build_scripts import harness
from dflash_trt.checkpoint.catalogue import SHIPPED, known_configs
from dflash_trt.checkpoint.tensors import TensorInfo
from dflash_trt.models.configs import read_drafter_config, read_target_config
from dflash_trt.models.inventory import take_inventory

_CHUNK, _PIECE = 8 << 20, 4 << 20
_NOT = ("lm_head", r"re:.*(embed_tokens|norm|conv1d|visual|in_proj_a|in_proj_b|in_proj_ba)$")
_FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
_FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
# quantization_config of a target, by the value of --stored.
STORED: dict[str, dict[str, Any]] = {
    "fp8": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**_FP8, "strategy": "block", "block_structure": [128, 128], "dynamic": False},
                "input_activations": {**_FP8, "strategy": "group", "group_size": 128, "dynamic": True},
            }
        },
        "ignore": list(_NOT),
    },
    "nvfp4": {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": {
            "group_0": {
                "format": "float-quantized",
                "targets": [r"re:.*(self_attn|linear_attn)\..*"],
                "weights": {**_FP8, "strategy": "channel", "dynamic": False},
                "input_activations": {**_FP8, "strategy": "token", "dynamic": True},
            },
            "group_1": {
                "format": "nvfp4-pack-quantized",
                "targets": [r"re:.*mlp\.(gate|up|down)_proj$"],
                "weights": {**_FP4, "dynamic": False},
                "input_activations": {**_FP4, "dynamic": "local"},
            },
        },
        "ignore": list(_NOT),
    },
}


def write_pair(work: Path, pair: str, layers: int, stored: str | None) -> dict[str, int]:
    """Write `work`/target and /drafter. Returns the bytes of their weights. `stored`: a key of STORED."""
    target, drafter = work / "target", work / "drafter"
    for source, place in zip(known_configs(pair), (target, drafter), strict=True):
        place.mkdir()
        config = json.loads((source / "config.json").read_text())
        if place == target:
            text = config.get("text_config", config)
            text["num_hidden_layers"] = layers
            for by_layer in {"layer_types", "layer_rope_theta"} & text.keys():
                text[by_layer] = text[by_layer][:layers]
            if stored is not None:
                config["quantization_config"] = STORED[stored]
        else:
            taps = [i * layers // 5 for i in range(5)]
            config["dflash_config"]["target_layer_ids"] = sorted(set(taps))
            config["dflash_config"]["mask_token_id"] = config["vocab_size"] - 1  # no token of the tokenizer
            config["num_target_layers"] = layers
        (place / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SHIPPED / "tiny" / "target" / name, target / name)
    configs = read_target_config(target), read_drafter_config(drafter)
    inventory = take_inventory(*configs)
    return {
        place.name: write_noise(place / "model.safetensors", inventory.tensors[place.name])
        for place in (target, drafter)
    }


def write_noise(file: Path, tensors: Sequence[TensorInfo]) -> int:
    """Write noise into every tensor. Scales of MXFP4 are bytes near 2**-7; other scales are positive."""
    header: dict[str, Any] = {}
    offset = 0
    for tensor in tensors:
        place = [offset, offset + tensor.nbytes]
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": place}
        offset += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    rng = np.random.default_rng(0)
    noise = (rng.standard_normal(_CHUNK // 2, dtype=np.float32) * 0.02).astype(ml_dtypes.bfloat16)
    kinds = {
        "numbers": memoryview(noise.tobytes()),
        "blocks": memoryview(rng.bytes(_CHUNK)),
        "scales": memoryview(rng.integers(118, 122, _CHUNK, np.uint8).tobytes()),
        "eighths": memoryview(rng.integers(0x30, 0x40, _CHUNK, np.uint8).tobytes()),
        "factors": memoryview(rng.uniform(0.01, 0.02, _CHUNK // 4).astype(np.float32).tobytes()),
    }
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            kind = _kind(tensor.name, tensor.dtype)
            for start in range(0, tensor.nbytes, _PIECE):
                # Different bytes each time, because TensorRT stores equal tensors once.
                shift = 4 * int(rng.integers(_PIECE // 4))
                out.write(kinds[kind][shift : shift + min(_PIECE, tensor.nbytes - start)])
    return offset


def _kind(name: str, dtype: str) -> str:
    if dtype == "U8":
        return "scales" if name.endswith(("_scales", "_scale")) else "blocks"
    if dtype == "F8_E4M3":
        return "eighths"
    return "factors" if name.endswith(("_scale", "_scale_2", "_scale_inv")) else "numbers"


def main() -> None:
    """Write the pair."""
    parser = harness.parser(__doc__)
    parser.add_argument("pair", help="a known pair")
    parser.add_argument("directory", type=Path, help="is made")
    parser.add_argument("--layers", type=int, default=2, help="of the target")
    parser.add_argument("--stored", choices=STORED, help="how the target is quantized (default: not)")
    args = parser.parse_args()
    args.directory.mkdir(parents=True)
    print(json.dumps(write_pair(args.directory, args.pair, args.layers, args.stored)))


if __name__ == "__main__":
    main()

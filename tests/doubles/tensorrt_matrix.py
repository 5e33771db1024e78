"""The builds with TensorRT-RTX in continuous integration: family x precision x compute capability."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.doubles.checkpoints import make_drafter, make_target
from tests.doubles.family_checkpoints import make_gpt_oss, make_llama, make_qwen3_moe


@dataclass(frozen=True)
class Case:
    """`precision` as in `--precision`. "" is the default: BF16, and experts as they are stored."""

    pair: str
    precision: str
    capability: int


_QWEN3: dict[str, Any] = {
    "layers": 2,
    "sliding_window": 7,
    "layer_types": ("sliding_attention", "full_attention"),
}
_LONG = {"max_position_embeddings": 1 << 16}
# Small random checkpoints with two layers each.
FAMILIES: dict[str, Callable[[Path], Path]] = {
    "qwen3": partial(make_target, **_QWEN3),
    "llama": partial(make_llama, num_hidden_layers=2, attention_bias=True),
    "qwen3-moe": partial(make_qwen3_moe, num_hidden_layers=2, norm_topk_prob=False, moe_intermediate_size=64),
    "gpt-oss, experts in BF16": partial(make_gpt_oss, num_hidden_layers=2, quantized=False),
}
# Two narrow layers with the attention of a published target.
WIDE: dict[str, Callable[[Path], Path]] = {
    "qwen3-4b, wide": partial(make_target, layers=2, heads=32, kv_heads=8, head_dim=128, **_LONG),
    "gpt-oss-20b, wide": partial(
        make_gpt_oss, quantized=False, num_hidden_layers=2, num_local_experts=2, num_experts_per_tok=1,
        experts_per_token=1, num_attention_heads=64, num_key_value_heads=8, head_dim=64, sliding_window=128,
        **_LONG,
    ),
}  # fmt: skip
# Each family, and each kind of precision. Every stored form is in tests/quantization/test_tensorrt_forms.py.
CASES = [
    Case(*row)
    for row in (
        ("qwen3", "target=int8", 86),
        ("qwen3", "target=fp32,drafter=fp32", 80),
        ("llama", "target=fp16,drafter=fp16", 86),
        ("llama", "target=nvfp4,drafter=fp8,head=int4", 120),
        ("qwen3-moe", "target=nvfp4,drafter=nvfp4", 121),
        ("gpt-oss, experts in BF16", "target=fp16,drafter=nvfp4,head=mxfp4", 120),
    )
]


def make_pair(name: str, directory: Path) -> tuple[str, str]:
    """The sources of a pair for `build`, written into `directory`."""
    target = (FAMILIES | WIDE)[name](directory / "target")
    settings: dict[str, Any] = {"layers": 1, "taps": (0, 1), "block_size": 4}
    if name in WIDE:
        settings |= {"layers": 2, "heads": 32, "kv_heads": 8, "head_dim": 128}
    return str(target), str(make_drafter(directory / "drafter", target, **settings))

"""The rows of a pass have the same bits, whatever other rows it has: drafting must not change the tokens.

One sequence of tokens goes through the target's graph on ONNX Runtime, in passes of different widths. An operator that
rounds one row otherwise than several shows here, long before it changes a token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_trt.building.build import build
from dflash_trt.engines.onnxruntime import products
from dflash_trt.engines.onnxruntime.runner import OnnxRuntimeRunner
from dflash_trt.formats.precision import parse_precision
from dflash_trt.graph import onnxruntime as functions
from tests.doubles.checkpoints import VOCAB, make_drafter, make_target
from tests.doubles.family_checkpoints import make_gpt_oss, make_llama, make_qwen3_moe
from tests.doubles.hybrid_checkpoints import DENSE, NEXT, SPARSE, make_hybrid

SMALL: dict[str, Any] = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
QWEN3 = partial(make_target, hidden=128, intermediate=192, layers=2, heads=4)
GPT_OSS = partial(make_gpt_oss, intermediate_size=128, **SMALL)
HYBRID = partial(make_hybrid, layer_types=["linear_attention", "full_attention"], **SMALL)
EXPERTS = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
PRECISIONS = (None, "int8", "int4", "int8 by output")

# By number of key/value heads.
FAMILIES: dict[str, Callable[..., Path]] = {
    "qwen3": lambda out, n: QWEN3(out, kv_heads=n),
    "windows": lambda out, n: QWEN3(out, kv_heads=n, sliding_window=6),
    "llama": lambda out, n: make_llama(
        out, intermediate_size=192, head_dim=16, num_key_value_heads=n, tie_word_embeddings=True, **SMALL
    ),
    "gpt-oss": lambda out, n: GPT_OSS(out, num_key_value_heads=n),
    "qwen3-moe": lambda out, n: make_qwen3_moe(
        out, intermediate_size=192, moe_intermediate_size=64, num_key_value_heads=n, **SMALL
    ),
    "qwen3-next": lambda out, n: HYBRID(out, NEXT, intermediate_size=192, num_key_value_heads=n, **EXPERTS),
    "qwen3.5": lambda out, n: HYBRID(out, DENSE, intermediate_size=192, num_key_value_heads=n),
    "qwen3.5-moe": lambda out, n: HYBRID(out, SPARSE, num_key_value_heads=n, **EXPERTS),
}
# Sizes and lengths at which ONNX Runtime adds up a row's numbers in other blocks: 64 and 128 rows with wide heads,
# and windows that begin behind the first rows.
LENGTHS: dict[str, tuple[Callable[..., Path], int]] = {
    "wide heads": (partial(QWEN3, kv_heads=2, head_dim=256), 50),
    "wide heads, later": (partial(QWEN3, kv_heads=2, head_dim=256), 110),
    "windows": (partial(QWEN3, kv_heads=2, head_dim=128, sliding_window=40), 270),
    "windows of heads apart": (partial(QWEN3, kv_heads=4, head_dim=64, sliding_window=70), 270),
    "sinks": (partial(GPT_OSS, num_key_value_heads=2, head_dim=128, sliding_window=40), 270),
    "sinks, early": (partial(GPT_OSS, num_key_value_heads=2, head_dim=128, sliding_window=40), 50),
}


def differing(target: Path, folder: Path, precision: str | None = None, *, context: int = 50) -> list[str]:
    """The ways to cut the same tokens into passes that give other logits than passes of one row."""
    drafter = make_drafter(folder / "drafter", target, layers=1, taps=(0, 1))
    by_output = precision == "int8 by output"
    asked = parse_precision(precision and f"target={precision.partition(' ')[0]}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "channels_pay", lambda: by_output)
        bundle = build(str(target), str(drafter), folder / "bundle", max_seq_len=400, precision=asked)
    assert bundle.manifest["exact_bytes"] == by_output
    engine = OnnxRuntimeRunner(bundle.path / "target.onnx", slots=1, capacity=400, threads=1)
    rng, count = np.random.default_rng(0), 24
    tokens = rng.integers(VOCAB, size=context + count)
    least = max([products.fewest_rows(n) or 1 for n in bundle.manifest["integer_bits"]], default=1)

    def logits(widths: Any) -> np.ndarray:
        """Of the rows behind the context, which is itself cut into passes of at least 3 rows."""
        found, start = [], 0
        while start < len(tokens):
            width = min(next(widths), len(tokens) - start)
            rows = np.arange(width) if start >= context else np.array([width - 1])
            # As `Pair` pads a pass: a lone row is there twice where the processor wants it.
            chunk, asked = (
                np.pad(x, (0, max(least - width, 0)), mode="edge")
                for x in (tokens[start : start + width], rows)
            )
            feeds = {"tokens": chunk[None], "start": np.array([start]), "rows": asked[None]}
            found.append(engine.run(feeds)["logits"][0, : len(rows)].copy())
            start += width
        engine.caches.clear(0)
        return np.concatenate(found)[-count:]

    cuts = {str(width): [context, *repeat(width, count)] for width in (2, 3, 4, 8)}
    cuts |= {f"random to {most}": [context, *rng.integers(1, most + 1, size=count)] for most in (5, 16)}
    cuts["context in two"] = [context - 11, 11, *repeat(1, count)]
    cuts["context by row"] = [*repeat(1, context + count)]
    alone = logits(iter([context, *repeat(1, count)]))
    return [name for name, widths in cuts.items() if not np.array_equal(logits(iter(widths)), alone)]


# Each family with two precisions in turn, and with one and with two query heads for a key head.
@pytest.mark.parametrize(
    ("family", "heads", "precision"),
    [
        (family, 4 >> (i + j) % 2, precision)
        for (i, family), (j, precision) in product(enumerate(FAMILIES), enumerate(PRECISIONS))
        if (i + i // 2 + j) % 2
    ],
)
def test_a_row_does_not_depend_on_the_width_of_its_pass(
    tmp_path: Path, family: str, heads: int, precision: str | None
) -> None:
    if precision == "int8 by output" and not products.bytes_are_exact():
        pytest.skip("this processor's sums of products of bytes saturate")
    target = FAMILIES[family](tmp_path / "target", heads)
    assert differing(target, tmp_path, precision) == []


@pytest.mark.parametrize("precision", [None, "int4"])
@pytest.mark.parametrize("family", ["gpt-oss", "qwen3-moe"])
def test_nor_where_experts_are_widened_in_each_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, precision: str | None
) -> None:
    monkeypatch.setattr(functions, "RESIDENT_EXPERT_BYTES", 0)
    assert differing(FAMILIES[family](tmp_path / "target", 2), tmp_path, precision) == []


@pytest.mark.parametrize("case", LENGTHS)
def test_nor_on_the_length_of_its_sequence(tmp_path: Path, case: str) -> None:
    make, context = LENGTHS[case]
    assert differing(make(tmp_path / "target"), tmp_path, context=context) == []

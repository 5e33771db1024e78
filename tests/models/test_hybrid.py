"""Targets with Gated DeltaNet on ONNX Runtime, compared with Transformers' own classes in float32."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.doubles.hybrid_checkpoints import (
    DENSE,
    IMAGES,
    NEXT,
    SPARSE,
    SPARSE_IMAGES,
    load_hybrid,
    make_hybrid,
)
from tests.doubles.reference import target_outputs
from tests.models.test_parity import (  # noqa: F401  # the tests among them run on this module's `case`
    Case,
    assert_close,
    ints,
    make_case,
    test_sequences_of_a_batch_do_not_meet,
    test_target,
)

# name: (architecture, settings of the target, settings of the drafter)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3-next": (NEXT, {"prediction": True}, {"block_size": 16}),
    "qwen3-next, one value head per key head": (
        NEXT,
        {
            "linear_num_value_heads": 2,
            "linear_value_head_dim": 24,
            "mlp_only_layers": [1],
            "num_key_value_heads": 1,
        },
        {},
    ),
    "qwen3.5": (
        DENSE,
        {"tie_word_embeddings": True, "num_hidden_layers": 6, "full_attention_interval": 3},
        {"layers": 3, "taps": (0, 2)},
    ),
    "qwen3.5, six value heads of two": (
        DENSE,
        {
            "linear_num_value_heads": 6,
            "num_hidden_layers": 6,
            "full_attention_interval": 3,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "linear_conv_kernel_dim": 3,
        },
        {"taps": (1, 4)},
    ),
    "qwen3.5 with images": (IMAGES, {"prediction": True}, {}),
    "qwen3.5-moe": (SPARSE, {}, {}),
    "qwen3.5-moe with images, as published": (SPARSE_IMAGES, {"stacked": True, "num_experts_per_tok": 3}, {}),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    architecture, settings, drafter_settings = CASES[request.param]
    make = partial(make_hybrid, architecture=architecture, **settings)
    return make_case(tmp_path_factory.mktemp("hybrid"), make, load_hybrid, drafter_settings)


def test_blocks_of_which_a_part_is_kept(case: Case) -> None:
    """Blocks of 1 to 16 rows. Each begins where any number of rows of the one before is kept, and replayed first."""
    tokens, engine = case.tokens(21), case.engine("target.onnx")
    engine.run({"tokens": ints(tokens), "start": ints(0), "rows": ints([20])})
    for size, kept in ((8, 3), (16, 16), (16, 1), (1, 1), (5, 0), (1, 1), (2, 2), (8, 8), (7, 5)):
        block = case.tokens(size, seed=len(tokens) + size)
        logits, features = target_outputs(case.target, tokens + block, case.drafter.taps)
        feeds = {"tokens": ints(block), "start": ints(len(tokens)), "rows": ints(list(range(size)))}
        out = engine.run(feeds)
        assert_close(out["logits"][0], logits[len(tokens) :])
        assert_close(out["features"][0], features[len(tokens) :])
        tokens += block[:kept]


@pytest.mark.parametrize("case", ["qwen3.5"], indirect=True)
def test_what_is_computed_does_not_depend_on_the_passes(case: Case) -> None:
    """The same rows in passes of 1 and in blocks, alone and beside others: the same states, bit for bit."""
    tokens, other = case.tokens(40), case.tokens(40, seed=1)
    alone, beside = case.engine("target.onnx"), case.engine("target.onnx", slots=2)
    for engine, slots in ((alone, [tokens]), (beside, [other, tokens])):
        for slot, each in enumerate(slots):
            feeds = {"tokens": ints(each[:9]), "start": ints(0), "rows": ints([8])}
            engine.run(feeds, first_slot=slot)
    for at in range(9, 33):
        alone.run({"tokens": ints([tokens[at]]), "start": ints(at), "rows": ints([0])})
    starts = [9, 9]
    for size, kept in ((5, (5, 2)), (16, (1, 16)), (3, (0, 3)), (4, (2, 2)), (16, (16, 1))):
        blocks = [each[at : at + size] for each, at in zip((other, tokens), starts, strict=True)]
        blocks = [block + [7] * (size - len(block)) for block in blocks]
        beside.run({"tokens": ints(*blocks), "start": ints(*starts), "rows": ints(*[list(range(size))] * 2)})
        starts = [at + count for at, count in zip(starts, kept, strict=True)]
    assert starts[1] == 33
    for engine, slot in ((alone, 0), (beside, 1)):
        at = tokens[33]
        engine.run({"tokens": ints([at]), "start": ints(33), "rows": ints([0])}, first_slot=slot)
    for name, state in alone.caches.states.arrays.items():
        if not name.startswith("pending"):
            np.testing.assert_array_equal(state[0], beside.caches.states.arrays[name][1], err_msg=name)

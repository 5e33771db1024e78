"""Caches in FP8: kernels write and read what torch's operators do, and drafts change no token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from dflash_plugins import layers as ours

from dflash_trt import LLM, SamplingParams
from dflash_trt.building.build import build
from dflash_trt.engines.torch import TorchOptions, layers
from dflash_trt.errors import BuildError
from dflash_trt.formats.numbers import cache_numbers
from dflash_trt.graph.builder import FLOAT
from dflash_trt.graph.torch import Torch
from dflash_trt.models.configs import read_drafter_config, read_target_config
from dflash_trt.models.inventory import take_inventory
from dflash_trt.planning.memory import estimate_memory
from dflash_trt.reports.inspection import inspect
from tests.doubles import kind_checkpoints as kinds
from tests.doubles import triton_interpreter  # noqa: F401  # corrects it
from tests.doubles.checkpoints import make_drafter, make_target
from tests.doubles.family_checkpoints import make_gpt_oss
from tests.doubles.hybrid_checkpoints import NEXT, make_hybrid
from tests.doubles.two_engines import FLOAT32
from tests.planning.test_weights import settings

FP8 = TorchOptions(cache="fp8")
PAIRS: dict[str, tuple[Any, dict[str, Any], Any]] = {
    "qwen3": (make_target, {}, make_drafter),
    "gpt-oss, windows and sinks": (make_gpt_oss, {}, make_drafter),
    "qwen3-next, states": (make_hybrid, {"architecture": NEXT}, make_drafter),
    "eagle3, whose own caches stay": (make_target, {}, kinds.make_eagle3),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_drafts_change_no_token_and_a_plan_knows_the_bytes(name: str, tmp_path: Path) -> None:
    make, fields, make_draft = PAIRS[name]
    target = make(tmp_path / "target", **fields)
    drafter = make_draft(
        tmp_path / "drafter", target, **({"layers": 1} if make_draft is make_drafter else {})
    )
    asked: dict[str, Any] = {"engine": "torch", "precision": FLOAT32, "max_seq_len": 100}
    plain = build(str(target), str(drafter), tmp_path / "plain", **asked)
    bundle = build(str(target), str(drafter), tmp_path / "fp8", options=FP8, **asked)
    assert bundle.manifest["key"] != plain.manifest["key"]
    assert inspect(bundle.path)["precision"]["cache"] == "fp8"
    config = read_target_config(target)
    assert [
        attribute.i
        for node in onnx.load(bundle.path / "target.onnx", load_external_data=False).graph.node
        for attribute in node.attribute
        if (node.op_type, attribute.name) == ("Attend", "windowed")
    ] == [layer.window is not None for layer in config.attention_layers]
    inventory = take_inventory(config, read_drafter_config(drafter, config))
    plan = estimate_memory(
        inventory, settings(engine="torch", max_seq_len=100, cache="fp8", precision=FLOAT32)
    )
    for role, planned in (("target", plan.kv_bytes_per_token), ("drafter", plan.drafter_bytes_per_token)):
        whole, before = (
            sum(kind.row_bytes for kind in built.cache_kinds(role) if kind.window is None)
            for built in (bundle, plain)
        )
        assert whole == planned
        assert (whole < before) == (role == "target" or "eagle3" not in name)

    prompts = [list(range(5, 45)), [7], [*range(5, 38), 90, 91]]
    params = [SamplingParams(temperature=t, max_tokens=20, seed=3, ignore_eos=True) for t in (0.0, 0.0, 0.8)]
    with LLM(bundle.path, max_batch_size=2, prefill_chunk=16, threads=1) as llm:
        want = [c.token_ids for c in llm.generate(prompts, params, speculate=False)]
        for options in ({}, {"block_length": 3}, {"draft_source": "lookup"}):
            # Prefixes are those of the calls before.
            assert [c.token_ids for c in llm.generate(prompts, params, **options)] == want


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_are_written_as_torchs_operators_write_them(dtype: torch.dtype) -> None:
    """Also one of zeros, one of tiny numbers, and those with a NaN or an infinity, which have no scale. Every finite
    number is as near as E4M3 has it.
    """
    x, start = torch.randn(6, 8 * 32).to(dtype), torch.tensor([5, 0])
    x[0, 4 * 32 : 5 * 32] = 0
    x[1, 4 * 32 : 5 * 32] *= 1e-4
    x[2, 4 * 32 + 3], x[3, 6 * 32 + 1] = float("nan"), float("inf")
    caches = [torch.zeros(2, 2, 9, 36, dtype=torch.uint8) for _ in range(4)]
    written = dict(zip(("k_cache", "v_cache"), caches, strict=False))
    ours.place_heads(x, 3, 32, 4, epsilon=0.0, start=start, **written)
    a = {"kinds": "qkv", "heads": [4, 2, 2], "size": 32, "epsilon": 0.0}
    layers.place_heads(a, x, [2, 3], *[None] * 5, start, *caches[2:])
    for mine, theirs, heads in zip(
        caches[:2], caches[2:], (x[:, 4 * 32 : 6 * 32], x[:, 6 * 32 :]), strict=True
    ):
        numbers = cache_numbers(mine.numpy())
        assert np.array_equal(numbers, cache_numbers(theirs.numpy()), equal_nan=True)
        rows = heads.reshape(2, 3, 2, 32).transpose(1, 2).float().numpy()
        for found, want in ((numbers[0, :, 5:8], rows[0]), (numbers[1, :, :3], rows[1])):
            sound = np.isfinite(want).all(-1)
            assert np.isnan(found[~sound]).all()
            scale = np.maximum(np.abs(want[sound]).max(-1, keepdims=True), 2.0**-100) / np.float32(448)
            assert np.array_equal(found[sound], (want[sound] / scale).astype(ml_dtypes.float8_e4m3fn) * scale)


def test_every_code_is_read_as_its_number() -> None:
    """With one key, a query of one number and values of all codes, the result is the values."""
    codes = torch.arange(256, dtype=torch.uint8).reshape(2, 128)
    codes[(codes & 127) == 127] = 0
    scale = torch.full((2, 1), 0.75).view(torch.uint8)
    for dtype in (torch.bfloat16, torch.float16):
        v = torch.cat((codes, scale), -1)[:, None, None]
        k, q = torch.zeros_like(v), torch.ones(2, 1, 1, 128, dtype=dtype)
        place = torch.zeros(2, 1, dtype=torch.int64)
        y = ours.attention(q, k, v, place, place)
        want = codes.view(torch.float8_e4m3fn).float() * 0.75
        assert torch.equal(y.flatten(1), want.to(dtype))


def test_heads_that_do_not_fit_are_refused() -> None:
    with pytest.raises(BuildError, match="--cache fp8: heads have 6 numbers"):
        Torch(FLOAT, "fp8").cache_sizes(6, sinks=False)

"""Planned memory beside the weights: caches, states and scratch memory, and what fits a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from dflash_plugins.kernel_specs import ATTENTION_KEPT

from dflash_trt.building.build import build
from dflash_trt.checkpoint.catalogue import known_configs
from dflash_trt.checkpoint.schema import DrafterConfig
from dflash_trt.errors import BuildError
from dflash_trt.formats.precision import parse_precision
from dflash_trt.models.configs import read_drafter_config, read_target_config
from dflash_trt.models.inventory import take_inventory
from dflash_trt.planning.estimate import GIB
from dflash_trt.planning.gpus import find_gpu, gpus
from dflash_trt.planning.memory import arena_bytes, estimate_memory
from tests.doubles.checkpoints import make_target
from tests.doubles.kind_checkpoints import make_eagle3
from tests.planning.test_weights import inventory_of, plan_of, settings


@pytest.mark.parametrize(("name", "length"), [("tiny", 256), ("tiny-gpt-oss", 900)])
def test_plans_agree_with_what_a_bundle_reports(name: str, length: int, tmp_path: Path) -> None:
    bundle = build(name, None, tmp_path / name, max_seq_len=length)
    inventory = inventory_of(name)
    block = bundle.manifest["block_size"]
    s = settings(engine="onnxruntime", max_seq_len=length, max_batch_size=3, block_size=block)
    plan = estimate_memory(inventory, s)
    for side, of_all in (("target", plan.kv_bytes), ("drafter", plan.drafter_bytes)):
        kinds = bundle.cache_kinds(side)
        sinks = 8 * (name == "tiny-gpt-oss" and side == "target")  # of a head of 32, in the keys
        held = 0
        for kind in kinds:  # a prompt's passes have 256 rows, so that others stay untouched
            least = (kind.window or kind.rows) - 1 + kind.stride - 1 + 257
            held += (min(kind.rows, least) if side == "target" else kind.rows) * kind.row_bytes
        assert of_all == pytest.approx(3 * held * 64 / (64 + sinks), rel=1e-9)
    whole = [kind for kind in bundle.cache_kinds("drafter") if kind.window is None]
    assert plan.drafter_bytes_per_token == sum(kind.row_bytes for kind in whole)
    for side in ("target", "drafter"):
        stored = bundle.manifest[side]["weight_bytes"]
        assert {role: sum(n.values()) for role, n in inventory.weights(side).items()} == {
            role: sum(n.values()) for role, n in stored.items()
        }


def test_the_fused_states_of_a_chain_are_rows_of_its_cache(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target")
    drafter = make_eagle3(tmp_path / "drafter", target)
    bundle = build(str(target), str(drafter), tmp_path / "bundle", max_seq_len=64)
    config = read_target_config(target)
    inventory = take_inventory(config, read_drafter_config(drafter, config))
    (kind,) = bundle.cache_kinds("drafter")
    plan = estimate_memory(inventory, settings(engine="onnxruntime", max_seq_len=64, max_batch_size=2))
    assert plan.drafter_bytes_per_token == kind.row_bytes


def test_layers_with_a_window_take_its_rows() -> None:
    """gpt-oss-120b: 18 of 36 layers see 128 tokens. Their rows do not grow with the context, those of others do."""
    inventory = inventory_of("gpt-oss-120b")
    short, long = (
        estimate_memory(inventory, settings(max_seq_len=n, max_batch_size=1)) for n in (8192, 131_072)
    )
    row = 2 * 18 * 8 * 64 * 2
    block = inventory.drafter.block_size
    for plan, length in ((short, 8192), (long, 131_072)):
        kept, whole = (-(-rows // 16) * 16 for rows in (127 + 127 + 512 + block + 1, length + 2 * block + 1))
        assert plan.kv_window_bytes == row * kept
        assert plan.kv_bytes == row * whole + plan.kv_window_bytes


# Figures from TensorRT-LLM's own tests of this buffer (tests/unittest/.../test_dflash_ctx_budget): a drafter of 5
# layers, 16 key-value heads, head size 64 and a million positions at TP 4. Also the buffer of its B200 and H100
# accuracy tests, and the one that NVIDIA/TensorRT-LLM#16005 reports.
def drafter_of(layers: int, kv_heads: int, head_dim: int, positions: int) -> DrafterConfig:
    base = read_drafter_config(known_configs("qwen3-8b")[1])
    return replace(
        base,
        num_hidden_layers=layers,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=positions,
    )


@pytest.mark.parametrize(
    ("shape", "batch", "length", "draft_len", "parallel", "gib"),
    [
        *(((5, 16, 64, 1_048_576), *asked, 7, 4, gib) for *asked, gib in (
            (32, 1 << 30, 165), (32, 8192, 1.3), (200, 8192, 7.9), (400, 8192, 15.7),
        )),
        ((5, 8, 128, 262_144), 128, 4096, 4, 1, 10.09),
        # #16005: 64 slots (the padding slot came later), 80 "GB".
        ((5, 8, 128, 1_048_576), 63, 131_083, 7, 2, 80),
    ],
)  # fmt: skip
def test_the_arena_is_as_tensorrt_llm_computes_it(
    shape: tuple[int, int, int, int], batch: int, length: int, draft_len: int, parallel: int, gib: float
) -> None:
    sizes = {
        "max_batch_size": batch,
        "max_seq_len": length,
        "draft_len": draft_len,
        "tensor_parallel": parallel,
    }
    assert arena_bytes(drafter_of(*shape), **sizes) / GIB == pytest.approx(gib, abs=0.06)


def test_kv_cache_per_token_by_hand() -> None:
    """gpt-oss-120b: 18 of 36 layers without a window, 8 heads of 64, BF16. Its drafter has 8 layers. FP8 halves it."""
    plan = plan_of("gpt-oss-120b")
    assert plan.kv_bytes_per_token == 2 * 18 * 8 * 64 * 2
    assert plan.drafter_bytes_per_token == 2 * 8 * 8 * 64 * 2
    assert plan_of("gpt-oss-120b", engine="torch", cache="fp8").kv_bytes_per_token == 18 * 8 * (64 + 4) * 2
    spread = settings(engine="tensorrt-llm", tensor_parallel=4)
    assert estimate_memory(inventory_of("gpt-oss-120b"), spread).kv_bytes_per_token == 2 * 36 * 2 * 64 * 2


@pytest.mark.parametrize("engine", ["onnxruntime", "tensorrt", "tensorrt-rtx", "tensorrt-llm"])
@pytest.mark.parametrize("backend", ["VANILLA", "TRTLLM"])
def test_the_limits_are_tight(engine: str, backend: str) -> None:
    """The largest batch and the longest context fit, and one more does not."""
    inventory = inventory_of("qwen3-8b")
    s = settings("h100", engine=engine, drafter_attention=backend)
    plan = estimate_memory(inventory, s)
    assert plan.largest_batch > 1
    assert estimate_memory(inventory, replace(s, max_batch_size=plan.largest_batch)).fits
    assert not estimate_memory(inventory, replace(s, max_batch_size=plan.largest_batch + 1)).fits
    batch = 64 if engine != "onnxruntime" else 32
    longest = replace(s, max_batch_size=batch)
    assert not estimate_memory(inventory, longest).fits
    assert plan.longest_context == 40960  # the maximum of both models
    single = replace(s, max_batch_size=1, max_seq_len=plan.longest_context)
    assert estimate_memory(inventory, single).largest_batch >= 1


def test_plans_hold_states_twice() -> None:
    """A pass writes new states, with their pending rows, beside those that it reads. Bytes as in docs/graphs.md."""
    plan = plan_of("qwen3.5-4b", engine="tensorrt-rtx", max_batch_size=3)
    assert plan.state_bytes_per_sequence == 2 * 57_901_056
    longer = plan_of("qwen3.5-4b", engine="tensorrt-rtx", max_batch_size=4)
    rows = longer.kv_bytes - plan.kv_bytes - plan.state_bytes_per_sequence
    assert rows == 32_768 * (plan.max_seq_len + 32)  # two blocks and one, in multiples of 16


def test_what_tensorrt_rtx_widens_is_counted() -> None:
    """Scratch memory of both plans in bytes, as in docs/tensorrt.md. The plan has space for it, but not for twice as
    much.
    """
    measured = {"qwen3-4b": 285e6, "qwen3-coder-30b-a3b": 673e6, "gpt-oss-20b": 528e6, "gpt-oss-120b": 528e6}
    s = settings(engine="tensorrt-rtx", max_seq_len=4096, max_batch_size=2, block_size=8)
    for name, scratch in measured.items():
        assert scratch < estimate_memory(inventory_of(name), s).activation_bytes < 2 * scratch, name
    quantized = replace(s, precision=parse_precision("target=nvfp4"))
    assert (
        468e6 < estimate_memory(inventory_of("qwen3-coder-30b-a3b"), quantized).activation_bytes < 2 * 468e6
    )
    # Plugins widen nothing of gpt-oss's experts. Those of attention keep no queries, and no masks of all slots.
    with_plugins = {
        name: estimate_memory(inventory_of(name), replace(s, engine="tensorrt")) for name in measured
    }
    for name, plan in with_plugins.items():
        less = estimate_memory(inventory_of(name), s).activation_bytes - plan.activation_bytes
        assert less > (1 << 28 if name.startswith("gpt-oss") else 0), name
        longer = estimate_memory(inventory_of(name), replace(s, engine="tensorrt", max_seq_len=32_768))
        assert longer.scratch_bytes - plan.scratch_bytes < 4 * ATTENTION_KEPT  # results of parts


@pytest.mark.parametrize(
    ("pair", "batch", "length", "measured"),
    [
        ("qwen3-4b", 2, 4096, 45.8e6), ("qwen3-4b", 2, 32_768, 91.0e6), ("qwen3-4b", 8, 4096, 156.2e6),
        ("qwen3-4b", 8, 32_768, 186.0e6), ("gpt-oss-20b", 2, 4096, 370.0e6), ("gpt-oss-20b", 2, 32_768, 399.4e6),
        ("gpt-oss-20b", 8, 4096, 370.0e6), ("gpt-oss-20b", 8, 32_768, 399.4e6),
    ],
)  # fmt: skip
def test_scratch_memory_follows_batch_and_capacity(
    pair: str, batch: int, length: int, measured: float
) -> None:
    """The larger of both plans, with two layers of the target (docs/planning.md)."""
    block = 16 if pair == "qwen3-4b" else 8
    s = settings(engine="tensorrt-rtx", max_seq_len=length, max_batch_size=batch, block_size=block)
    plan = estimate_memory(inventory_of(pair), s)
    assert measured < plan.scratch_bytes < measured + 80e6
    assert plan.scratch_bytes < plan.activation_bytes
    assert estimate_memory(inventory_of(pair), replace(s, engine="onnxruntime")).scratch_bytes == 0


def test_what_does_not_fit_says_so_with_the_sum() -> None:
    inventory = inventory_of("gpt-oss-120b")
    plan = estimate_memory(inventory, settings("h100", max_seq_len=131_072))
    assert not plan.fits
    message = str(plan.refuse())
    for part in ("weights 64.39", "= ", "of 79.65 GiB", f"lower --max-batch-size to {plan.largest_batch}"):
        assert part in message
    message = str(estimate_memory(inventory, settings("rtx-5090")).refuse())
    assert "not one sequence fits" in message
    tight = replace(find_gpu("h100"), memory_bytes=66 * GIB)
    plan = estimate_memory(inventory, replace(settings(max_seq_len=131_072), gpu=tight))
    assert 0 < plan.longest_context < 131_072
    assert f"at most {plan.longest_context} tokens fit" in str(plan.refuse())


def test_wrong_settings_are_refused_by_name() -> None:
    with pytest.raises(BuildError, match=r"--gpu is 'rtx-409' .*'rtx-4090'"):
        find_gpu("rtx-409")
    with pytest.raises(BuildError, match="--engine is 'abacus'"):
        plan_of("tiny", engine="abacus")
    with pytest.raises(BuildError, match="tensorrt runs on one GPU"):
        plan_of("tiny", tensor_parallel=2)


def test_every_figure_of_the_table_has_a_source() -> None:
    assert {"h100", "b200", "rtx-4090", "dgx-spark"} <= set(gpus())
    for gpu in gpus().values():
        assert set(gpu.sources) == {"memory_mib", "gpus_per_node"}
        assert all(len(text) > 5 for text in gpu.sources.values())
        assert gpu.sm in (80, 86, 89, 90, 100, 103, 120, 121)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 5090", "rtx-5090"),
        ("A100_40GB", "a100-40gb"),
        ("H100", "h100"),
    ],
)
def test_a_gpu_is_found_in_any_spelling(written: str, name: str) -> None:
    assert find_gpu(written).name == name


def test_a_gpu_of_its_figures() -> None:
    gpu = find_gpu("memory=24, sm=8.9")
    assert (gpu.memory_bytes, gpu.sm) == (24 * GIB, 89)
    for wrong, said in (
        ("memory=24", "sm is missing"),
        ("memory=large,sm=89", "memory is 'large', not a number"),
        ("memory=0,sm=89", "memory is 0, expected a number above 0"),
        ("ram=24", "'ram' is unknown"),
        ("memory=24,sm=4000", "expected a compute capability"),
    ):
        with pytest.raises(BuildError, match=said):
            find_gpu(wrong)

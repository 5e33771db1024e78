"""The engine on torch: tokens, log-probabilities and accepted drafts are those of ONNX Runtime, in float32 on a CPU."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from dflash_plugins.launch import by_triton
from dflash_plugins.packed import PackedWeight

from dflash_trt import LLM, Completion, SamplingParams, hardware
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.checkpoint.linears import stored_linear
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.cli import main
from dflash_trt.engines.torch import kernels, layers
from dflash_trt.engines.torch.kernels import LayerKernels
from dflash_trt.engines.torch.operators import OPERATORS
from dflash_trt.engines.torch.program import Graph
from dflash_trt.graph.builder import FLOAT, GraphBuilder
from dflash_trt.graph.quantized import QuantizedLinear
from dflash_trt.graph.torch import Torch
from dflash_trt.quantization import repack
from dflash_trt.quantization.convert import quantize
from dflash_trt.reports.selftest import Selftest
from tests.api.jobs import ahead
from tests.doubles import kind_checkpoints as kinds
from tests.doubles import triton_interpreter  # noqa: F401  # corrects it
from tests.doubles.checkpoints import make_drafter, make_target
from tests.doubles.family_checkpoints import make_gpt_oss, make_gpt_oss_drafter, make_llama, make_qwen3_moe
from tests.doubles.formats import widen
from tests.doubles.hybrid_checkpoints import make_hybrid, own
from tests.doubles.quantized_checkpoints import (
    rounded,
    write_layer,
)
from tests.doubles.text_checkpoints import (
    EXPERTS,
    GEMMA_IMAGES,
    make_assistant,
    make_gemma,
    make_ministral,
    make_muse,
)
from tests.doubles.two_engines import for_both

SLIDING, FULL = "sliding_attention", "full_attention"
LINEAR = "linear_attention"
Make = Callable[..., Path]
WINDOWS = {"layers": 3, "layer_types": (SLIDING, FULL, SLIDING), "sliding_window": 12}
HYBRID = {"num_hidden_layers": 3, "layer_types": [LINEAR, FULL, LINEAR]}


def make_experts(directory: Path, *, form: str, **fields: Any) -> Path:
    """A target whose experts alone are in fewer bits: ONNX Runtime rounds the inputs of other layers of integers."""
    plain = make_qwen3_moe(directory.with_name("plain"), moe_intermediate_size=64, **fields)
    return quantize(plain, directory, form, exclude=["*.self_attn.*"])


# name: target's maker and settings, drafter's maker and settings, settings of the build
PAIRS: dict[str, tuple[Make, dict[str, Any], Make, dict[str, Any], dict[str, Any]]] = {
    "qwen3": (make_target, {}, make_drafter, WINDOWS, {}),
    "qwen3, trees": (make_target, {}, make_drafter, {}, {"tree_width": 3}),
    "llama, biases, tied": (
        make_llama,
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 1},
        make_drafter,
        {"rope_theta": 500_000.0},
        {},
    ),
    "qwen3-moe": (make_qwen3_moe, {}, make_drafter, {"layers": 2}, {}),
    **{
        f"qwen3-moe, experts in {form}": (make_experts, {"form": form}, make_drafter, {}, {})
        for form in ("int4", "mxfp4")
    },
    "gpt-oss, trees": (make_gpt_oss, {}, make_gpt_oss_drafter, {"layers": 2}, {"tree_width": 3}),
    "qwen3-next": (make_hybrid, {"architecture": "Qwen3NextForCausalLM", **HYBRID}, make_drafter, {"layers": 1}, {}),
    "qwen3.5, experts, mtp": (
        make_hybrid,
        {"architecture": "Qwen3_5MoeForCausalLM", "stacked": True, "prediction": True, **HYBRID},
        *(own, {}, {}),
    ),
    "ministral": (make_ministral, {}, make_drafter, {"layers": 1}, {}),
    "gemma4, experts": (
        make_gemma,
        {"architecture": GEMMA_IMAGES, **EXPERTS},
        make_drafter,
        {"layers": 1, "softcap": 5.0},
        {},
    ),
    "muse glimmer, by meta": (make_muse, {}, make_assistant, {}, {}),
    "muse glimmer, dflash2": (make_muse, {}, kinds.make_dflash2, {"softcap": 20.0, "multiplier": 0.5}, {}),
    "eagle3": (make_target, {}, kinds.make_eagle3, {"layout": "layers.0", "aux": (1, 2, 3)}, {}),
    "dflash2": (make_target, {}, kinds.make_dflash2, {}, {"tree_width": 2}),
    "dspark": (make_target, {}, kinds.make_dspark, {"head": "gated", "confidence": True}, {}),
    "jetspec": (make_target, {"layers": 8}, kinds.make_jetspec, {}, {}),
}  # fmt: skip
# Layers in fewer bits: how `quantized_checkpoints` names them.
FORMATS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4", "W4A16_MXFP4", "W4A16_AWQ", "W8A16")


def both(directory: Path, name: str) -> tuple[Bundle, Bundle]:
    """A pair of the table, built for ONNX Runtime and for torch."""
    make, fields, make_draft, drafter_fields, settings = PAIRS[name]
    target = make(directory / "target", favourites=6, **fields)
    drafter = make_draft(directory / "drafter", target, **drafter_fields)
    asked: dict[str, Any] = {"max_seq_len": 120, **settings}
    return for_both(directory, target, drafter, "torch", **asked)


@pytest.fixture(autouse=True)
def float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the tests run on a GPU, and a build would choose BF16."""
    monkeypatch.setattr(hardware, "compute_capabilities", list)


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(1)
    shared = rng.integers(0, 300, 40).tolist()
    return [shared, [7], [*shared[:33], *rng.integers(0, 300, 9).tolist()]]


def answers(
    bundle: Bundle, slots: int, lengths: tuple[int | None, ...]
) -> tuple[list[list[Completion]], Counter[str]]:
    """Three requests in a few slots, at several lengths of a block and two temperatures; prefixes are reused. With the
    rounds, of which greedy ones may start ahead on torch.
    """
    with (
        LLM(bundle.path, max_batch_size=slots, prefill_chunk=16, threads=1) as llm,
        ahead(llm) as rounds,
    ):
        return [
            llm.generate(
                prompts(),
                [
                    SamplingParams(temperature=t, max_tokens=n, seed=n, ignore_eos=True, logprobs=True)
                    for n in (14, 5, 9)
                ],
                block_length=llm.block_size if length == 0 else length,
            )
            for t in (0.0, 0.8)
            for length in lengths
        ], rounds


@pytest.mark.parametrize("name", PAIRS)
def test_tokens_and_log_probabilities_are_those_of_onnxruntime(name: str, tmp_path: Path) -> None:
    plain, ours = both(tmp_path, name)
    lengths = 0, (1, 3)[list(PAIRS).index(name) % 2]
    expected, (found, rounds) = answers(plain, 2, (0,))[0], answers(ours, 2, lengths)
    inputs = ir.load(ours.listed("target.onnx")).graph.inputs
    states = any("_state" in str(value.name) for value in inputs)
    assert (rounds["ahead"] > 2) != states  # which belong to one position
    for i, wanted in enumerate(expected):
        for completions in found[2 * i : 2 * i + 2]:
            assert [c.token_ids for c in completions] == [c.token_ids for c in wanted]
            for mine, theirs in zip(completions, wanted, strict=True):
                np.testing.assert_allclose(mine.logprobs, theirs.logprobs, rtol=0, atol=2e-3)
    checks = Selftest(ours.path, plain.path)
    try:
        for check in (checks.integrity, checks.cache_writes, checks.copies, checks.layers, checks.chunks):
            check()
        checks.drafts()
        accepted = checks.acceptance()["accepted"]
    finally:
        checks.close()
    assert accepted > 0


def test_a_pair_holds_the_weights_that_its_graphs_share_once(tmp_path: Path) -> None:
    """The drafter reads the target's embedding."""
    _, ours = both(tmp_path, "qwen3, trees")
    with LLM(ours.path, threads=1) as llm:
        pair = llm.runtime.pair
        target, drafter = (
            {w.data_ptr() for w in engine._graph.weights.values()}
            for engine in (pair.target, pair.drafter.runner)
        )
    assert target & drafter


@pytest.mark.parametrize(
    ("target", "gpu", "precision", "linear", "experts"),
    [
        ("qwen3-8b", "h100", "target=int4", {"bf16", "int4"}, {}),
        ("qwen3-8b", "memory=48,sm=80", "target=int4", {"bf16", "int4"}, {}),
        ("qwen3-8b", "memory=48,sm=75", "target=int4", {"bf16"}, {}),
        ("qwen3.8-27b-fp8", "h100", None, {"bf16", "fp8"}, {}),
        ("gpt-oss-20b", "h100", None, {"bf16"}, {"bf16", "mxfp4"}),
        ("qwen3-coder-30b-a3b", "h100", "target=nvfp4", {"bf16", "nvfp4"}, {"nvfp4"}),
        ("qwen3-coder-30b-a3b", "memory=96,sm=75", "target=int4", {"bf16"}, {"bf16"}),
    ],
)
def test_a_plan_counts_weights_as_products_read_them(
    target: str,
    gpu: str,
    precision: str | None,
    linear: set[str],
    experts: set[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["plan", "--target", target, "--gpu", gpu, "--engine", "torch", "--json"]
    assert main([*words, *(["--precision", precision] if precision else [])]) == 0
    weights = json.loads(capsys.readouterr().out)["weights"]["target"]
    assert set(weights.pop("experts", {})) == set(experts)
    assert {form for sizes in weights.values() for form in sizes} == linear


def test_it_is_a_reference_of_other_device_engines(tmp_path: Path) -> None:
    """Layer by layer, whose caches have other axes than those of ONNX Runtime."""
    _, ours = both(tmp_path, "gpt-oss, trees")
    checks = Selftest(ours.path, ours.path)
    try:
        checks.integrity()
        assert checks.layers() == {"share of what rounding explains": 0.0}
    finally:
        checks.close()


@pytest.mark.parametrize("algorithm", FORMATS)
def test_a_layer_in_fewer_bits_is_that_of_numpy(tmp_path: Path, algorithm: str) -> None:
    """Its weight is widened as the graph is loaded, once, and its input is rounded as the format does."""
    random = np.random.default_rng(0)
    w = random.standard_t(3, (48, 256)).astype(np.float32)
    x = random.standard_t(3, (5, 256)).astype(np.float32)
    scale = float(np.abs(x).max() / 448) if algorithm == "FP8" else None
    smooth, bias = (
        random.uniform(0.5, 2, 256).astype(np.float32),
        random.standard_normal(48).astype(np.float32),
    )
    more = {"pre_quant_scale": smooth, "bias": bias} | ({"input_scale": np.float32(scale)} if scale else {})
    source = write_layer(tmp_path / "source", algorithm, w, **more)
    # As a build lays them out.
    checkpoint = repack.int4_by_row(source, tmp_path / "by-row", lambda *_: None)
    folder = checkpoint.directory.name
    stored = stored_linear(checkpoint, "l", 256, 48)
    assert stored is not None
    graph = _of_layer(tmp_path, FLOAT, checkpoint, stored, folder)
    assert [weight.dtype for weight in graph.weights.values() if weight.ndim == 2] == [torch.float32]
    program, made = graph.first_pass({"x": torch.from_numpy(x)})
    exact = rounded(algorithm, x * smooth, scale).astype(np.float64) @ widen(checkpoint, stored).T + bias
    for each in (made, program({"x": torch.from_numpy(x)})):
        np.testing.assert_allclose(each["y"].numpy(), exact, rtol=1e-4, atol=1e-4)
    interpreted = LayerKernels(by_triton)
    for kind in (ir.DataType.BFLOAT16, ir.DataType.FLOAT16):  # on a GPU, it stays as it is stored
        whole = _of_layer(tmp_path, kind, checkpoint, stored, folder)
        dtype = whole.inputs["x"].dtype
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "of", lambda _: interpreted)
            packed = _of_layer(tmp_path, kind, checkpoint, stored, folder)
            passes = ((5, False), (70, False), (70, True))
            for rows, prompt in passes if kind == ir.DataType.BFLOAT16 else passes[:1]:
                given = {"x": torch.from_numpy(np.resize(x, (rows, 256))).to(dtype)}
                ours, theirs = (
                    graph.first_pass(given, prompt=prompt)[1]["y"].float() for graph in (packed, whole)
                )
                error = (ours - theirs).abs().max() / theirs.abs().max()
                assert error <= 2**-7
            assert [type(weight) for weight in packed.weights.values()].count(PackedWeight) == 1
            (known,) = packed.tiles
            # Of prompts, torch multiplies FP8 with scales of rows or of all, in bits of its own.
            assert known.endswith("by torch") == (algorithm in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"))


def _of_layer(place: Path, dtype: ir.DataType, checkpoint: Checkpoint, stored: Any, folder: str) -> Graph:
    g = GraphBuilder("test", dtype=dtype)
    bias = g.cast(g.raw_weight(checkpoint["l.bias"], folder), dtype)
    layer = QuantizedLinear(name="linear", stored=stored, folder=folder, bias=bias)
    y = Torch(dtype).quantized_linear(g, g.input("x", dtype, ["rows", 256]), layer)
    g.output(y, "y", dtype, ["rows", 48])
    ir.save(g.model(), place / "model.onnx")
    return Graph(place / "model.onnx", torch.device("cpu"))


def test_attention_on_a_cpu_leaves_out_no_row_that_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the rows in use, in steps. The rows of a tree follow the last one that all of its nodes see."""
    q, caches = torch.randn(1, 2, 3, 8), torch.randn(2, 1, 1, 40, 8)
    first, last = torch.zeros(1, 3, dtype=torch.int64), torch.full((1, 3), 9)
    for tree in ((), (torch.tensor([10]), torch.ones(1, 3, 3).tril())):
        found = []
        for step in (40, 1):
            monkeypatch.setattr(layers, "_STEP", step)
            found.append(layers.attend({"scale": 1.0}, q, *caches, first, last, *tree))
        torch.testing.assert_close(*found)


def test_exact_mode_holds_where_products_depend_on_the_number_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As cuBLAS chooses kernels by it. Without exact mode, tokens depend on the length of a block.

    Parts of a prompt are shorter than the width to which the mode pads them.
    """
    _, ours = both(tmp_path, "qwen3, trees")
    product = OPERATORS["Gemm"]

    def by_rows(a: Any, x: torch.Tensor, *others: torch.Tensor) -> Any:
        y = product(a, x, *others)
        kind = 0 if len(x) == 1 else 1 if len(x) < 6 else 2
        return y * (1 + 0.02 * torch.sin(torch.arange(y.shape[1], device=y.device) * (kind + 1.0)))

    monkeypatch.setitem(OPERATORS, "Gemm", by_rows)

    def tokens(*, exact: bool) -> list[list[list[int]]]:
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        with LLM(ours.path, max_batch_size=1, threads=1, exact=exact, prefill_chunk=4) as llm:
            several: list[dict[str, Any]] = [{"speculate": False}, {"block_length": 8}, {"block_length": 3}]
            return [[c.token_ids for c in llm.generate(prompts(), params, **each)] for each in several]

    plain, *drafted = tokens(exact=True)
    assert drafted == [plain, plain]
    plain, *drafted = tokens(exact=False)
    assert drafted != [plain, plain]

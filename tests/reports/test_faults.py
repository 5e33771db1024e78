"""What `selftest` finds: each of these faults in a BF16 engine, by name of the check and of the part of the model.

A fault changes a plan of a sound pair, or what runs it, by 1% to 20%. All checks but the loading ones run in order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from safetensors.torch import load_file, save_file

from dflash_trt import SamplingParams
from dflash_trt.building.build import build
from dflash_trt.decoding.draft import Draft
from dflash_trt.decoding.drafter import Drafter
from dflash_trt.engines.device.caches import DevicePool, DeviceStates
from dflash_trt.engines.device.sizes import DECODE
from dflash_trt.engines.tensorrt.options import TensorRTOptions
from dflash_trt.formats.precision import Precision
from dflash_trt.reports import selftest
from dflash_trt.reports.selftest import Check, Selftest
from tests.doubles.checkpoints import make_drafter, make_target
from tests.doubles.family_checkpoints import make_gpt_oss, make_gpt_oss_drafter
from tests.doubles.hybrid_checkpoints import DENSE, make_hybrid
from tests.doubles.one_gpu import one_gpu
from tests.doubles.rounding import in_float32
from tests.doubles.sessions import session

LINEAR, FULL = "linear_attention", "full_attention"
PRECISIONS = ("fp32", "fp16", "bf16", "fp8", "int8", "nvfp4", "int4")


def qwen3(directory: Path) -> None:
    make_target(directory / "target", layers=3, favourites=6)
    make_drafter(directory / "drafter", directory / "target", layers=2, taps=(0, 1), block_size=4)


def gpt_oss(directory: Path, layers: int = 3) -> None:
    make_gpt_oss(directory / "target", favourites=6, quantized=False, num_hidden_layers=layers)
    make_gpt_oss_drafter(directory / "drafter", directory / "target", layers=1, taps=(0, 1), block_size=4)


def hybrid(directory: Path) -> None:
    target = directory / "target"
    make_hybrid(target, DENSE, favourites=6, num_hidden_layers=3, layer_types=[LINEAR, FULL, LINEAR])
    tensors = load_file(target / "model.safetensors")  # Transformers writes float32; published ones have BF16
    stored = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    make_drafter(directory / "drafter", target, layers=1, taps=(0, 1), block_size=4)


PAIRS = {"qwen3": qwen3, "gpt-oss": gpt_oss, "hybrid": hybrid}


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, str], Selftest]]:
    """The self-test of a pair in a precision, with both bundles loaded, on a machine with one GPU (12.0)."""
    root, tests = tmp_path_factory.mktemp("faults"), dict[tuple[str, str], Selftest]()

    def of(name: str, precision: str) -> Selftest:
        if (name, precision) not in tests:
            directory = root / name
            if not directory.exists():
                directory.mkdir()
                PAIRS[name](directory)
            tests[name, precision] = loaded(directory, precision)
        return tests[name, precision]

    with one_gpu(120) as patch:
        patch.setattr(selftest, "describe", lambda: {"dflash_trt": "0", "gpus": [], "cpu": ""})
        yield of
        for test in tests.values():
            test.close()


def loaded(directory: Path, precision: str) -> Selftest:
    sources = str(directory / "target"), str(directory / "drafter")
    weights: dict[str, Any] = {}
    if precision not in ("fp32", "fp16", "bf16"):  # formats of weights, of both bundles
        weights = {"precision": Precision(target=precision, drafter=precision)}
    plain = build(
        *sources, directory / f"onnxruntime-{precision}", engine="onnxruntime", max_seq_len=96, **weights
    )
    bundle = build(
        *sources,
        directory / precision,
        engine="tensorrt-rtx",
        max_seq_len=96,
        precision=Precision(target=precision, drafter=precision),
        options=TensorRTOptions(max_batch_size=2, prefill_chunk=32),
    )
    test = Selftest(bundle.path, plain.path)
    for check in islice(test.run(directory / "report.json", 600), 2):
        assert check.state == "passed", check.detail
    del test.checks[:3]  # they load the bundles, and look at kernels that do not run here
    return test


def first_failure(test: Selftest, tmp_path: Path) -> Check:
    """The first check that fails. Checks up to `layers` run in any case, so that the fault can be located."""
    failed, test.localizer = [], None
    for check in test.run(tmp_path / "report.json", 600):
        failed += [check] if check.state == "failed" else []
        if failed and test.localizer is not None:
            return failed[0]
    raise AssertionError("no check failed")


@pytest.mark.parametrize(
    ("pair", "precision"),
    [("qwen3", precision) for precision in PRECISIONS] + [("gpt-oss", "bf16"), ("hybrid", "bf16")],
)
def test_limits_are_a_few_times_what_rounding_gives(opened, pair, precision, tmp_path) -> None:
    """A sound engine passes, with errors of a third of the limits and more. In FP32 sums are short here."""
    test = opened(pair, precision)
    for check in test.checks:
        if check.__name__ not in ("tokens", "acceptance", "time"):
            check()
    assert test.localizer is not None
    compared = [each for each in test.localizer.compared if each.model == "target"]
    shares = {each.tensor: each.error / each.limit for each in compared}
    assert precision == "fp32" or max(shares.values()) > 1 / 3


Edit = Callable[[onnx.GraphProto], None]


def scaled(name: str, factor: float, *where: slice) -> Edit:
    """A weight, or a part of it, by a factor."""

    def edit(graph: onnx.GraphProto) -> None:
        (tensor,) = (t for t in graph.initializer if t.name.endswith(name))
        values = numpy_helper.to_array(tensor).copy()
        values[where or ...] = (values[where or ...].astype(np.float32) * factor).astype(values.dtype)
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))

    return edit


def rope(graph: onnx.GraphProto) -> None:
    (mul,) = (node for node in graph.node if node.output[0] == "target/angles")
    scaled(mul.input[1], 1.01)(graph)


def attention_scale(graph: onnx.GraphProto) -> None:
    """The constant that scales the queries of layer 1."""
    (cast,) = (
        n for n in graph.node if n.op_type == "Cast" and n.input[0] == "target/layers.1/attention/rope"
    )
    (scale,) = (n for n in graph.node if cast.output[0] in n.input)
    (constant,) = (n for n in graph.node if n.output[0] == scale.input[1])
    constant.attribute[0].t.CopyFrom(numpy_helper.from_array(np.array(1.1 * 16**-0.5, np.float32)))


def seen_further(side: str, by: int) -> Edit:
    """The mask of the first layer shows `by` more rows, `after` a row or `before` its window."""

    def edit(graph: onnx.GraphProto) -> None:
        at, node = next((i, n) for i, n in enumerate(graph.node) if f"/{side}__" in n.output[0])
        shown = node.output[0]
        node.output[0] = f"{shown}/exact"
        graph.initializer.append(numpy_helper.from_array(np.array(by), f"{shown}/by"))
        graph.node.insert(at + 1, helper.make_node("Sub", [f"{shown}/exact", f"{shown}/by"], [shown]))

    return edit


def other_tap(graph: onnx.GraphProto) -> None:
    """The second tap is the layer's state before its MLP."""
    (concat,) = (n for n in graph.node if "target/features_flat" in n.output)
    concat.input[1] = "target/layers.1/attention/residual"


def noisy_embedding(graph: onnx.GraphProto) -> None:
    (tensor,) = (t for t in graph.initializer if t.name.endswith("embed_tokens.weight"))
    values = numpy_helper.to_array(tensor).astype(np.float32)
    values[::4] += 0.1 * np.random.default_rng(0).standard_normal(values[::4].shape).astype(np.float32)
    tensor.CopyFrom(numpy_helper.from_array(values.astype(numpy_helper.to_array(tensor).dtype), tensor.name))


def after(layer: int) -> str:
    return f"target's layer {layer} after its keys and values, or layer {layer + 1}'s input norm"


def value(layer: int) -> str:
    return f"target's layer {layer}: its value projection"


def key(layer: int) -> str:
    return f"target's layer {layer}: its key projection, key norm or rotation"


END, FEATURES = "the final norm or the head", "the drafter's tapped features, their projection"
STATES, DRAFTED = "layers before layer 1", "drafter's layer 1: its value"
EVERY, HEAD, HALF, TILE = slice(None), slice(16), slice(32), slice(64)
# By pair and role: the fault, the edit of the graph, and the part that is named.
PLANS: dict[tuple[str, str], list[tuple[str, Edit, str]]] = {
    ("qwen3", "target"): [
        ("value projection", scaled("1.self_attn.v_proj.weight", 1.02), value(1)),
        ("value projection of a head", scaled("2.self_attn.v_proj.weight", 1.1, HEAD), value(2)),
        ("key norm", scaled("1.self_attn.k_norm.weight", 1.02), key(1)),
        ("rotation", rope, key(0)),
        ("query norm", scaled("0.self_attn.q_norm.weight", 1.1), after(0)),
        ("attention's scale", attention_scale, after(1)),
        ("output projection", scaled("1.self_attn.o_proj.weight", 1.1), after(1)),
        ("down projection", scaled("0.mlp.down_proj.weight", 1.05), after(0)),
        ("a tile of the gate", scaled("1.mlp.gate_proj.weight", 0.8, TILE), after(1)),
        ("channels of a norm", scaled("1.input_layernorm.weight", 1.1, HEAD), after(0)),
        ("mask", seen_further("after", 1), after(0)),
        ("final norm", scaled("model.norm.weight", 1.02), END),
        ("a tile of the head", scaled("lm_head.weight", 1.1, TILE), END),
        ("embedding", noisy_embedding, "target's embedding, or layer 0's input norm"),
        ("tap", other_tap, FEATURES),
    ],
    ("qwen3", "drafter"): [
        ("projection of the taps", scaled("fc.weight", 1.1, EVERY, TILE), FEATURES),
        ("drafter's values", scaled("1.self_attn.v_proj.weight", 1.1), DRAFTED),
    ],
    ("gpt-oss", "target"): [
        ("sinks", scaled("0.self_attn.sinks", 1.2), after(0)),
        ("window", seen_further("before", 1), after(0)),
        ("a block of the experts", scaled("0.mlp.experts.down_proj", 1.2, EVERY, HALF), after(0)),
    ],
    ("hybrid", "target"): [
        ("decay of the states", scaled("0.linear_attn.A_log", 0.9), STATES),
        ("convolution", scaled("0.linear_attn.conv1d.weight", 1.1), STATES),
    ],
}


@pytest.mark.parametrize(
    ("pair", "role", "edit", "part"),
    [
        pytest.param(pair, role, edit, part, id=f"{pair}, {name}")
        for (pair, role), faults in PLANS.items()
        for name, edit, part in faults
    ],
)
def test_a_fault_of_a_plan_is_found_and_located(
    opened, monkeypatch, tmp_path, pair, role, edit, part
) -> None:
    test = opened(pair, "bf16")
    broken(monkeypatch, test, role, edit)
    failed = first_failure(test, tmp_path)
    assert failed.name == "layers"
    assert part in failed.detail, failed.detail
    if part == value(1):
        assert failed.detail.startswith("prefill: v_cache.1 of the target differs by")
        compared = json.loads((tmp_path / "report.json").read_text())["layers"]
        assert next(each["tensor"] for each in compared if each["error"] > each["limit"]) == "v_cache.1"


def broken(patch: pytest.MonkeyPatch, test: Selftest, role: str, edit: Edit) -> None:
    """Let the plan of `role` run with this edit of its graph."""
    engine: Any = test.pair.target if role == "target" else test.pair.drafter.runner
    model = onnx.ModelProto()
    model.CopyFrom(engine._engine.document)
    edit(model.graph)
    patch.setattr(engine._engine, "_session", session(in_float32(model)))


def test_a_layer_off_by_two_per_cent_is_found_in_fp32(opened, monkeypatch, tmp_path) -> None:
    test = opened("qwen3", "fp32")
    broken(monkeypatch, test, "target", scaled("0.mlp.down_proj.weight", 1.02))
    assert after(0) in first_failure(test, tmp_path).detail


def lost_row(patch: pytest.MonkeyPatch, test: Selftest) -> None:
    """A copy that is kept lacks its last row."""
    take = DevicePool.take

    def less(self: DevicePool, slot: int, first: int, stop: int) -> list[torch.Tensor]:
        rows = take(self, slot, first, stop)
        with torch.cuda.stream(self._stream):
            for each in rows:
                each[:, -1:].zero_()
        return rows

    patch.setattr(DevicePool, "take", less)


def short_copy(patch: pytest.MonkeyPatch, test: Selftest) -> None:
    copy = DevicePool.copy
    patch.setattr(DevicePool, "copy", lambda self, a, b, count: copy(self, a, b, count - 1))


def lost_state(patch: pytest.MonkeyPatch, test: Selftest) -> None:
    """The state of the convolution is not copied."""
    put = DeviceStates.put

    def less(self: DeviceStates, slot: int, *given: Any) -> None:
        put(self, slot, *given)
        with torch.cuda.stream(test.pair.target.stream):
            self.arrays["conv_state.0"][slot].zero_()

    patch.setattr(DeviceStates, "put", less)


def mixed_sequences(patch: pytest.MonkeyPatch, test: Selftest) -> None:
    """A twentieth of the second sequence's logits is in the first one's."""
    engine: Any = test.pair.target
    run = engine.run

    def mixed(profile: int, feeds: Any, **slot: int) -> Any:
        out = run(profile, feeds, **slot)
        if len(out["logits"]) > 1:
            with torch.cuda.stream(engine.stream):
                out["logits"][0].add_(0.05 * out["logits"][1])
        return out

    patch.setattr(engine, "run", mixed)


def other_mask(patch: pytest.MonkeyPatch, test: Selftest) -> None:
    drafter = test.pair.drafter
    patch.setattr(drafter, "mask_token_id", drafter.mask_token_id - 7)


def gullible(patch: pytest.MonkeyPatch, test: Selftest) -> None:
    """Every draft is accepted."""
    engine: Any = test.pair.target
    run = engine.run

    def accepting(profile: int, feeds: Any, **slot: int) -> Any:
        out = run(profile, feeds, **slot)
        if profile == DECODE and feeds["tokens"].shape[1] > 1:
            with torch.cuda.stream(engine.stream):
                out["accepted"].fill_(feeds["tokens"].shape[1] - 1)
                out["next_token"].copy_(out["logits"][:, -1].argmax(dim=-1))
        return out

    patch.setattr(engine, "run", accepting)


def foresight(patch: pytest.MonkeyPatch, test: Selftest) -> None:
    """The drafter proposes what the target is about to choose."""
    propose = Drafter.propose
    asked, answers = SamplingParams(max_tokens=40, ignore_eos=True), dict[tuple[int, ...], list[int]]()

    def told(self: Drafter, active: Any, length: int) -> Draft:
        draft = propose(self, active, length)
        (request,) = active
        prompt = tuple(request.prompt)
        if self is not test.pair.drafter or prompt == tuple(test.prompt):
            return draft
        if prompt not in answers:
            assert test.reference is not None
            answers[prompt] = list(test.reference.generate(list(prompt), asked, speculate=False).token_ids)
        at = len(request.output) - 1
        return Draft(np.array([answers[prompt][at : at + draft.nodes]]), None, np.array(draft.logprobs))

    patch.setattr(Drafter, "propose", told)
    patch.setattr(test.pair.arrays, "asynchronous", False)  # no round starts without the host's drafts


@pytest.mark.parametrize(
    ("pair", "fault", "check", "message"),
    [
        ("qwen3", lost_row, "copies", "kept and restored"),
        ("qwen3", short_copy, "copies", "copied from slot 1"),
        ("hybrid", lost_state, "copies", "kept and restored"),
        ("qwen3", mixed_sequences, "batch", "alone and in a batch"),
        ("qwen3", other_mask, "layers", "the drafter's layer 1 after its keys and values"),
        ("qwen3", gullible, "tokens", "drafting changed tokens"),
        ("qwen3", foresight, "tokens", "drafts were accepted"),
    ],
)
def test_a_fault_beside_the_plans_is_found(
    opened, monkeypatch, tmp_path, pair, fault, check, message
) -> None:
    test = opened(pair, "bf16")
    fault(monkeypatch, test)
    first = first_failure(test, tmp_path)
    assert (first.name, message in first.detail) == (check, True), first.detail

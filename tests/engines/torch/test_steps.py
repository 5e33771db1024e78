"""The steps between products: each is one operator of torch's graphs, for every family."""

from __future__ import annotations

import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from dflash_trt import LLM, SamplingParams
from dflash_trt.building.build import build
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.engines.torch import program
from dflash_trt.engines.torch.operators import OPERATORS
from dflash_trt.engines.torch.program import Graph, Node
from dflash_trt.errors import BundleError
from dflash_trt.graph.builder import FLOAT, INT64, GraphBuilder
from dflash_trt.graph.dialect import AttentionCall, AttentionKind, Norm, Part
from dflash_trt.graph.torch import Torch
from dflash_trt.models.configs import read_drafter_config, read_target_config
from dflash_trt.models.drafters import build_drafter
from dflash_trt.models.drafters.kind import DrafterParts
from dflash_trt.models.target import build_target
from tests.doubles.two_engines import FLOAT32
from tests.engines.torch.test_pairs import PAIRS

# Operators of a layer of the target. Where queries grow with their position, heads of their own place them.
LAYERS = {
    "qwen3": {"AddNorm": 2, "PlaceHeads": 1, "Gate": 1},
    "qwen3-moe": {"AddNorm": 2, "PlaceHeads": 1, "Router": 1},
    "gpt-oss, trees": {"AddNorm": 2, "PlaceHeads": 1, "Router": 1},
    "ministral": {"AddNorm": 2, "PlaceHeads": 3, "Gate": 1},
    "muse glimmer, by meta": {"AddNorm": 2, "PlaceHeads": 1, "Gate": 1},
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_step_is_one_operator(name: str, tmp_path: Path) -> None:
    make, fields, make_draft, drafter_fields, _ = PAIRS[name]
    target_at = make(tmp_path / "target", **fields)
    drafter_at = make_draft(tmp_path / "drafter", target_at, **drafter_fields)
    target, drafter = read_target_config(target_at), read_drafter_config(drafter_at)
    dialect, checkpoint = Torch(ir.DataType.BFLOAT16), Checkpoint(target_at)
    graph = build_target(target, checkpoint, (0,), dialect, folder="t", capacity=64).graph
    counts = Counter(node.op_type for node in graph)
    layers = counts["Attend"]
    assert layers == target.num_hidden_layers
    # The first norm has no sum before it.
    wanted = {op: n * layers - (op == "AddNorm") for op, n in LAYERS[name].items()}
    assert {op: counts[op] for op in wanted} == wanted
    assert not {"RotaryEmbedding", "WriteRows", "TensorScatter"} & counts.keys()

    parts = DrafterParts(drafter, Checkpoint(drafter_at), target, checkpoint, dialect, "d", "t", 64)
    nodes = [*build_drafter(parts).graph]
    (best,) = (node for node in nodes if node.op_type == "BestToken")
    logits = best.inputs[0]
    assert logits is not None
    assert logits.producer().op_type in ("Gemm", "Mul")  # the head in BF16, or a soft cap


def test_the_first_pass_of_a_size_frees_what_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, too, the first prompt of a length would otherwise need the results of all layers at once."""
    build("tiny", None, tmp_path / "bundle", engine="torch", max_seq_len=256, precision=FLOAT32)
    made, most, called = list[Any](), 0, program._called

    def watched(node: Node, inputs: Any) -> Any:
        nonlocal most
        results = called(node, inputs)
        made.extend(weakref.ref(x) for x in results)
        most = max(most, sum(each() is not None for each in made))
        return results

    with LLM(tmp_path / "bundle", max_batch_size=1, threads=1) as llm:
        monkeypatch.setattr(program, "_called", watched)
        llm.generate([[5] * 100], SamplingParams(max_tokens=1))
    assert 0 < most < len(made) / 2, (most, len(made))  # caches stay


def test_expanded_rows_have_memory_of_their_own() -> None:
    """A kernel would copy others in each layer."""
    assert OPERATORS["Expand"]({}, torch.zeros(2, 1), [2, 3]).is_contiguous()


def ran(g: GraphBuilder, place: Path, **feeds: Any) -> list[np.ndarray]:
    """The outputs of a graph of torch, on a CPU."""
    ir.save(g.model(), place / "model.onnx")
    _, outputs = Graph(place / "model.onnx", torch.device("cpu")).first_pass(
        {name: torch.from_numpy(np.array(value)) for name, value in feeds.items()}
    )
    return [value.numpy() for value in outputs.values()]


@pytest.mark.parametrize("names", [("gate", "up"), ("up", "gate")])
def test_gates_are_told_by_their_names(names: tuple[str, str], tmp_path: Path) -> None:
    """Layers in fewer bits are joined in the order in which they lie in their file."""
    g = GraphBuilder("test")
    y = Torch(FLOAT).gated(g, [(names, g.input("x", FLOAT, ["rows", 16]))], {"gate": 8, "up": 8}, "silu")
    g.output(y, "y", FLOAT, ["rows", 8])
    x = np.random.default_rng(0).standard_normal((3, 16)).astype(np.float32)
    gate, up = (x[:, 8 * names.index(name) :][:, :8] for name in ("gate", "up"))
    np.testing.assert_allclose(
        ran(g, tmp_path, x=x)[0], gate / (1 + np.exp(-gate)) * up, rtol=1e-5, atol=1e-6
    )


COLUMNS = {"q": 32, "k": 16, "v": 16}


def placed(products: list[str], place: Path, *, grown: bool) -> list[np.ndarray]:
    """Attention and caches of these products, named by their columns. `grown`: queries have other angles than keys."""
    g, rng = GraphBuilder("test"), np.random.default_rng(0)

    def drawn(name: str, *shape: int) -> ir.Value:
        feeds[name] = rng.standard_normal(shape).astype(np.float32)
        return g.input(name, FLOAT, shape)

    def given(name: str, numbers: Any) -> ir.Value:
        feeds[name] = np.array(numbers)
        return g.input(name, INT64, feeds[name].shape)

    feeds: dict[str, Any] = {}
    rows = {kind: rng.standard_normal((6, columns)).astype(np.float32) for kind, columns in COLUMNS.items()}
    shape, norm = g.constant([2, 3]), Norm(drawn("norm", 8), 1e-6)
    k, q = ((drawn(f"cos_{kind}", 2, 3, 4), drawn(f"sin_{kind}", 2, 3, 4)) for kind in "kq")
    angles = {"q": q if grown else k, "k": k}
    parts = {
        kind: Part(columns // 8, 8, lambda: shape, None if kind == "v" else norm, angles.get(kind, ()), 8)
        for kind, columns in COLUMNS.items()
    }
    call = AttentionCall(
        kind=AttentionKind(4, 2, 8, windowed=False),
        products=[(product, g.input(product, FLOAT, [6, "n"])) for product in products],
        parts=parts,
        caches=[drawn(f"{kind}_cache", 2, 2, 9, 8) for kind in "kv"],
        start=given("start", [0, 4]),
        mask=[given("first", [[0] * 3] * 2), given("last", [[0, 1, 2], [4, 5, 6]])],
        lengths=given("lengths", [3, 7]),
        sinks=None,
    )
    y, caches = Torch(FLOAT).attend(g, call)
    for name, value in zip(("y", "k", "v"), (y, *caches), strict=True):
        g.output(g.op("Identity", value), f"{name}_out", FLOAT, ["a", "b"])
    feeds |= {product: np.concatenate([rows[kind] for kind in product], 1) for product in products}
    return ran(g, place, **feeds)


@pytest.mark.parametrize("grown", [False, True])
@pytest.mark.parametrize("products", [["qkv"], ["kvq"], ["kq", "v"], ["k", "qv"]], ids="-".join)
def test_heads_are_placed_from_products_of_any_order(
    products: list[str], tmp_path: Path, *, grown: bool
) -> None:
    for got, wanted in zip(
        placed(products, tmp_path, grown=grown), placed([*"qkv"], tmp_path, grown=grown), strict=True
    ):
        np.testing.assert_array_equal(got, wanted)


def test_operators_of_another_version_are_not_run(tmp_path: Path) -> None:
    g = GraphBuilder("test", opsets={"torch": 1})
    g.output(g.op("Identity", g.input("x", FLOAT, [1])), "y", FLOAT, [1])
    with pytest.raises(BundleError, match=r"version 1 of the operators.*build the bundle again"):
        ran(g, tmp_path)

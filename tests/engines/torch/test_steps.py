"""The steps between products: each is one operator of torch's graphs, for every family."""

from __future__ import annotations

import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_trt import LLM, SamplingParams, hardware
from dflash_trt.building.build import build
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.engines.torch import kernels, packed, program
from dflash_trt.engines.torch.operators import OPERATORS
from dflash_trt.engines.torch.program import Graph, Node
from dflash_trt.errors import BundleError
from dflash_trt.formats.precision import Precision
from dflash_trt.graph.builder import FLOAT, GraphBuilder
from dflash_trt.graph.dialect import AttentionCall, AttentionKind, Part
from dflash_trt.graph.torch import Torch
from dflash_trt.models.configs import read_drafter_config, read_target_config
from dflash_trt.models.drafters import build_drafter
from dflash_trt.models.drafters.kind import DrafterParts
from dflash_trt.models.target import build_target
from tests.doubles.family_checkpoints import make_gpt_oss
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
        made.extend(weakref.ref(x) for x in results if isinstance(x, torch.Tensor))
        most = max(most, sum(each() is not None for each in made))
        return results

    with LLM(tmp_path / "bundle", max_batch_size=1, threads=1) as llm:
        monkeypatch.setattr(program, "_called", watched)
        llm.generate([[5] * 100], SamplingParams(max_tokens=1))
    assert 0 < most < len(made) / 2, (most, len(made))  # caches stay


class _Launches(TorchDispatchMode):
    """Counts what a GPU would launch: torch's operators but for views and new memory, and our kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.by_torch, self.ours = Counter[str](), Counter[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = function(*args, **(kwargs or {}))
        name, results = function.__name__, y if isinstance(y, tuple | list) else [y]
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        here = [x.untyped_storage().data_ptr() in given for x in results if isinstance(x, torch.Tensor)]
        if not name.startswith(("empty", "new_empty")) and (not all(here) or "_." in name):
            self.by_torch[name] += 1
        return y

    def run(self, use: Any, *_: Any, **__: Any) -> None:
        self.ours[use.function] += 1


def _of_a_pass(bundle: Bundle, rows: int = 8) -> tuple[Counter[str], Counter[str]]:
    """What a target's pass over a few rows launches, of torch's operators and of our kernels. Nothing is computed."""
    launches = _Launches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed, "_tile", lambda _, weight, *__: weight.form.tiles[0])
        patch.setattr(kernels, "of", lambda _: kernels.LayerKernels(launches.run))
        graph = Graph(bundle.path / "target.onnx", torch.device("cpu"), alone=True)
        sizes = {"B": 1, "S": rows, "R": rows}
        feeds = {
            name: torch.zeros([n if isinstance(n, int) else sizes[n] for n in s.shape], dtype=s.dtype)
            for name, s in graph.inputs.items()
        }
        program, _ = graph.first_pass(feeds)
        launches.by_torch.clear()
        launches.ours.clear()
        with launches:
            program(feeds)
    return launches.by_torch, launches.ours


def test_a_layer_of_gpt_oss_launches_each_kernel_once(tmp_path: Path) -> None:
    """Eight in all. The first product places its heads. A norm is in the router's kernel, which chooses the experts,
    and the other one adds them. More than 64 rows are placed by a kernel of their own.
    """
    bundle = build(
        str(make_gpt_oss(tmp_path / "t", head_dim=64)),
        None,
        tmp_path / "b",
        engine="torch",
        precision=Precision(target="bf16"),
    )
    _, ours = _of_a_pass(bundle)
    layers = ours["attend"]
    steps = "product_heads", "attend", "merge", "product", "router", "gate_up", "down"
    wanted = Counter(dict.fromkeys(steps, layers)) + Counter(add_norm=layers - 1, product=1)
    assert ours == wanted + Counter(combine=1, best_token=1, accept_block=1)
    _, longer = _of_a_pass(bundle, 65)
    assert (longer["place_heads"], longer["product"]) == (layers, ours["product"] + layers)
    assert "product_heads" not in longer


@pytest.mark.parametrize("scheme", ["fp8", "nvfp4"])
def test_a_pass_in_few_bits_launches_what_one_in_bf16_does(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a kernel that rounds the rows of attention in each layer, and one for the first norm. Nothing is computed."""
    counts = []
    monkeypatch.setattr(hardware, "compute_capabilities", lambda: [90])
    for precision in ("bf16", scheme):
        both = Precision(target=precision, drafter="bf16")
        bundle = build("tiny", None, tmp_path / precision, engine="torch", max_seq_len=64, precision=both)
        counts.append(_of_a_pass(bundle))
    (torch_16, ours_16), (by_torch, ours) = counts
    assert by_torch == torch_16
    layers = ours_16["attend"]
    assert ours - ours_16 == Counter(quantized_rows=layers + 1), (ours, ours_16)


def test_a_drafter_in_fp8_changes_no_token(tmp_path: Path) -> None:
    """All of its layers round their inputs, but its head does not."""
    both = Precision(target="fp32", drafter="fp8", head="fp8")
    bundle = build("tiny", None, tmp_path / "b", engine="torch", max_seq_len=256, precision=both)
    graph = ir.load(bundle.path / "drafter.onnx").graph
    assert {node.op_type for node in graph if "lm_head" in (node.name or "")} == {"Widened", "Gemm"}
    counts = Counter(node.op_type for node in graph)
    weights = [node for node in graph if node.op_type == "Widened"]
    assert {node.attributes["codes"].as_string() for node in weights} == {"e4m3"}
    assert counts["Gemm"] == 1
    assert len(weights) == counts["ScaledProduct"] + 1 > 2 * counts["Attend"]
    with LLM(bundle.path, max_batch_size=1, threads=1) as llm:
        asked = [[5, 6, 7] * 6], SamplingParams(max_tokens=40, ignore_eos=True)
        (plain,), (drafted,) = (llm.generate(*asked, speculate=given) for given in (False, True))
    assert drafted.token_ids == plain.token_ids
    assert drafted.statistics.tokens_per_pass > 1


def test_expanded_rows_have_memory_of_their_own() -> None:
    """A kernel would copy others in each layer."""
    assert OPERATORS["Expand"]({}, torch.zeros(2, 1), [2, 3]).is_contiguous()


def emitted(g: GraphBuilder, operator: str) -> list[ir.Node]:
    return [node for node in g.graph if node.op_type == operator]


@pytest.mark.parametrize(
    ("products", "activated"),
    [(["gate-up"], []), (["up-gate"], ["test/up-gate/split:1"]), (["up", "gate"], ["gate"])],
)
def test_gates_are_told_by_their_names(products: list[str], activated: list[str]) -> None:
    """Layers in fewer bits are joined in the order in which they lie in their file, or not at all."""
    g = GraphBuilder("test")
    values = [(name.split("-"), g.input(name, FLOAT, ["rows", "n"])) for name in products]
    Torch(FLOAT).gated(g, values, {"gate": 8, "up": 8}, "silu")
    assert [str(x.name) for node in emitted(g, "Swish") for x in node.inputs if x] == activated
    assert len(emitted(g, "Gate")) == (not activated)


@pytest.mark.parametrize(
    ("products", "grown", "expected"),
    [
        (["qkv"], False, ["qkv"]),
        (["q", "kv"], True, ["q", "kv"]),
        (["qkv"], True, ["q", "k", "v"]),
        (["kvq"], False, ["k", "v", "q"]),
        (["kq", "v"], False, ["k", "q", "v"]),
        (["k", "qv"], True, ["k", "qv"]),
    ],
)
def test_heads_are_placed_in_the_order_of_the_kernel(
    products: list[str], expected: list[str], *, grown: bool
) -> None:
    """Products of layers in fewer bits lie otherwise. `grown`: queries are rotated by other angles than keys."""
    g = GraphBuilder("test")
    x, other = g.input("x", FLOAT, [1]), g.input("other", FLOAT, [1])
    angles = {"q": (other, other) if grown else (x, x), "k": (x, x), "v": ()}
    call = AttentionCall(
        kind=AttentionKind(2, 2, 8, windowed=False),
        products=[(product, g.input(product, FLOAT, ["rows", "n"])) for product in products],
        parts={kind: Part(2, 8, lambda *_: x, None, own, 8) for kind, own in angles.items()},
        caches=[x, x],
        start=x,
        mask=[x, x],
        lengths=x,
        sinks=None,
    )
    Torch(FLOAT).attend(g, call)
    nodes = emitted(g, "PlaceHeads")
    assert [node.attributes["kinds"].as_string() for node in nodes] == expected
    assert [node.inputs[5] for node in nodes] == [
        angles[kinds[0]][0] if kinds != "v" else None for kinds in expected
    ]


def test_operators_of_another_version_are_not_run(tmp_path: Path) -> None:
    g = GraphBuilder("test", opsets={"torch": 1})
    g.output(g.op("Identity", g.input("x", FLOAT, [1])), "y", FLOAT, [1])
    ir.save(g.model(), tmp_path / "model.onnx")
    with pytest.raises(BundleError, match=r"version 1 of the operators.*build the bundle again"):
        Graph(tmp_path / "model.onnx", torch.device("cpu"))

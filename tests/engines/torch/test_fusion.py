"""Operators between products are joined, and a joined graph gives the answers of the one that it stands for."""

from __future__ import annotations

import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_trt import LLM, SamplingParams
from dflash_trt.building.build import build
from dflash_trt.engines.torch import program
from dflash_trt.engines.torch.fusion import Node, fused
from dflash_trt.engines.torch.operators import OPERATORS
from tests.doubles.two_engines import FLOAT32
from tests.engines.torch.test_pairs import PAIRS, prompts

LAYERS = {
    "qwen3": {"AddNorm": 2, "PlaceHeads": 1, "Gate": 1, "Attend": 1},
    "qwen3, trees": {"AddNorm": 2, "PlaceHeads": 1, "Gate": 1, "Attend": 1},
    "gpt-oss, trees": {"AddNorm": 2, "PlaceHeads": 1, "MXFP4Experts": 1, "Attend": 1},
    "qwen3-moe": {"AddNorm": 2, "PlaceHeads": 1, "Attend": 1},
}


@pytest.mark.parametrize("name", [*LAYERS, "qwen3.5", "gemma4, experts", "llama, biases, tied"])
def test_a_joined_graph_gives_the_same_answers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, settings, drafter, drafter_settings, options = PAIRS[name]
    target_at = target(tmp_path / "target", favourites=6, **settings)
    drafter_at = drafter(tmp_path / "drafter", target_at, block_size=4, **drafter_settings)
    given: dict[str, Any] = {"engine": "torch", "max_seq_len": 100, "precision": FLOAT32} | options
    made = build(str(target_at), str(drafter_at), tmp_path / "bundle", **given)
    graph, drafts = (
        program.Graph(tmp_path / "bundle" / f"{part}.onnx", torch.device("cpu"))
        for part in ("target", "drafter")
    )
    counts = Counter(node.operator for node in graph.nodes)
    assert counts["BlockAcceptance"] == 1
    assert Counter(node.operator for node in drafts.nodes)["BestToken"] == ("trees" not in name)
    if name in LAYERS:
        layers = counts["Attend"]
        # The first norm has no sum before it, and the last one may read chosen rows.
        wanted = {op: n * layers - (op == "AddNorm") for op, n in LAYERS[name].items()}
        assert {op: counts[op] for op in wanted} == wanted
        assert not {"Split", "RotaryEmbedding", "Transpose", "WriteRows"} & counts.keys()

    def answers() -> list[Any]:
        params = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=True)
        with LLM(made.path, max_batch_size=3, threads=1) as llm:
            return [[*c.token_ids, *(c.logprobs or [])] for c in llm.generate(prompts()[:3], params)]

    joined = answers()
    monkeypatch.setattr(program, "fused", lambda nodes, results: nodes)
    for apart, together in zip(answers(), joined, strict=True):
        assert apart == pytest.approx(together, abs=1e-4)


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


def test_what_something_else_reads_stays_apart() -> None:
    split = Node("Split", {"axis": -1}, ["y", "sizes"], ["gate", "up"], (1,))
    nodes = [
        Node("Gemm", {"transB": 1}, ["x", "w"], ["y"]),
        split,
        Node("Swish", {}, ["gate"], ["silu"]),
        Node("Mul", {}, ["silu", "up"], ["gated"]),
    ]
    assert [node.operator for node in fused(nodes, ["gated"])] == ["Gemm", "Gate"]
    for results in (["gated", "gate"], ["gated", "up"], ["gated", "silu"], ["gated", "y"]):
        assert fused(nodes, results) == nodes
    read = Node("Neg", {}, ["up"], ["other"])
    assert fused([*nodes, read], ["gated", "other"]) == [*nodes, read]


def test_best_tokens_are_of_the_logits_that_a_head_gives() -> None:
    nodes = [
        Node("Cast", {"to": 1}, ["logits"], ["wide"]),
        Node("LogSoftmax", {"axis": -1}, ["wide"], ["logprobs"]),
        Node("ArgMax", {"axis": -1, "keepdims": 1}, ["wide"], ["token"]),
        Node("ReduceMax", {"keepdims": 1}, ["logprobs", "axes"], ["logprob"], (1,)),
    ]
    best = Node("BestToken", {}, ["logits"], ["token", "logprob"])
    assert fused(nodes, ["token", "logprob"]) == [nodes[0], best]
    assert fused(nodes, ["token", "logprob", "logprobs"]) == nodes
    assert fused([nodes[0], nodes[1], nodes[3]], ["logprob"]) == [nodes[0], nodes[1], nodes[3]]

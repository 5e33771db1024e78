"""Trees: candidates for each place, best first, and passes in which each node has the logits of its own path."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt import LLM, SamplingParams
from dflash_trt.building import defaults
from dflash_trt.building.build import build
from dflash_trt.decoding.draft import Draft, chain_rows, tree_rows
from dflash_trt.decoding.pair import Pair
from dflash_trt.decoding.request import Request
from dflash_trt.engines.onnxruntime.runner import OnnxRuntimeRunner
from dflash_trt.errors import BuildError, RequestError
from dflash_trt.formats.precision import Precision
from tests.doubles.checkpoints import make_drafter, make_target
from tests.doubles.family_checkpoints import make_gpt_oss, make_gpt_oss_drafter
from tests.doubles.pool import request
from tests.doubles.reference import Drafter, load_target, target_outputs

WIDTH = 5


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A target, its drafter, and their bundle for trees."""
    directory = tmp_path_factory.mktemp("candidates")
    target = make_target(directory / "target")
    drafter = make_drafter(directory / "drafter", target)
    out = directory / "bundle"
    build(str(target), str(drafter), out, max_seq_len=96, tree_width=WIDTH)
    return target, drafter, out


def test_the_best_tokens_of_each_place(pair: tuple[Path, Path, Path]) -> None:
    reference, target = Drafter(pair[1]), load_target(pair[0])
    features = target_outputs(target, list(range(20, 50)), reference.taps)[1]
    found = reference.propose(target, features, 7)
    expected = target.lm_head(found.hidden[1:]).log_softmax(-1).topk(WIDTH)
    engine = OnnxRuntimeRunner(pair[2] / "drafter.onnx", slots=1, capacity=96, threads=1)
    out = engine.run(
        {
            "features": features.numpy()[None],
            "n_features": np.array([len(features)]),
            "start": np.array([0]),
            "block": np.array([[7] + [reference.mask_token_id] * (reference.block_size - 1)]),
        }
    )
    assert out["draft_tokens"][0].tolist() == expected.indices.tolist()
    torch.testing.assert_close(torch.tensor(out["draft_logprobs"][0]), expected.values, atol=2e-4, rtol=0)


@pytest.mark.parametrize("width", [0, 65])
def test_a_width_that_no_drafter_has(pair: tuple[Path, Path, Path], tmp_path: Path, width: int) -> None:
    with pytest.raises(BuildError, match=rf"--tree-width is {width}, expected 1\.\.64"):
        build(str(pair[0]), str(pair[1]), tmp_path / "out", tree_width=width)


def test_large_targets_in_floats_get_trees_by_default(
    pair: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def width(name: str, **settings: Any) -> int:
        built = build(str(pair[0]), str(pair[1]), tmp_path / name, max_seq_len=96, **settings)
        found: int = built.manifest["tree_width"]
        return found

    assert width("small") == 1
    monkeypatch.setattr(defaults, "LARGE_HEAD_BYTES", 0)
    assert width("large") == 8
    assert width("asked", tree_width=2) == 2
    assert width("int8", precision=Precision(target="int8")) == 1
    with pytest.raises(BuildError, match=r"--tree-width is 3, but the target is in int8: with trees"):
        width("refused", tree_width=3, precision=Precision(target="int8"))


def test_wrong_numbers_of_nodes(pair: tuple[Path, Path, Path], tmp_path: Path) -> None:
    with LLM(pair[2], threads=1) as llm:
        for nodes in (1, -1, 10_000, True):
            with pytest.raises(RequestError, match=rf"tree_nodes is {nodes}, expected 2\.\.\d+, or 0 for"):
                llm.generate([1, 2], SamplingParams(max_tokens=3), tree_nodes=nodes)
    build(str(pair[0]), str(pair[1]), tmp_path / "chains", max_seq_len=96)
    with LLM(tmp_path / "chains", threads=1) as llm:
        assert llm.generate([1, 2], SamplingParams(max_tokens=3), tree_nodes=0).token_ids
        with pytest.raises(RequestError, match=r"tree_nodes is 8, but this bundle drafts chains"):
            llm.generate([1, 2], SamplingParams(max_tokens=3), tree_nodes=8)


VOCAB_USED = 60


@st.composite
def trees(draw: st.DrawFn) -> list[int]:
    nodes = draw(st.integers(1, 12))
    return [-1, *(draw(st.integers(0, node - 1)) for node in range(1, nodes))]


@given(st.lists(trees(), min_size=1, max_size=3))
@settings(max_examples=30, deadline=None)
def test_a_node_sees_itself_and_its_ancestors(forest: list[list[int]]) -> None:
    nodes = min(len(tree) for tree in forest)
    rows = tree_rows(np.array([tree[:nodes] for tree in forest]))
    for tree, depths, visible in zip(forest, rows["depths"], rows["visible"], strict=True):
        for node in range(nodes):
            line, above = {node}, node
            while (above := tree[above]) >= 0:
                line.add(above)
            assert set(np.flatnonzero(visible[node])) == line
            assert depths[node] == len(line) - 1


def test_chains_are_trees_too() -> None:
    for count, nodes in ((1, 1), (2, 5), (1, 3)):
        parents = np.tile(np.arange(-1, nodes - 1), (count, 1))
        for name, rows in tree_rows(parents).items():
            np.testing.assert_array_equal(chain_rows(count, nodes)[name], rows)


@pytest.fixture(scope="module", params=["qwen3", "gpt-oss"])
def wide(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """gpt-oss has attention sinks, and windows of 8 that end within a tree."""
    directory = tmp_path_factory.mktemp("trees")
    if request.param == "qwen3":
        target = make_target(directory / "target")
        drafter = make_drafter(directory / "drafter", target)
    else:
        target = make_gpt_oss(directory / "target")
        drafter = make_gpt_oss_drafter(directory / "drafter", target)
    build(str(target), str(drafter), directory / "bundle", max_seq_len=96, tree_width=2)
    with LLM(directory / "bundle", max_batch_size=2, threads=1) as llm:
        yield llm.runtime.scheduler.pair


def prefilled(pair: Pair, prompts: list[list[int]]) -> list[Request]:
    active = []
    for slot, prompt in enumerate(prompts):
        pair.prefill(prompt[:-1], 0, slot, draft=False)
        each = request(prompt[:-1], SamplingParams(), draft=False)
        each.output, each.committed, each.slot = prompt[-1:], len(prompt) - 1, slot
        active.append(each)
    return active


def path_to(parents: list[int], node: int) -> list[int]:
    path = [node]
    while (node := parents[node]) >= 0:
        path.insert(0, node)
    return path


@pytest.mark.parametrize("nodes", [7, 24])  # few rows and many have other bodies
def test_every_node_has_the_logits_of_its_own_path(wide: Pair, nodes: int) -> None:
    """Also behind a compacted path. The sequences of the batch have other trees and other lengths."""
    pair, rng = wide, np.random.default_rng(nodes)
    prompts = [rng.integers(VOCAB_USED, size=n).tolist() for n in (20, 9)]
    parents = np.array(
        [[-1, *(int(rng.integers(max(0, n - 6), n)) for n in range(1, nodes))] for _ in prompts]
    )
    tokens = rng.integers(VOCAB_USED, size=(2, nodes))
    tokens[:, 0] = [prompt[-1] for prompt in prompts]
    active = prefilled(pair, prompts)
    found = pair.verify(active, Draft(tokens, parents, np.zeros((2, nodes - 1), np.float32)))
    logits, features = np.array(found.logits), np.array(pair._features)
    ends = [nodes - 1, nodes // 2]
    paths = [path_to(parents[slot].tolist(), end) for slot, end in enumerate(ends)]
    assert any(path[-1] >= len(path) for path in paths)  # otherwise nothing moves
    for each, path in zip(active, paths, strict=True):
        pair.commit(each, each.slot, path)
        each.committed += len(path)
    after = rng.integers(VOCAB_USED, size=(2, 1))
    next_logits = np.array(pair.verify(active, Draft(after, None, np.zeros((2, 0), np.float32))).logits)
    for slot, prompt in enumerate(prompts):
        line = parents[slot].tolist()
        for node in [0, *ends, *rng.integers(1, nodes, size=4).tolist()]:
            path = path_to(line, node)
            alone = prefilled(pair, [prompt])
            expected = pair.verify(
                alone, Draft(tokens[slot : slot + 1, path], None, np.zeros((1, len(path) - 1)))
            )
            np.testing.assert_allclose(logits[slot, node], expected.logits[0, -1], atol=2e-4)
            np.testing.assert_allclose(features[slot, node], pair._features[0, -1], atol=2e-4)
        whole = [*prompt, *tokens[slot, paths[slot]][1:].tolist(), int(after[slot, 0])]
        expected = pair.verify(
            prefilled(pair, [whole]), Draft(after[slot : slot + 1], None, np.zeros((1, 0)))
        )
        np.testing.assert_allclose(next_logits[slot, 0], expected.logits[0, 0], atol=2e-4)

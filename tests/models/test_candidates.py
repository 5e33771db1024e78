"""A drafter built for trees: several candidates for each place, best first, and the same chains as without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash_trt import LLM, SamplingParams
from dflash_trt.building import defaults
from dflash_trt.building.build import build
from dflash_trt.engines.onnxruntime.runner import OnnxRuntimeRunner
from dflash_trt.errors import BuildError, RequestError
from dflash_trt.formats.precision import Precision
from tests.doubles.checkpoints import make_drafter, make_target
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

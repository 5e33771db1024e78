"""Drafters with fewer tokens than their target: the best drafts among these, and every token as without drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash_trt import LLM, SamplingParams
from dflash_trt.building.build import build
from dflash_trt.checkpoint.catalogue import SHIPPED
from dflash_trt.checkpoint.draft_vocabulary import FILE, most_frequent, read_draft_vocabulary
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.engines.onnxruntime.runner import OnnxRuntimeRunner
from dflash_trt.errors import BuildError, CheckpointError
from dflash_trt.formats.precision import parse_precision
from dflash_trt.models.configs import read_drafter_config, read_target_config
from dflash_trt.models.inventory import take_inventory
from tests.doubles.checkpoints import make_target
from tests.doubles.hybrid_checkpoints import make_hybrid
from tests.doubles.kind_checkpoints import make_dflash2, make_dspark, make_eagle3, make_jetspec
from tests.doubles.reference import DFlash2, Drafter, load_target, target_outputs
from tests.doubles.speculators import SpeculatorsDSpark, as_speculators

VOCAB = 384
TOKENS = sorted(np.random.default_rng(3).permutation(VOCAB)[:256].tolist())


def make_speculators_dspark(directory: Path, target: Path) -> Path:
    """Without a head in the file, as all tokens of the target have a row in the Markov head."""
    fields = {"block_size": 7, "sample_from_anchor": True, "markov_rank": 24, "markov_head_type": "vanilla"}
    fields |= {"enable_confidence_head": False, "confidence_head_with_markov": False}
    return as_speculators(make_dspark(directory, target), target, "dspark", entered=(0, 3), **fields)


KINDS: dict[str, tuple[Any, Any]] = {
    "jetspec": (make_jetspec, Drafter),
    "dflash2": (make_dflash2, DFlash2),
    "dspark": (make_speculators_dspark, SpeculatorsDSpark),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"), layers=6, dtype="float32", favourites=6)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vocabulary") / "mine.json"
    path.write_text(json.dumps({"tokens": TOKENS[::-1]}), encoding="utf-8")
    return path


def one_pass(path: Path, model: Any, text: list[int], anchor: int) -> Any:
    manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    engine = OnnxRuntimeRunner(path / "drafter.onnx", slots=1, capacity=64, threads=1)
    features = target_outputs(model, text, manifest["target_layer_ids"])[1].numpy()[None]
    block = np.full((1, manifest["block_size"]), manifest["mask_token_id"])
    block[:, 0] = anchor
    feeds = {
        "features": features,
        "n_features": np.array([len(text)]),
        "start": np.array([0]),
        "block": block,
    }
    return engine.run(feeds, first_slot=0)


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_the_best_of_the_vocabulary(
    kind: str, target: Path, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are those of plain torch where other tokens have no chance."""
    make, reference_of = KINDS[kind]
    drafter, model = make(tmp_path / "drafter", target), load_target(target)
    few = build(
        *(str(target), str(drafter), tmp_path / "few"),
        max_seq_len=64,
        precision=parse_precision("drafter=fp32"),
        draft_vocabulary=file,
    )
    assert few.manifest["draft_vocab_size"] == len(TOKENS)
    reference, text = reference_of(drafter), list(range(40, 52))
    among = torch.full((VOCAB,), -torch.inf).index_fill_(0, torch.tensor(TOKENS), 0.0)
    every = reference.logits
    monkeypatch.setattr(reference, "logits", lambda *rows: every(*rows) + among)
    expected = reference.draft(model, text, 9, few.manifest["block_size"])
    out = one_pass(few.path, model, text, 9)
    assert out["draft_tokens"][0, :, 0].tolist() == expected.tokens
    np.testing.assert_allclose(out["draft_logprobs"][0, :, 0], expected.logprobs, atol=2e-4)
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.9, seed=4)
    with LLM(few.path) as llm:
        plain = llm.generate([5, 9, 200, 31], params, speculate=False)
        drafted = llm.generate([5, 9, 200, 31], params, block_length=llm.block_size)
    assert drafted.token_ids == plain.token_ids
    assert drafted.statistics.num_draft_tokens


@pytest.mark.parametrize("head", [None, "int8", "fp8"])
def test_the_head_has_the_target_s_rows(head: str | None, tmp_path: Path) -> None:
    """From a tied embedding in BF16, as it is or quantized."""
    target, tokens = SHIPPED / "tiny" / "target", list(range(0, 2048, 4))
    (tmp_path / "drafter").mkdir()
    for path in (SHIPPED / "tiny" / "drafter").iterdir():
        (tmp_path / "drafter" / path.name).write_bytes(path.read_bytes())
    (tmp_path / "drafter" / FILE).write_text(json.dumps({"tokens": tokens}), encoding="utf-8")
    precision = parse_precision(head and f"head={head}")
    bundle = build("tiny", str(tmp_path / "drafter"), tmp_path / "bundle", precision=precision)
    made = Checkpoint(bundle.path / "weights" / "head")
    assert (made.array("d2t") + np.arange(len(tokens))).tolist() == tokens
    table = Checkpoint(target).array("model.embed_tokens.weight")
    if head is None:
        assert made.array("lm_head.weight").tobytes() == table[tokens].tobytes()
    assert made["lm_head.weight"].shape[0] == len(tokens)
    with LLM(bundle.path) as llm:
        drafted, plain = (
            llm.generate("2 + 3 =", SamplingParams(max_tokens=16), speculate=s) for s in (True, False)
        )
    assert drafted.token_ids == plain.token_ids
    key = bundle.manifest["key"]
    again = build("tiny", str(tmp_path / "drafter"), tmp_path / "bundle", precision=precision)
    assert again.manifest["key"] == key
    whole = build(
        *("tiny", str(tmp_path / "drafter"), tmp_path / "whole"), precision=precision, draft_vocabulary="all"
    )
    assert whole.manifest["draft_vocab_size"] == 2048
    configs = read_target_config(target), read_drafter_config(tmp_path / "drafter")
    assert take_inventory(*configs).draft_rows == len(tokens)


def test_who_has_no_use_for_a_vocabulary_says_so(target: Path, file: Path, tmp_path: Path) -> None:
    eagle3 = str(make_eagle3(tmp_path / "eagle3", target))
    with pytest.raises(BuildError, match="is of a drafter with its own head: leave --draft-vocabulary out"):
        build(str(target), eagle3, tmp_path / "out", draft_vocabulary=file)
    with pytest.raises(BuildError, match="--weights none makes the graphs without any head"):
        build("tiny", None, tmp_path / "out", draft_vocabulary=file, weights="none")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "tokens is missing"),
        ({"tokens": ["a"] * 300}, "tokens is missing or is not a list"),
        ({"tokens": [True] * 300}, "tokens is missing or is not a list"),
        ({"tokens": [1, 2]}, "tokens has 2 ids, expected at least 256"),
        ({"tokens": list(range(400))}, "tokens has 384, but the target's vocab_size is 384"),
        ({"tokens": [-1, *range(300)]}, "tokens has -1, but"),
        ({"tokens": [7, *range(300)]}, "tokens has 7 twice"),
    ],
)
def test_a_wrong_file_is_named(content: object, message: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(CheckpointError, match=f"{FILE}: {message}"):
        read_draft_vocabulary(tmp_path / FILE, VOCAB)


def test_the_most_frequent_tokens_are_taken() -> None:
    assert most_frequent([[9, 9, 5], [5, 9, 300]], 2, VOCAB, []) == [5, 9]
    assert most_frequent([[9, 9, 5], [5, 9, 300]], 3, VOCAB, [1]) == [1, 5, 9]
    assert most_frequent([[9, 9, 5]], 5, VOCAB, [7]) == [0, 1, 5, 7, 9]


def test_the_drafter_in_a_target_takes_one(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_TRT_CACHE", str(tmp_path / "cache"))
    target = make_hybrid(tmp_path / "target", prediction=True, favourites=6)
    bundle = build(str(target), "mtp", tmp_path / "bundle", max_seq_len=64, draft_vocabulary=file)
    assert bundle.manifest["draft_vocab_size"] == len(TOKENS)
    params, drafts = SamplingParams(max_tokens=24, ignore_eos=True), list[int]()
    with LLM(bundle.path, threads=1) as llm:
        plain = llm.generate([5, 9, 200, 31], params, speculate=False)
        propose = llm.runtime.pair.drafter.propose

        def noted(*arguments: Any) -> Any:
            draft = propose(*arguments)
            drafts.extend(draft.tokens_of(0)[1:])
            return draft

        monkeypatch.setattr(llm.runtime.pair.drafter, "propose", noted)
        drafted = llm.generate([5, 9, 200, 31], params, block_length=llm.block_size)
    assert drafted.token_ids == plain.token_ids
    assert len(set(drafts)) > 1
    assert set(drafts) <= set(TOKENS)

"""Drafters of every kind on ONNX Runtime: their drafts are those of plain torch, and the tokens those without drafts.

The checkpoints are random, with the published names. Logits have order 10.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from dflash_trt import LLM, SamplingParams
from dflash_trt.building.build import build
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.checkpoint.fields import Fields
from dflash_trt.engines.onnxruntime.runner import OnnxRuntimeRunner
from dflash_trt.errors import DFlashError, PairError
from dflash_trt.models.configs import read_drafter_config
from dflash_trt.models.reading import windows
from tests.doubles.checkpoints import make_drafter, make_target, write_json
from tests.doubles.kind_checkpoints import (
    as_specforge,
    make_dflash2,
    make_dspark,
    make_eagle3,
    make_gemma_dspark,
    make_jetspec,
    target_config,
)
from tests.doubles.reference import DFlash2, Drafter, load_target, target_outputs
from tests.doubles.reference_kinds import DSpark, Eagle3, GemmaDSpark, SpecForge
from tests.doubles.speculators import (
    SpeculatorsBlock,
    SpeculatorsDFlash2,
    SpeculatorsDSpark,
    SpeculatorsEagle3,
    as_speculators,
)
from tests.doubles.text_checkpoints import EXPERTS, GEMMA, load_text, make_gemma

LAYERS, TOLERANCE, WIDTH = 6, 2e-4, 3
Make = Callable[[Path, Path], Path]


def eagle3(**settings: Any) -> tuple[Make, Callable[[Path], Any]]:
    return (lambda out, target: make_eagle3(out, target, **settings)), lambda path: Eagle3(path, LAYERS)


def dflash2(**settings: Any) -> tuple[Make, Callable[[Path], Any]]:
    return (lambda out, target: make_dflash2(out, target, **settings)), DFlash2


def dspark(**settings: Any) -> tuple[Make, Callable[[Path], Any]]:
    return (lambda out, target: make_dspark(out, target, **settings)), DSpark


def specforge(prefix: str = "", **settings: Any) -> tuple[Make, Callable[[Path], Any]]:
    heads = {name: settings.pop(name) for name in ("head", "confidence") if name in settings}
    make = dspark(**heads)[0]
    return (lambda out, target: as_specforge(make(out, target), prefix=prefix, **settings)), SpecForge


def speculators(
    make: Make, model: str, reference: Callable[[Path], Any], **settings: Any
) -> tuple[Make, Callable[[Path], Any]]:
    return (lambda out, target: as_speculators(make(out, target), target, model, **settings)), reference


SLIDING = {
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": 9,
}


def as_z_lab(out: Path, target: Path) -> Path:
    """For Gemma 4: six taps, four windows and a layer that sees all, blocks of 16, the soft-cap of the target."""
    windows: dict[str, Any] = {
        "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
        "sliding_window": 9,
    }
    return make_drafter(out, target, taps=(0, 1, 2, 3, 4, 5), layers=5, block_size=16, softcap=4.0, **windows)


class RedHat(SpeculatorsBlock):
    """Trained on embedded rows as they are stored, without the target's factor."""

    def embed(self, target: Any, tokens: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(tokens, target.model.embed_tokens.weight)


# name: how the checkpoint is made, and its reference
CASES: dict[str, tuple[Make, Callable[[Path], Any]]] = {
    "dflash2": dflash2(),
    "dflash2, with confidence": dflash2(confidence=True),
    "dflash2, windows": dflash2(window=9, softcap=6.0, multiplier=0.5, block_size=5),
    "jetspec": (make_jetspec, Drafter),
    "deepspec's dflash": dspark(rank=0),
    "dspark": dspark(),
    "dspark, gated, with confidence": dspark(head="gated", confidence=True),
    "specforge's dspark, recurrent": specforge(head="rnn", confidence=True, window=9),
    "specforge's dspark, for SGLang": specforge(
        "logit_head.", head="gated", architecture="Qwen3DSparkModel", dspark_bonus_anchor=True
    ),
    "speculators, dflash": speculators(
        make_jetspec, "dflash", SpeculatorsBlock, entered=(2, 4), vocabulary=200, layer=SLIDING
    ),
    "speculators, dflash2": speculators(
        dflash2()[0],
        *("dflash2", SpeculatorsDFlash2),
        entered=(2, 4),
        layer=SLIDING,
        sliding_window_non_causal=True,
        conv_kernel_size=2,
        conv_group_size=16,
        selector_rank=24,
        selector_top_k=6,
    ),
    "speculators, dspark": speculators(
        dspark(head="rnn", confidence=True)[0],
        *("dspark", SpeculatorsDSpark),
        entered=(0, 3),
        vocabulary=200,
        block_size=7,
        sample_from_anchor=True,
        markov_rank=24,
        markov_head_type="rnn",
        enable_confidence_head=True,
        confidence_head_with_markov=True,
    ),
    "speculators, eagle3": speculators(
        eagle3(layout="layers.0", embedding=True)[0],
        "eagle3",
        lambda path: SpeculatorsEagle3(path, LAYERS),
        entered=None,
        layer={"model_type": "llama"},
        norm_before_residual=True,
    ),
    "speculators, eagle3 of qwen3": speculators(
        eagle3(layout="layers.0")[0],
        "eagle3",
        lambda path: SpeculatorsEagle3(path, LAYERS),
        entered=(2, 3, 6),
        norm_before_fc=True,
        norm_output=True,
    ),
    "eagle3": eagle3(embedding=True),
    "eagle3, exported": eagle3(layout="layers.0", aux=(1, 3, 5), heads=2),
    "eagle3 of SpecForge": eagle3(aux=(1, 3, 4)),
    "eagle3, exported with a norm": eagle3(layout="layers.0", aux=(1, 3, 5), norm_before_fc=True),
    "eagle3.1": eagle3(vocabulary=None, fc_norm=True, norm_output=True),
    "gemma, z-lab": (as_z_lab, Drafter),
    "gemma, DeepSpec's DSpark": (make_gemma_dspark, GemmaDSpark),
    "gemma, DeepSpec's DFlash": (
        lambda out, target: make_gemma_dspark(out, target, rank=0, keys_as_values=False),
        GemmaDSpark,
    ),
    "gemma, speculators": speculators(make_jetspec, "dflash", RedHat, entered=(1, 6), vocabulary=200),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"), layers=LAYERS, dtype="float32", favourites=6)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gemma(tmp_path_factory.mktemp("gemma"), GEMMA, dtype="float32", favourites=6, **EXPERTS)


class Made(NamedTuple):
    """A target as Transformers reads it, the reference of its drafter, and the bundle of both."""

    model: Any
    reference: Any
    bundle: Bundle


@pytest.fixture(scope="module", params=CASES)
def made(
    request: pytest.FixtureRequest, target: Path, gemma: Path, tmp_path_factory: pytest.TempPathFactory
) -> Made:
    make, reference = CASES[request.param]
    source, load = (gemma, load_text) if request.param.startswith("gemma") else (target, load_target)
    folder = tmp_path_factory.mktemp("kinds")
    path = make(folder / "drafter", source)
    bundle = build(str(source), str(path), folder / "bundle", max_seq_len=96, tree_width=WIDTH)
    return Made(load(source), reference(path), bundle)


def test_drafts(made: Made) -> None:
    """Two sequences side by side: a prompt in chunks, drafts, and drafts again after some were committed."""
    model, reference, bundle = made
    manifest = bundle.manifest
    engine = OnnxRuntimeRunner(bundle.path / "drafter.onnx", slots=2, capacity=bundle.capacity, threads=1)
    for i, cache in enumerate(engine.caches.arrays.values()):
        cache[...] = np.random.default_rng(i).normal(0, 30, cache.shape)
    vocab, size = manifest["vocab_size"], manifest["block_size"]
    texts = [np.random.default_rng(seed).integers(0, 300, 40).tolist() for seed in (1, 2)]
    features = [target_outputs(model, text, manifest["target_layer_ids"])[1].numpy() for text in texts]

    def run(start: list[int], count: list[int], length: int, anchors: list[int], first_slot: int = 0) -> Any:
        rows = np.full((len(start), max(*count, 1), features[0].shape[1]), 25.0, np.float32)
        for i, (begin, n) in enumerate(zip(start, count, strict=True)):
            rows[i, :n] = features[first_slot + i][begin : begin + n]
        block = np.full((len(start), length), manifest["mask_token_id"])
        block[:, 0] = anchors
        feeds = {"features": rows, "n_features": np.array(count), "start": np.array(start), "block": block}
        return engine.run(feeds, first_slot=first_slot)

    for slot, chunks in enumerate([(1, 16, 4), (12,)]):
        start = 0
        for count in chunks:
            run([start], [count], 2, [9], slot)
            start += count
    for start, count, length in (([21, 12], [0, 0], size), ([21, 12], [1, 5], 3), ([22, 17], [6, 2], size)):
        ends = [a + b for a, b in zip(start, count, strict=True)]
        anchors = [text[end] for text, end in zip(texts, ends, strict=True)]
        out = run(start, count, length, anchors)
        assert out["draft_tokens"].shape == (2, length - 1, WIDTH)
        for i, end in enumerate(ends):
            expected = reference.draft(model, texts[i][:end], anchors[i], length)
            assert out["draft_tokens"][i, :, 0].tolist() == expected.tokens
            assert np.abs(out["draft_logprobs"][i, :, 0] - expected.logprobs.numpy()).max() <= TOLERANCE
            best = torch.stack(expected.scores).topk(WIDTH).values.numpy()
            found = -np.sort(
                -out["draft_logprobs"][i]
            )  # a confidence may be below the second candidate's share
            assert np.abs(found - best).max() <= TOLERANCE
            assert out["draft_tokens"].max() < vocab


def test_tokens_are_those_of_plain_decoding(made: Made) -> None:
    prompts = [[5, 9, 200, 31], [7], [3, 1, 4, 1, 5, 9, 2, 6]]
    params = [SamplingParams(max_tokens=24, ignore_eos=True, temperature=t, seed=4) for t in (0, 0.9, 0.9)]
    with LLM(made.bundle.path, prefill_chunk=5, threads=1) as llm:
        plain = llm.generate(prompts, params, speculate=False)
        drafted = llm.generate(prompts, params, block_length=llm.block_size)
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
    assert all(c.statistics.num_draft_tokens for c in drafted)


EAGLE, SPECULATORS, SCALE = "eagle3", "speculators, dspark", "input_embedding_scale"
SPECFORGE = "specforge's dspark, recurrent"


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        (EAGLE, {"num_hidden_layers": 2}, "num_hidden_layers is 2, but EAGLE-3 has 1 layer"),
        (EAGLE, {"target_hidden_size": 128}, "target_hidden_size is 128, but hidden_size is 64"),
        ("dflash2", {f"dflash_config.{SCALE}": 0}, f"{SCALE} is 0, expected a number greater than 0"),
        ("jetspec", {f"dflash_config.{SCALE}": 2.0, SCALE: 3.0}, f"{SCALE} is 2.0, but {SCALE} is 3.0"),
        ("speculators, dflash", {SCALE: -1}, f"{SCALE} is -1, expected a number greater than 0"),
        (
            EAGLE,
            {"parallel_drafting": True},
            "parallel_drafting is true, which this version does not support",
        ),
        (SPECFORGE, {"dflash_config.projector_type": "domino"}, "projector_type is .domino., which"),
        (SPECFORGE, {"markov_rank": 8}, "dflash_config.markov_rank is 24, but markov_rank at the top is 8"),
        (SPECFORGE, {"model_type": "deepseek_v4"}, "model_type is 'deepseek_v4', supported are: qwen3"),
        *(
            (SPECULATORS, change, message)
            for change, message in (
                ({"speculators_model_type": "peagle"}, "speculators_model_type is 'peagle', supported are"),
                ({"transformer_layer_config": None}, "transformer_layer_config is missing"),
                ({"transformer_layer_config.model_type": "gemma3"}, "_config.model_type is 'gemma3'"),
                ({"transformer_layer_config.mlp_bias": True}, "transformer_layer_config.mlp_bias is true"),
                ({"draft_vocab_size": 500}, "draft_vocab_size is 500, expected an integer from 1 to 384"),
                ({"target_hidden_size": 128}, "target_hidden_size is 128, but hidden_size is 64"),
                ({"aux_hidden_state_layer_ids": [2, 2]}, "aux_hidden_state_layer_ids is .2, 2., expected"),
                ({"aux_hidden_state_layer_ids": [2, 7]}, "the target has 6 layers"),
                ({"markov_head_type": "lstm"}, "markov_head_type is 'lstm', supported are: vanilla, gated"),
            )
        ),
    ],
)
def test_what_is_not_supported_is_named(
    target: Path, tmp_path: Path, kind: str, change: dict[str, Any], message: str
) -> None:
    path = CASES[kind][0](tmp_path / "drafter", target)
    fields = target_config(path)
    for name, value in change.items():
        place, _, key = name.rpartition(".")
        (fields[place] if place else fields)[key] = value
    write_json(path / "config.json", fields)
    with pytest.raises(DFlashError, match=message):
        build(str(target), str(path), tmp_path / "out")


@pytest.mark.parametrize(
    ("kind", "fields", "window"),
    [
        ("llama", {}, 96),
        ("llama", {"max_window_layers": 1}, 96),  # a Llama configuration has no such field
        ("llama", {"layer_types": ["full_attention"]}, None),
        ("llama", {"layer_types": ["sliding_attention"]}, 96),
        ("qwen3", {}, None),
        ("qwen3", {"layer_types": ["full_attention"]}, None),
        *(
            (kind, {"use_sliding_window": used, **fields}, window if used else None)
            for kind in ("llama", "qwen3")
            for used in (False, True)
            for fields, window in (({"max_window_layers": 0}, 96), ({"max_window_layers": 1}, None))
        ),
        ("llama", {"use_sliding_window": True}, 96),
    ],
)
def test_a_window_counts_where_it_is_in_use(
    target: Path, tmp_path: Path, kind: str, fields: dict[str, Any], window: int | None
) -> None:
    """By one rule for every reader. An EAGLE-3 head with a window is refused."""
    fields = {"model_type": kind, "sliding_window": 96} | fields
    assert windows(Fields(tmp_path / "config.json", fields), 1) == [window]
    of_layer = dict.fromkeys(("use_sliding_window", "max_window_layers", "layer_types")) | fields
    eagle, speculator = (CASES[name][0](tmp_path / name, target) for name in (EAGLE, "speculators, eagle3"))
    changed = target_config(speculator)
    changed["transformer_layer_config"] |= of_layer
    write_json(speculator / "config.json", changed)
    write_json(eagle / "config.json", target_config(eagle) | of_layer)
    for path in (eagle, speculator):
        if window is None:
            assert read_drafter_config(path).layers[0].window is None
            continue
        with pytest.raises(DFlashError, match="sliding_window is 96, but EAGLE-3"):
            read_drafter_config(path)


def test_eagle3_for_gemma_is_refused(gemma: Path, tmp_path: Path) -> None:
    """Its embedded rows are the target's, which Gemma scales."""
    path = make_eagle3(tmp_path / "drafter", gemma)
    with pytest.raises(PairError, match="EAGLE-3 heads are not supported"):
        build(str(gemma), str(path), tmp_path / "out")


def test_the_first_tap_of_speculators_is_the_embedding(target: Path, tmp_path: Path) -> None:
    path = CASES["speculators, dspark"][0](tmp_path / "drafter", target)
    assert read_drafter_config(path).target_layer_ids == (-1, 2)

"""A target without a drafter: drafts come from each request's own text, and tokens are those of plain decoding."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_trt import LLM, SamplingParams, StructuredOutputs
from dflash_trt.building.build import build
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.cli import main
from dflash_trt.decoding.length.adaptive import AdaptiveLength
from dflash_trt.decoding.length.policy import FixedLength, Lengths
from dflash_trt.decoding.length.times import PassTimes
from dflash_trt.decoding.params import RequestOptions
from dflash_trt.decoding.request import Request
from dflash_trt.engines.tensorrt.options import TensorRTOptions
from dflash_trt.errors import DFlashError, NonFiniteError, UsageError
from dflash_trt.formats.precision import Precision
from dflash_trt.models.configs import read_target_config
from tests.decoding.test_isolation import SPOILT, prompt, spoil, spoilt_prompt
from tests.doubles.checkpoints import make_drafter, make_target
from tests.doubles.family_checkpoints import make_gpt_oss
from tests.doubles.hybrid_checkpoints import make_hybrid
from tests.doubles.one_gpu import one_gpu

BLOCK = 6
PARAMS = [
    SamplingParams(max_tokens=24, ignore_eos=True),
    SamplingParams(max_tokens=18, ignore_eos=True, temperature=0.8, seed=2),
    SamplingParams(max_tokens=30, ignore_eos=True, repetition_penalty=1.1, presence_penalty=0.2),
    SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.4, top_p=0.9, seed=3, stop=["e"]),
    SamplingParams(max_tokens=12, ignore_eos=True, logprobs=True),
]


@contextmanager
def machine(engine: str) -> Iterator[None]:
    """One with a GPU, if the engine needs it."""
    with one_gpu(120) if engine.startswith("tensorrt") else nullcontext():
        yield


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory, layers = tmp_path_factory.mktemp("targets"), ["linear_attention", "full_attention"]
    return {
        "windows": make_target(directory / "windows", favourites=4, layers=2, sliding_window=20),
        "experts": make_gpt_oss(directory / "experts", favourites=4, quantized=False),
        "recurrent": make_hybrid(
            directory / "recurrent", favourites=4, num_hidden_layers=2, layer_types=layers
        ),
    }


def built(engine: str, target: Path, drafter: Path | None, out: Path, **options: Any) -> Bundle:
    """For an engine, in float32."""
    if engine.startswith("tensorrt"):
        options["options"] = TensorRTOptions(max_batch_size=5, prefill_chunk=16)
    precision = Precision(target="fp32", drafter="fp32" if drafter else None)
    given = str(drafter) if drafter else None
    return build(
        str(target), given, out, engine=engine, no_drafter=drafter is None, max_seq_len=160,
        precision=precision, **options,
    )  # fmt: skip


def prompts() -> list[list[int]]:
    """Such that repeat themselves; some have a common beginning."""
    stem = prompt(11)
    return [[*stem, *stem], [*stem, *stem, *prompt(3, 1), *stem[:4]], prompt(2, 2), prompt(6, 3) * 5, stem]


@pytest.mark.parametrize(
    ("kind", "engine"),
    [
        *(("windows", engine) for engine in ("onnxruntime", "torch", "tensorrt", "tensorrt-rtx")),
        *(("recurrent", engine) for engine in ("onnxruntime", "torch")),
        ("experts", "onnxruntime"),
    ],
)
def test_tokens_are_those_of_plain_decoding(targets, kind, engine, tmp_path) -> None:
    """Five requests in three slots; greedy, sampled, penalized, stopped; their prefixes are reused the second time.

    The reference is plain decoding by a graph that has taps.
    """
    drafter = make_drafter(tmp_path / "drafter", targets[kind], block_size=BLOCK, layers=1, taps=(0, 1))
    paired = built("onnxruntime", targets[kind], drafter, tmp_path / "paired")
    with LLM(paired.path, threads=1, max_batch_size=1, prefix_cache_bytes=0) as llm:
        plain = [
            llm.generate(*each, speculate=False).token_ids for each in zip(prompts(), PARAMS, strict=True)
        ]
    copied = 0
    with machine(engine):
        bundle = built(engine, targets[kind], None, tmp_path / engine, block_size=BLOCK)
        assert bundle.roles == ("target",)
        assert (bundle.manifest["drafter"], bundle.manifest["block_size"]) == (None, BLOCK)
        assert not any("drafter" in name for name in bundle.manifest["files"])
        with LLM(
            bundle.path, threads=1, max_batch_size=3, prefill_chunk=16, prefix_cache_bytes=1 << 20
        ) as llm:
            for length in (BLOCK, None, 3):
                answers = llm.generate(prompts(), PARAMS, block_length=length)
                assert [each.token_ids for each in answers] == plain, length
                for each in answers:
                    statistics = each.statistics
                    assert statistics.num_draft_tokens == statistics.num_lookup_draft_tokens
                    assert statistics.draft_time == 0
                    copied += statistics.num_lookup_accepted_tokens
            assert answers[1].statistics.num_cached_tokens > 0
    assert copied > 0


def generate(
    llm: LLM, asked: list[tuple[list[int], SamplingParams, RequestOptions]], lengths: Lengths | None = None
) -> list[Request]:
    """All at a time, each with options of its own."""
    runtime = llm.runtime
    requests = [runtime.request(*each) for each in asked]
    for each in requests:
        runtime.scheduler.submit(each)
    while not runtime.scheduler.idle:
        runtime.scheduler.step(lengths or runtime.lengths(RequestOptions()))
    return requests


@pytest.mark.parametrize(
    ("engine", "width"),
    [("onnxruntime", 1), ("onnxruntime", 3), ("torch", 3), ("tensorrt", 1)],
)
def test_a_batch_mixes_sources(targets: dict[str, Path], engine: str, width: int, tmp_path: Path) -> None:
    """The drafter, the text, both and neither, side by side: each has its own, and the tokens of plain decoding.

    On a device the drafter's chains are not read, and copies are put into them.
    """
    drafter = make_drafter(tmp_path / "drafter", targets["windows"], block_size=BLOCK, layers=1, taps=(0, 1))
    sources = [
        {"draft_source": "lookup"},
        {"draft_source": "drafter"},
        {},
        {"speculate": False},
        {"draft_source": "lookup", "block_length": 3},
    ]
    with machine(engine):
        bundle = built(engine, targets["windows"], drafter, tmp_path / "bundle", tree_width=width)
        with LLM(bundle.path, threads=1, max_batch_size=5, prefill_chunk=16) as llm:
            asked = [
                (prompts()[(i + j) % 5], PARAMS[i], RequestOptions(**options))
                for j in range(2)
                for i, options in enumerate(sources)
            ]
            arrays, placed = llm.runtime.pair.arrays, list[set[int]]()
            put = arrays.replace
            arrays.replace = lambda draft: (placed.append(set(draft.replaced)), put(draft))
            plain = [llm.generate(ids, params, speculate=False).token_ids for ids, params, _ in asked]
            # Passes of the drafter take no time before they are measured.
            times = (
                PassTimes(BLOCK, {1: {2: 1e-5, BLOCK: 1e-5}}),
                PassTimes(BLOCK, {1: {1: 1.0, BLOCK: 1.01}}),
            )
            for kept in times:  # those of this machine would change what is drafted
                kept.observe = lambda *_: True
            for lengths in (AdaptiveLength(BLOCK, *times, llm.most_tree_nodes), FixedLength(4)):
                found = generate(llm, asked, lengths)
                for each, expected in zip(found, plain, strict=True):
                    assert each.output[: len(expected)] == expected
                counts = [
                    (r.statistics.num_lookup_draft_tokens, r.statistics.num_draft_tokens, r.options)
                    for r in found
                ]
                assert all(copied == drafts for copied, drafts, o in counts if not o.takes_drafter)
                assert all(copied == 0 for copied, _, o in counts if not o.takes_lookup or not o.speculate)
                lone = sum(copied for copied, _, o in counts if not o.takes_drafter)
                # A fixed length drafts by the drafter.
                assert lone == 0 if isinstance(lengths, FixedLength) else lone > 0
            assert bool(placed) == (engine != "onnxruntime")


FIELDS = {
    "name": {"enum": ["Ann", "Bob"]},
    "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 3},
}
SCHEMA = {"type": "object", "properties": FIELDS, "required": ["name", "tags"], "additionalProperties": False}


@pytest.mark.parametrize("tree_width", [None, 1, 4])
def test_structured_outputs_with_copies(tree_width: int | None, tmp_path: Path) -> None:
    """Without a drafter, with chains and with trees. The prompt has answers of the form, which are copied."""
    pytest.importorskip("llguidance")
    bundle = build("tiny", None, tmp_path / "bundle", no_drafter=not tree_width, tree_width=tree_width)
    text = (
        " ".join(json.dumps({"name": name, "tags": ["red", "blue"]}) for name in ("Ann", "Bob", "Ann")) + " "
    )
    params = [
        SamplingParams(max_tokens=60, structured_outputs=StructuredOutputs(json=SCHEMA), **each)
        for each in ({}, {"temperature": 0.8, "seed": 1}, {"temperature": 1.2, "seed": 2})
    ]
    copied = 0
    with LLM(bundle.path, threads=1, max_batch_size=4) as llm:
        plain = llm.generate(text, params, speculate=False)
        ways: list[dict[str, Any]] = [{}, {"block_length": 8}, {"draft_source": "lookup", "block_length": 8}]
        if llm.most_tree_nodes:
            ways += [{"tree_nodes": 12}, {"draft_source": "lookup", "tree_nodes": 12}]
        for way in ways:
            answers = llm.generate(text, params, **way)
            assert [each.token_ids for each in answers] == [each.token_ids for each in plain], way
            copied += sum(each.statistics.num_lookup_accepted_tokens for each in answers)
        # Beside requests without a form.
        beside = generate(
            llm, [(llm.tokenizer.encode(text), p, RequestOptions()) for p in (*params, SamplingParams())]
        )
        for each, expected in zip(beside, plain, strict=False):
            assert each.output[: len(expected.token_ids)] == expected.token_ids
    assert copied > 0
    for each in plain:
        assert set(json.loads(each.text)) == {"name", "tags"}


def test_exact_mode(tmp_path: Path) -> None:
    bundle = build(
        "tiny", None, tmp_path / "bundle", no_drafter=True, block_size=4, exact=True, max_seq_len=256
    )
    with LLM(bundle.path, threads=1, max_batch_size=2) as llm:
        assert llm.exactness is not None
        asked = (
            [[5, 6, 7, 8, 9] * 6] * 2,
            [SamplingParams(max_tokens=24), SamplingParams(max_tokens=24, temperature=1, seed=1)],
        )
        plain = [each.token_ids for each in llm.generate(*asked, speculate=False)]
        answers = llm.generate(*asked)
        assert [each.token_ids for each in answers] == plain


@pytest.mark.parametrize("at", [5, 200])
def test_a_slot_serves_on_after_numbers_that_a_window_dropped(at: int, tmp_path: Path) -> None:
    """The last row of a prompt sees none of the spoilt one, and the target gives no hidden states. Still its request
    ends, and the next one in its slot is not spoilt.
    """
    window: dict[str, Any] = {"sliding_window": 20, "head_dim": 128, "layer_types": ["sliding_attention"] * 2}
    target = make_target(tmp_path / "target", favourites=6, layers=2, **window)
    spoil(target)
    bundle = build(str(target), None, tmp_path / "bundle", max_seq_len=400)
    bad = spoilt_prompt(257)
    bad[bad.index(SPOILT)], bad[at] = bad[at], SPOILT
    with LLM(bundle.path, threads=1, max_batch_size=1) as llm:
        alone = llm.generate(prompt(250, 4), PARAMS[0]).token_ids
        with pytest.raises(NonFiniteError):
            llm.generate(bad, PARAMS[0])
        assert llm.generate(prompt(250, 4), PARAMS[0]).token_ids == alone


def test_a_target_of_which_no_drafter_is_known_is_built_alone(tmp_path, capsys) -> None:
    target = make_target(tmp_path / "target", layers=2)
    out = tmp_path / "bundle"
    assert main(["build", "--target", str(target), "--engine", "onnxruntime", "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert "no drafter is known for it" in said.err
    assert "block 16" in said.out
    assert main(["inspect", str(out), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["drafter"] is None
    assert not {"mask_token_id", "target_layer_ids", "tree_width"} & set(shown)
    assert shown["parameters"] == Bundle.open(out).manifest["target"]["parameters"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"drafter": "tiny"}, "--drafter is tiny, and --no-drafter asks for none"),
        ({"block_size": 33}, r"--block-size is 33, expected 2..32 without a drafter"),
        ({"tree_width": 4}, "--tree-width is 4, but no drafter gives candidates"),
        ({"drafter_window": 64}, "--drafter-window is 64, but there is no drafter"),
        ({"draft_vocabulary": "tokens.json"}, "--draft-vocabulary is tokens.json, but there is no drafter"),
        ({"precision": Precision(drafter="int8")}, "--precision has drafter=int8, but there is no drafter"),
        ({"precision": Precision(head="int8")}, "--precision has head=int8, but there is no drafter"),
        ({"max_seq_len": 1 << 20}, r"--max-seq-len is 1048576, expected .* in the target$"),
    ],
)
def test_options_of_a_drafter_are_refused(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    drafter = options.pop("drafter", None)
    with pytest.raises(UsageError, match=said):
        build("tiny", drafter, tmp_path / "bundle", no_drafter=True, **options)
    assert not (tmp_path / "bundle").exists()


def test_a_state_limits_the_block(tmp_path: Path) -> None:
    target = make_hybrid(
        tmp_path / "target", num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]
    )
    assert read_target_config(target).delta_layers
    with pytest.raises(UsageError, match=r"--block-size is 17, expected 2..16"):
        build(str(target), None, tmp_path / "bundle", block_size=17)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("tiny", None, tmp_path_factory.mktemp("alone") / "bundle", no_drafter=True).path


def test_what_commands_say_of_it(tiny: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["verify", str(tiny), "--limit", "1", "--max-tokens", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["equal"]
    few = ["--concurrency", "1", "--requests", "2", "--max-tokens", "8"]
    assert main(["bench", str(tiny), *few, "--json"]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert [point["method"] for point in points] == ["plain", "draft", "adaptive"]
    assert all(point["draft_share"] == 0 for point in points)
    assert main(["generate", str(tiny), "-p", "one two one two one two", "--json"]) == 0
    statistics = json.loads(capsys.readouterr().out)["statistics"]
    assert statistics["num_lookup_draft_tokens"] == statistics["num_draft_tokens"]
    with pytest.raises(DFlashError, match="draft_source is drafter"), LLM(tiny) as llm:
        llm.generate("a", draft_source="drafter")


def test_a_plan_agrees_with_a_bundle(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["plan", "--target", "tiny", "--gpu", "h100", "--engine", "torch", "--no-drafter", "--json"])
        == 0
    )
    plan, manifest = json.loads(capsys.readouterr().out), Bundle.open(tiny).manifest
    sizes = {role: sum(kinds.values()) for role, kinds in manifest["target"]["weight_bytes"].items()}
    assert {role: sum(kinds.values()) for role, kinds in plan["weights"]["target"].items()} == sizes


def test_the_sum_of_a_row_tells_whether_its_numbers_are_finite(tiny: Path) -> None:
    with LLM(tiny, threads=1) as llm:
        pair: Any = llm.runtime.pair
        feeds = {"tokens": np.array([[4, 5, 6]]), "start": np.array([0]), "rows": np.array([[2]])}
        assert pair.target.run(feeds)["features"].shape == (1, 3, 1)
        cache = next(iter(pair.target.caches.arrays.values()))
        cache[...] = np.nan
        feeds = {"tokens": np.array([[7]]), "start": np.array([3]), "rows": np.array([[0]])}
        assert np.isnan(pair.target.run(feeds)["features"]).all()

"""`verify --widths`: it finds engines whose numbers depend on a pass, says where, and finds nothing in ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_trt import LLM, SamplingParams
from dflash_trt.building.build import build
from dflash_trt.building.exactness import Exactness
from dflash_trt.decoding.pair import Pair, PassRule
from dflash_trt.decoding.widths import KINDS, READ_AGAIN, Outcome, classes, measure
from dflash_trt.engines import registry
from dflash_trt.errors import UsageError
from dflash_trt.graph import onnxruntime as functions
from dflash_trt.hardware import cores
from dflash_trt.trtllm import TensorRTLLMOptions
from tests.doubles.checkpoints import VOCAB, make_drafter, make_target
from tests.doubles.commands import Command
from tests.doubles.family_checkpoints import make_gpt_oss
from tests.doubles.hybrid_checkpoints import DENSE, make_hybrid

SMALL: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
TARGETS: dict[str, Callable[[Path], Path]] = {
    "qwen3": partial(make_target, hidden=128, layers=2, heads=4, kv_heads=2),
    "gpt-oss": partial(make_gpt_oss, num_key_value_heads=2, **SMALL),
    "hybrid": partial(
        make_hybrid, architecture=DENSE, layer_types=["linear_attention", "full_attention"], **SMALL
    ),
}
PROMPTS = np.random.default_rng(0).integers(VOCAB, size=(2, 70)).tolist()


def bundle(tmp_path: Path, target: str = "qwen3") -> Path:
    made = TARGETS[target](tmp_path / "target")
    drafter = make_drafter(tmp_path / "drafter", made, layers=1, taps=(0, 1), block_size=4)
    return build(str(made), str(drafter), tmp_path / "bundle", max_seq_len=128).path


def measured(path: Path, widths: tuple[int, ...] = (1, 2, 4)) -> dict[str, Outcome]:
    with LLM(path, max_batch_size=3, prefill_chunk=64) as llm:
        outcomes = measure(llm.runtime.pair, PROMPTS, widths, 20, llm.bundle.manifest, locate=True)
        return {each.way.name: each for each in outcomes}


@pytest.mark.parametrize("target", TARGETS)
def test_all_agree_on_onnx_runtime(tmp_path: Path, target: str) -> None:
    outcomes = measured(bundle(tmp_path, target))
    assert {name: each.rows - each.equal for name, each in outcomes.items() if each.equal < each.rows} == {}
    assert classes(list(outcomes.values())) == [list(outcomes)]
    assert len(outcomes) == 16


def test_an_operator_that_rounds_one_row_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "GROUPED_ROWS", 0)  # each query head apart: the product of one row
    outcomes = measured(bundle(tmp_path))
    ours, others = classes(list(outcomes.values()))[:2]
    assert ours[0] == "width 1 again"
    assert {"width 2", "width 4"} <= set(others)
    wide = outcomes["width 4"]
    assert 0 < wide.largest < 1e-3
    assert wide.flips == wide.answers == 0
    assert wide.first.endswith(".1")  # layer 1's rows come from layer 0's attention


@pytest.mark.parametrize(
    ("lie", "different"),
    [
        (lambda tokens, slot: tokens.shape in ((1, 3), (1, 4)), {"width 4"}),  # kernels for groups of widths
        (lambda tokens, slot: len(tokens) > 1, {f"place {i} of 3, width {w}" for i in (1, 2, 3) for w in (1, 4)}),
        (lambda tokens, slot: slot > 0, {f"place {i} of 3, width {w}" for i in (2, 3) for w in (1, 4)}),
    ],
)  # fmt: skip
def test_lies_of_a_pass(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lie: Callable[[Any, int], bool],
    different: set[str],
) -> None:
    real = Pair.logits

    def logits(pair: Pair, tokens: Any, start: Any) -> Any:
        out = real(pair, tokens, start)
        for slot in range(len(tokens)):
            if lie(np.asarray(tokens), slot):
                best = out[slot].argmax(axis=-1)[:, None]
                np.put_along_axis(out[slot], best, -1.0, axis=-1)
        return out

    monkeypatch.setattr(Pair, "logits", logits)
    outcomes = measured(bundle(tmp_path))
    wrong = {
        name for name, each in outcomes.items() if each.equal < each.rows and not name.startswith("random")
    }
    assert wrong == different
    some = outcomes[min(different)]
    assert some.flips == len(some.margins) > 0
    assert some.answers == 2
    assert some.first == "the logits: all cache rows agree"


def test_the_command(tmp_path: Path, command: Command) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "a b c"}) + "\n")
    asked = ("verify", bundle(tmp_path), "--prompts", prompts, "--max-tokens", "8", "--widths")
    shown = command(*asked)
    assert (shown.code, "all equal" in shown.out) == (0, True)
    found = command(*asked, "2,3", "--json").json
    assert found["equal"]
    assert [each["way"] for each in found["ways"][:3]] == ["width 1 again", "width 2", "width 3"]
    for wrong, message in (("5", "--widths"), ("2,3 --context 4000", "the longest prompt leaves -")):
        refused = command(*asked, *wrong.split())
        assert (refused.code, message in refused.err) == (2, True)


def test_trees_move_rows(tmp_path: Path) -> None:
    """The accepted rows were beside others when they were computed, so the last bits differ, and no more."""
    made = TARGETS["qwen3"](tmp_path / "target")
    drafter = make_drafter(tmp_path / "drafter", made, layers=1, taps=(0, 1), block_size=8)
    path = build(str(made), str(drafter), tmp_path / "bundle", max_seq_len=128, tree_width=4).path
    outcomes = measured(path, (1, 8))
    tree = outcomes.pop("trees of 8 nodes")
    assert tree.rows == outcomes["width 8"].rows
    assert tree.largest < 1e-4
    assert tree.flips == 0
    assert all(each.equal == each.rows for each in outcomes.values())


def test_a_prompt_without_room(tmp_path: Path) -> None:
    with LLM(bundle(tmp_path)) as llm, pytest.raises(UsageError, match="leaves 1 tokens"):
        list(measure(llm.runtime.pair, [[1] * 127], (1, 2), 8, llm.bundle.manifest))


@pytest.mark.parametrize("target", TARGETS)
def test_padded_passes_keep_the_bits(tmp_path: Path, target: str) -> None:
    """Copies of the last row change no row before them, no window and no state."""
    path = bundle(tmp_path, target)
    with LLM(path, max_batch_size=2, prefill_chunk=64) as llm:
        pair, manifest = llm.runtime.pair, llm.bundle.manifest
        free = list(measure(pair, PROMPTS, (1, 2, 4), 20, manifest))
        pair.rule = PassRule((3, 4))
        assert [each.digest for each in measure(pair, PROMPTS, (1, 2, 4), 20, manifest)] == [
            each.digest for each in free
        ]


def test_exact_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where one row is rounded otherwise, plain passes get two, once that is known."""
    monkeypatch.setenv("DFLASH_TRT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(functions, "GROUPED_ROWS", 0)
    path = bundle(tmp_path)
    with LLM(path) as llm:
        assert llm.exactness is None
    with LLM(path, exact=True) as llm:
        found, pair = llm.exactness, llm.runtime.pair
        assert found is not None
        assert found.rule == pair.rule == PassRule((2, 3, 4))
        assert not found.flips < 0 < found.cost
        plain, drafted = (
            llm.generate([PROMPTS[0]], SamplingParams(max_tokens=12), speculate=each)[0].token_ids
            for each in (False, True)
        )
        assert plain == drafted
    assert "(once)" in capsys.readouterr().err
    with LLM(path, exact=True) as llm:
        assert llm.exactness == found
    with LLM(path, exact=False) as llm:
        assert llm.exactness is None
    assert capsys.readouterr().err == ""
    (kept,) = (tmp_path / "cache" / "exact").iterdir()
    kept.write_text("{}")
    with LLM(path, exact=True) as llm:
        assert llm.exactness is not None
    assert json.loads(kept.read_text())["found"]["rule"]["widths"] == [2, 3, 4]


def test_what_is_known_to_cost_nothing_is_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_TRT_CACHE", str(tmp_path / "cache"))
    path = bundle(tmp_path)
    with LLM(path, exact=True) as llm:
        known = llm.exactness
        assert known is not None
        assert known.rule == PassRule((1, 2, 3, 4))
        assert known.free
    with LLM(path) as llm:
        assert llm.exactness == known
    with LLM(path, max_batch_size=7) as llm:
        assert llm.exactness == known
    with monkeypatch.context() as patch:  # another tile of a product adds in another order
        patch.setattr(Pair, "products", ("a tile",))
        with LLM(path) as llm:
            assert llm.exactness is None
    # Only eight sequences were measured, in passes of other lengths, and by other threads.
    for other in ({"max_batch_size": 9}, {"prefill_chunk": 64}, {"threads": 1 + (cores() or 1)}):
        with LLM(path, **other) as llm:
            assert llm.exactness is None


def test_a_warning_says_where_drafts_may_change_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Until exact mode was measured, and after it if it costs something; never where rows agree by themselves."""
    monkeypatch.setenv("DFLASH_TRT_CACHE", str(tmp_path / "cache"))
    path = bundle(tmp_path)
    LLM(path).close()
    assert not caplog.messages
    find = registry.find
    monkeypatch.setattr(registry, "find", lambda name: replace(find(name), equal_rows=False))
    LLM(path).close()
    assert "two logits are nearly equal; `dflash-trt verify BUNDLE --widths` measures" in caplog.messages[-1]
    caplog.clear()
    LLM(path, exact=True).close()
    LLM(path).close()
    assert not caplog.messages
    monkeypatch.setattr(Exactness, "free", False)
    LLM(path).close()
    assert "exact mode prevents that (every pass agrees; a plain pass takes 1.00" in caplog.messages[-1]


def test_kernels_with_equal_rows_leave_exact_mode_prompts_and_trees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A look at a few passes tells once whether the device agrees. If not, all is as where nothing is known of rows."""
    monkeypatch.setenv("DFLASH_TRT_CACHE", str(tmp_path / "cache"))
    find, fed = registry.find, list[Any]()
    monkeypatch.setattr(registry, "find", lambda name: replace(find(name), equal_rows=False))
    monkeypatch.setattr(Pair, "equal_rows", True)
    ways, path = measure, bundle(tmp_path)

    def watched(*given: Any, **options: Any) -> Any:
        fed.append((len(given[2]), options["kinds"]))
        return ways(*given, **options)

    monkeypatch.setattr("dflash_trt.building.exactness.measure", watched)
    for _ in range(2):
        LLM(path).close()
        assert not caplog.messages
    (kept,) = (tmp_path / "cache" / "rows").iterdir()
    assert json.loads(kept.read_text())["equal"]
    with LLM(path, exact=True) as llm:
        assert llm.exactness is not None
        assert llm.exactness.rule == PassRule(())
        assert llm.exactness.describe().startswith("every pass agrees")
    monkeypatch.setattr(functions, "GROUPED_ROWS", 0)
    other = bundle(tmp_path / "other")
    LLM(other).close()
    assert "two logits are nearly equal" in caplog.messages[-1]
    with LLM(other, exact=True) as llm:
        assert llm.exactness is not None
        assert llm.exactness.rule == PassRule((2, 3, 4))
    look = 2, ("widths", "batches")
    assert fed == [look, (4, READ_AGAIN), look, (4, KINDS)]


def test_a_bundle_built_to_be_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_TRT_CACHE", str(tmp_path / "cache"))
    made = TARGETS["qwen3"](tmp_path / "target")
    drafter = make_drafter(tmp_path / "drafter", made, layers=1, taps=(0, 1), block_size=4)
    path = build(str(made), str(drafter), tmp_path / "b", max_seq_len=128, tree_width=4, exact=True).path
    with LLM(path) as llm:
        assert llm.exactness is not None
        assert llm.exactness.rule == PassRule((1, 2, 3, 4), any_tree=False)
        assert "chains only" in llm.exactness.describe()
        assert llm.most_tree_nodes == 0
        with pytest.raises(UsageError, match="without exact"):
            llm.generate([1, 2, 3], SamplingParams(max_tokens=8), tree_nodes=3)
        assert llm.generate([1, 2, 3], SamplingParams(max_tokens=8)).token_ids
    with LLM(path, exact=False) as llm:
        assert llm.most_tree_nodes > 0
    options = TensorRTLLMOptions(gpu="h100")
    with pytest.raises(UsageError, match="--exact"):
        build(str(made), str(drafter), tmp_path / "other", engine="tensorrt-llm", options=options, exact=True)

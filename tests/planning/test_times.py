"""The time model, compared with published throughputs, and the curves that are drawn from it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from build_scripts.bench.fit_times import Table, inventory, pass_errors, speedup_errors, speedups
from dflash_trt.cli import main
from dflash_trt.errors import BuildError, RequestError
from dflash_trt.planning import acceptance as lengths
from dflash_trt.planning import times
from dflash_trt.planning.acceptance import Acceptance
from dflash_trt.planning.curve import MOST_REQUESTS, PLAIN, Curves, compute_curves
from dflash_trt.planning.gpus import find_gpu
from dflash_trt.planning.memory import estimate_memory
from dflash_trt.planning.settings import Settings
from dflash_trt.planning.work import work_of

CARD = ["--target", "gpt-oss-120b", "--gpu", "b200", "--engine", "tensorrt-llm"]


@pytest.fixture(scope="module")
def table() -> Table:
    return Table()


def curves(pair: str, blocks: tuple[int, ...], **values: Any) -> Curves:
    acceptance = lengths.published(pair)
    assert acceptance is not None
    base: dict[str, Any] = {"engine": "tensorrt-llm", "gpu": find_gpu("b200"), "max_seq_len": 2048}
    settings = Settings(**base | {"max_batch_size": 1, "block_size": 10} | values)
    return compute_curves(inventory(pair), settings, acceptance, name=pair, context=2048, blocks=blocks)


def test_published_throughputs_are_met(table: Table) -> None:
    errors = np.abs(table.errors(times.built_in()))
    assert len(errors) == 70
    assert (errors < 0.2).sum() >= 60
    assert np.median(errors) < 0.08
    assert np.median(errors) == pytest.approx(times.MEDIAN_ERROR, abs=0.002)  # as `plan` says


def test_constants_of_one_half_meet_the_other_half(table: Table) -> None:
    for first in (0, 1):
        fitted = table.fit(table.points[first::2])
        errors = np.abs(table.errors(fitted, table.points[1 - first :: 2]))
        assert (errors < 0.2).mean() > 0.8
        assert np.median(errors) < 0.08


def test_times_are_given_where_published_tables_confirm_them_and_nowhere_else() -> None:
    """A median error of 15% is the limit, on the kind of GPU and for the kinds of targets that `plan --curve` takes."""
    confirmed, refused = [], dict[str, list[float]]()
    for tables, errors_of in ((speedups(), speedup_errors), (lengths.figures()["steps"], pass_errors)):
        for table in tables:
            error, hybrid = (
                float(np.median(np.abs(errors_of(table)))),
                inventory(table["pair"]).target.delta_layers,
            )
            if table["gpu"] == times.GPU and not hybrid:
                confirmed.append(error)
            else:
                refused.setdefault("hybrid" if hybrid else table["gpu"], []).append(error)
    assert len(confirmed) == 4
    assert max(confirmed) < 0.155
    assert refused.keys() == {"h200", "b300", "hybrid"}
    assert all(max(errors) > 0.25 for errors in refused.values())


def test_work_is_that_of_the_published_models() -> None:
    """Bytes of cache per token in BF16, with the layers that a window limits to 128 tokens."""
    gpu = find_gpu("b200")
    target = work_of(inventory("gpt-oss-120b"), "target", gpu)
    assert target.cache_bytes(1) == 73_728
    assert target.cache_bytes(1128) - target.cache_bytes(128) == 36_864 * 1000
    assert target.experts * target.expert_bytes == pytest.approx(114.7e9 * 4.25 / 8, rel=0.01)
    assert work_of(inventory("qwen3-8b"), "target", gpu).cache_bytes(1) == 147_456
    dense = work_of(inventory("qwen3-8b"), "target", gpu)
    assert dense.dense_bytes == pytest.approx(2 * 7.57e9, rel=0.01)  # without the embedding
    drafter = work_of(inventory("qwen3-8b"), "drafter", gpu)
    assert (
        drafter.dense_bytes > 2 * inventory("qwen3-8b").target.vocab_size * 4096
    )  # it runs the target's head


def test_rows_reach_experts_as_draws_do() -> None:
    target = work_of(inventory("gpt-oss-120b"), "target", find_gpu("b300"))
    found = [round(times.experts_reached(target, rows)) for rows in (1, 8, 16, 32, 64)]
    assert found == [4, 29, 51, 82, 111]


def test_a_pass_takes_longer_with_more_of_anything() -> None:
    gpu, constants = find_gpu("b300"), times.built_in()
    for pair in ("gpt-oss-120b", "qwen3-8b"):
        work = work_of(inventory(pair), "target", gpu)
        base: dict[str, Any] = {"requests": 4, "width": 4, "context": 1000}
        seconds = times.pass_seconds(work, gpu, constants, **base)
        for more in ({"requests": 8}, {"width": 8}, {"context": 8000}):
            assert times.pass_seconds(work, gpu, constants, **base | more) > seconds
        slower = replace(constants, layer_seconds=2 * constants.layer_seconds)
        gained = times.pass_seconds(work, gpu, slower, **base) - seconds
        assert gained == pytest.approx(work.layers * constants.layer_seconds)


def test_points_are_those_of_the_published_tables(table: Table) -> None:
    """The same pair, context and batches as a row of the table give its throughputs by the model."""
    found = curves("qwen3-8b", (16,), block_size=16)
    near = compute_curves(
        inventory("qwen3-8b"),
        Settings(engine="tensorrt", gpu=table.gpu, max_seq_len=8192, max_batch_size=1, block_size=16),
        Acceptance({16: 6.5}, "test"),
        name="qwen3-8b",
        context=table.context,
        blocks=(16,),
    )
    for point in table.points:
        if (point.pair, point.task) == ("qwen3-8b", "HumanEval"):
            method = PLAIN if point.acceptance is None else "block 16"
            (drawn,) = (p for p in near.points[method] if p.batch == point.requests)
            assert drawn.throughput == pytest.approx(table.throughput(point, times.built_in()))
            assert drawn.speed * drawn.batch == pytest.approx(drawn.throughput)
    for points in found.points.values():
        assert [p.batch for p in points] == [1, 2, 4, 8, 16, MOST_REQUESTS]
        assert [p.speed for p in points] == sorted((p.speed for p in points), reverse=True)


def test_batches_fill_the_memory_and_no_more() -> None:
    """A GPU with little room: the largest batch is that of the memory plan."""
    gpu = replace(find_gpu("b200"), memory_bytes=24 << 30)
    found = curves("qwen3-8b", (16,), gpu=gpu, block_size=16, engine="tensorrt")
    room = Settings(engine="tensorrt", gpu=gpu, max_seq_len=2048, max_batch_size=1, block_size=16)
    most = estimate_memory(inventory("qwen3-8b"), room).largest_batch
    assert found.points[PLAIN][-1].batch <= most < 2 * found.points[PLAIN][-1].batch <= MOST_REQUESTS
    with pytest.raises(BuildError, match="lower --context"):
        curves("qwen3-8b", (16,), gpu=replace(gpu, memory_bytes=8 << 30), block_size=16)


def test_acceptance_between_and_beyond_known_lengths() -> None:
    table = Acceptance({4: 3.1, 8: 4.1}, "test")
    assert table.length(4) == 3.1
    assert table.length(6) == pytest.approx(3.6)
    assert 1 < table.length(2) < table.length(3) < 3.1
    assert 4.1 < table.length(16) < 8
    chance = table.length(2) - 1  # of the first draft, and of each one behind an accepted one
    assert sum(chance**place for place in range(4)) == pytest.approx(3.1)


def test_acceptance_is_read_from_an_evaluation(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    file.write_text(json.dumps({"all": {"acceptance_by_place": [0.5, 0.25, 0.1]}}))
    assert lengths.parse(str(file)).lengths == pytest.approx({2: 1.5, 3: 1.75, 4: 1.85})
    file.write_text(json.dumps({"all": {}}))
    with pytest.raises(RequestError, match="train evaluate --json"):
        lengths.parse(str(file))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("4", "not BLOCK=TOKENS"),
        ("4=x", "not BLOCK=TOKENS"),
        ("1=1", "2 rows or more"),
        ("4=5", "2 rows or more"),
    ],
)
def test_acceptance_that_cannot_be_is_refused(text: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        lengths.parse(text)


def test_the_command_shows_speeds_and_draws_them(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    svg = tmp_path / "curve.svg"
    assert main(["plan", "--curve", *CARD, "--svg", str(svg)]) == 0
    text = capsys.readouterr().out
    for part in ("a model, not a measured curve", "tokens/s of one user", "tokens/s of the GPU", "block 6"):
        assert part in text
    assert max(map(len, text.splitlines())) <= 110
    assert "<svg" in svg.read_text()
    assert main(["plan", "--curve", "--json", *CARD, "--blocks", "2,10"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["points"]) == {PLAIN, "block 2", "block 10"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([*CARD, "--blocks", "4"], "--blocks: only with --curve"),
        ([*CARD, "--context", "4"], "--context: only with --curve"),
        ([*CARD, "--curve", "--blocks", "11"], "trained for blocks of 10"),
        ([*CARD, "--curve", "--acceptance", "16=5"], "--acceptance has 16: the drafter was trained for blocks"),
        ([*CARD, "--curve", "--tp", "4", "--max-seq-len", "99"], "--tp, --max-seq-len: not with --curve"),
        (
            ["--curve", "--target", "qwen3-8b", "--gpu", "h200"],
            "--gpu h200: --curve has times for b200 only, where they agree with published tables; .* measure on the "
            "machine itself with `dflash-trt bench`",
        ),
        (["--curve", "--target", "qwen3-8b", "--gpu", "memory=24,bandwidth=1008,sm=89"], "for b200 only"),
        (["--curve", "--target", "qwen3.5-9b", "--gpu", "b200"], "leaves out the states of recurrent layers"),
        (
            ["--curve", "--target", "qwen3-8b", "--gpu", "b200", "--precision", "target=fp8"],
            "BF16 and of experts in MXFP4 only, .* not of fp8",
        ),
        (["--curve", "--target", "qwen3-8b", "--gpu", "b200", "--engine", "onnxruntime"], "not of fp32, int8"),
    ],
)  # fmt: skip
def test_wrong_options_are_refused(capsys: pytest.CaptureFixture[str], options: list[str], said: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *options])
    assert ended.value.code == 2
    assert re.search(said, capsys.readouterr().err)


def test_an_engine_that_builds_nothing_for_the_gpu_has_no_curve(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--curve", "--target", "qwen3-8b", "--gpu", "b200", "--engine", "tensorrt-rtx"]
    assert main(["plan", *words]) == 1
    assert "a build for b200 is refused" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("pair", "source", "expected"),
    [
        ("gpt-oss-20b", "Table 11", {8: 4.3}),
        ("qwen3.5-4b", "Table 11", {16: 7.3}),
        ("qwen3.5-9b", "Table 11", {16: 7.9}),
        ("qwen3.5-27b", "Table 11", {16: 9.1}),
        ("qwen3.5-35b-a3b", "Table 11", {16: 7.9}),
        ("qwen3-coder-next", "Table 11", {16: 7.2}),
        ("qwen3-4b", "Table 3", {16: 6.63}),
        ("gpt-oss-120b", "model card", {4: 3.1, 6: 3.8, 10: 4.4}),
    ],
)
def test_published_acceptance_is_found(
    pair: str, source: str, expected: dict[int, float], capsys: pytest.CaptureFixture[str]
) -> None:
    found = lengths.published(pair)
    assert found is not None
    assert found.lengths == expected
    assert source in found.source
    if inventory(pair).target.delta_layers:
        return
    assert main(["plan", "--curve", "--target", pair, "--gpu", "b200", "--engine", "tensorrt"]) == 0
    assert f"acceptance: {found.source}" in " ".join(capsys.readouterr().out.split())


def test_each_published_figure_stands_once() -> None:
    tables = lengths.figures()["tables"]
    assert len({table["source"] for table in tables}) == len(tables)
    for table in tables:
        rows = [(row["pair"], row["task"], row["block"]) for row in table["rows"]]
        assert len(set(rows)) == len(rows)
        for row in table["rows"]:
            for key in {"plain", "drafted", "speedup"} & set(row):
                assert len(row[key]) == len(table["requests"])


def test_a_pair_without_a_published_acceptance_needs_one(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ["plan", "--curve", "--target", "tiny", "--gpu", "b200"]
    with pytest.raises(SystemExit) as ended:
        main(tiny)
    assert ended.value.code == 2
    assert "give --acceptance" in capsys.readouterr().err
    assert main([*tiny, "--acceptance", "8=6.5"]) == 0
    assert main(["plan", "--curve", "--target", "Qwen/Qwen3-8B", "--gpu", "b200"]) == 0  # by its repository
    assert "Table 3" in capsys.readouterr().out

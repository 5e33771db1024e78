"""The time model, compared with published throughputs, and the curves that are drawn from it."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from build_scripts.bench.fit_times import Table
from dflash_trt.checkpoint.catalogue import known_configs
from dflash_trt.cli import main
from dflash_trt.errors import BuildError, RequestError
from dflash_trt.models.configs import read_drafter_config, read_target_config
from dflash_trt.models.inventory import Inventory, take_inventory
from dflash_trt.planning import acceptance as lengths
from dflash_trt.planning import times
from dflash_trt.planning.acceptance import Acceptance
from dflash_trt.planning.curve import CHAIN, PLAIN, Curves, compute_curves
from dflash_trt.planning.gpus import find_gpu
from dflash_trt.planning.layouts import model_layouts
from dflash_trt.planning.memory import Settings
from dflash_trt.planning.work import work_of

CARD = ["--target", "gpt-oss-120b", "--gpu", "b300", "--engine", "tensorrt-llm"]


@pytest.fixture(scope="module")
def table() -> Table:
    return Table()


@cache
def inventory(pair: str) -> Inventory:
    target, drafter = known_configs(pair)
    return take_inventory(read_target_config(target), read_drafter_config(drafter))


def curves(pair: str, blocks: tuple[int, ...], given: Acceptance | None = None, **values: Any) -> Curves:
    known, chain = lengths.published(pair)
    wanted = given or known
    assert wanted is not None
    base: dict[str, Any] = {"engine": "tensorrt-llm", "gpu": find_gpu("b300"), "max_seq_len": 2048}
    settings = Settings(**base | {"max_batch_size": 1, "block_size": 10} | values)
    return compute_curves(
        model_layouts(inventory(pair), settings, name=pair, context=2048),
        wanted,
        name=pair,
        place="b300",
        times="the model",
        context=2048,
        blocks=blocks,
        chain=chain,
    )


@pytest.fixture(scope="module")
def published() -> Curves:
    return curves("gpt-oss-120b", (4, 6, 8, 10))


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
    halves = work_of(inventory("qwen3-8b"), "target", gpu, gpus=2)
    assert halves.dense_bytes == pytest.approx(dense.dense_bytes / 2, rel=0.01)
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
        for gpus in (1, 8):
            work = work_of(inventory(pair), "target", gpu, gpus=gpus)
            base: dict[str, Any] = {"requests": 4, "width": 4, "context": 1000}
            seconds = times.pass_seconds(work, gpu, constants, **base)
            for more in ({"requests": 8}, {"width": 8}, {"context": 8000}):
                assert times.pass_seconds(work, gpu, constants, **base | more) > seconds
            slower = replace(constants, layer_seconds=2 * constants.layer_seconds)
            gained = times.pass_seconds(work, gpu, slower, **base) - seconds
            assert gained == pytest.approx(work.layers * constants.layer_seconds)


def test_the_published_15x_is_a_slice_near_the_top_speed_of_plain_decoding(published: Curves) -> None:
    top = published.fastest(PLAIN).speed

    def ratio(share: float) -> float:
        plain, block = published.best(PLAIN, share * top), published.best_block(share * top)
        assert plain is not None
        assert block is not None
        return block.throughput / plain.throughput

    assert 10 < ratio(0.80) < 20
    assert 10 < ratio(0.85) < 20
    assert ratio(0.25) < 6
    assert published.best(PLAIN, 1.01 * top) is None
    assert published.best_block(1.5 * top) is not None
    alone = published.same_batch("block 10", 1)
    assert alone is not None
    assert 1.8 < alone < 2.5  # "more than doubles"
    chain = published.best(CHAIN, 0.8 * top)
    block = published.best_block(0.8 * top)
    assert chain is not None
    assert block is not None
    assert chain.throughput < block.throughput


def test_a_frontier_has_no_point_that_another_one_beats(published: Curves) -> None:
    for method in published.points:
        points = published.frontier(method)
        assert [p.speed for p in points] == sorted(p.speed for p in points)
        assert [p.throughput for p in points] == sorted((p.throughput for p in points), reverse=True)
        assert points[-1].speed == published.fastest(method).speed
        for point in published.points[method]:
            assert any(p.speed >= point.speed and p.throughput >= point.throughput for p in points)
        for share in (0.3, 0.6):
            speed = share * points[-1].speed
            best = published.best(method, speed)
            assert best is not None
            assert best.speed >= speed
            assert best.throughput == max(p.throughput for p in published.points[method] if p.speed >= speed)


def test_batches_fill_the_memory_and_no_more() -> None:
    """A GPU with little room: the largest batch is that of the memory plan."""
    gpu = replace(find_gpu("b300"), memory_bytes=24 << 30, gpus_per_node=1)
    found = curves("qwen3-8b", (16,), gpu=gpu, block_size=16, engine="tensorrt")
    most = max(point.batch for point in found.points[PLAIN])
    assert 1 < most < 64
    with pytest.raises(BuildError, match="lower --context"):
        curves("qwen3-8b", (16,), gpu=replace(gpu, memory_bytes=8 << 30), block_size=16)
    with pytest.raises(BuildError, match="no peak rate for BF16"):
        curves("qwen3-8b", (16,), gpu=replace(gpu, dense_flops={}), block_size=16)


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


def test_the_command_shows_ratios_of_all_three_kinds(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    svg = tmp_path / "curve.svg"
    assert main(["plan", "--curve", *CARD, "--svg", str(svg)]) == 0
    text = capsys.readouterr().out
    for part in (
        "a model, not a measured curve",
        "(80%)",
        "at the same speed",
        "at the same batch",
        "EAGLE-3",
    ):
        assert part in text
    assert "<svg" in svg.read_text()
    assert main(["plan", "--curve", "--json", *CARD, "--blocks", "4,10"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["points"]) == {PLAIN, "block 4", "block 10", CHAIN}


def test_the_command_counts_users_at_a_speed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--speed", "80", "--json", *CARD]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["drafted"]["users"] == found["users"] > found["plain"]["users"] > 0
    assert found["drafted"]["tokens_per_second"] >= 80
    assert main(["plan", "--speed", "80", *CARD]) == 0
    assert f"{found['users']} users" in capsys.readouterr().out
    assert main(["plan", "--speed", "5000", *CARD]) == 1
    assert "no setting reaches 5000" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--blocks", "4"], "only with --curve, --speed or --slo"),
        (["--speed", "0"], "not above 0"),
        (["--curve", "--blocks", "11"], "trained for blocks of 10"),
        (["--curve", "--tp", "4", "--max-seq-len", "99"], "--tp, --max-seq-len: not with --curve"),
    ],
)
def test_wrong_options_are_refused(capsys: pytest.CaptureFixture[str], options: list[str], said: str) -> None:
    with pytest.raises(SystemExit):
        main(["plan", *CARD, *options])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("pair", "source", "expected"),
    [
        ("gpt-oss-20b", "Table 11", {8: 4.3}),
        ("qwen3.5-4b", "Table 11", {16: 7.3}),
        ("qwen3.5-9b", "Table 11", {16: 7.9}),
        ("qwen3.5-27b", "Table 11", {16: 9.1}),
        ("qwen3.5-35b-a3b", "Table 11", {16: 7.9}),
        ("qwen3-coder-next", "Table 11", {16: 7.2}),
        ("qwen3.8-27b", "inco.ai/blog/dflash2", {8: 4.8}),
        ("qwen3-4b", "Table 3", {16: 6.63}),
        ("gpt-oss-120b", "model card", {4: 3.1, 6: 3.8, 10: 4.4}),
    ],
)
def test_published_acceptance_is_found(
    pair: str, source: str, expected: dict[int, float], capsys: pytest.CaptureFixture[str]
) -> None:
    found, _ = lengths.published(pair)
    assert found is not None
    assert found.lengths == expected
    assert source in found.source
    assert main(["plan", "--curve", "--target", pair, "--gpu", "b200", "--engine", "tensorrt"]) == 0
    assert f"acceptance: {found.source}" in " ".join(capsys.readouterr().out.split())


def test_each_published_figure_stands_once() -> None:
    tables = lengths.figures()["tables"]
    assert len({table["source"] for table in tables}) == len(tables)
    for table in tables:
        rows = [(row["pair"], row.get("method"), row.get("task"), row.get("block")) for row in table["rows"]]
        assert len(set(rows)) == len(rows)
        for row in table["rows"]:
            for key in {"plain", "drafted", "speedup"} & set(row):
                assert len(row[key]) == len(table["requests"])


def test_a_pair_without_a_published_acceptance_needs_one(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ["plan", "--curve", "--target", "tiny", "--gpu", "h100"]
    with pytest.raises(SystemExit) as ended:
        main(tiny)
    assert ended.value.code == 2
    assert "give --acceptance" in capsys.readouterr().err
    assert main([*tiny, "--acceptance", "8=6.5"]) == 0
    assert main(["plan", "--curve", "--target", "Qwen/Qwen3-8B", "--gpu", "h100"]) == 0  # by its repository
    assert "Table 3" in capsys.readouterr().out

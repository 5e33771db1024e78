"""The benchmark's loads, figures, table, JSON and plot, for small random pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash_trt.building.build import build
from dflash_trt.decoding.params import RequestOptions
from dflash_trt.errors import DFlashError
from dflash_trt.reports import plots
from dflash_trt.reports.benchmark import Load, Method, MethodPoint, bench
from dflash_trt.runtime import Runtime
from tests.doubles.checkpoints import make_drafter, make_target
from tests.doubles.commands import Command
from tests.doubles.kind_checkpoints import make_eagle3


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A DFlash drafter and an EAGLE-3 drafter of one target."""
    directory = tmp_path_factory.mktemp("bench")
    target = make_target(directory / "target", favourites=6, layers=6, dtype="float32")
    drafters = [make_drafter(directory / "drafter", target), make_eagle3(directory / "eagle", target)]
    return [
        build(str(target), str(drafter), directory / name, max_seq_len=512, tree_width=2).path
        for drafter, name in zip(drafters, ("dflash", "eagle3"), strict=True)
    ]


@pytest.fixture(scope="module")
def bundle(bundles: list[Path]) -> Path:
    return bundles[0]


@pytest.fixture
def runtime(bundle: Path) -> Any:
    made = Runtime(bundle, max_batch_size=4, prefill_chunk=64, prefix_cache_bytes=0, threads=1, check="size")
    yield made
    made.scheduler.close()


def points(runtime: Runtime, *loads: Load, **options: Any) -> dict[tuple[str, str], MethodPoint]:
    ways = {"plain": RequestOptions(speculate=False), "fixed": RequestOptions(block_length=4)}
    prompts = [[i, 7, 9] for i in range(5)]
    methods = [Method("b", name, runtime, prompts, runtime.lengths(way)) for name, way in ways.items()]
    return {
        (point.load.name, point.method.name): point
        for points in bench(methods, loads, **options)
        for point in points
    }


def test_every_method_serves_the_same_requests(runtime: Runtime) -> None:
    found = points(runtime, Load(1), Load(3), requests=13, max_tokens=12)
    assert list(found) == [("1", "plain"), ("1", "fixed"), ("3", "plain"), ("3", "fixed")]
    plain = found["1", "plain"]
    assert len(plain.outputs) == 13
    for point in found.values():
        assert [r.prompt[0] for r in point.requests] == [i % 5 for i in range(13)]
        assert point.outputs == plain.outputs
        assert len(point.latencies) == 13
    figures = plain.to_dict()
    assert figures["output_tokens"] == sum(map(len, plain.outputs))
    assert figures["tokens_per_second"] == pytest.approx(figures["output_tokens"] / plain.seconds, abs=0.1)
    assert figures["block_length_histogram"] == [0, figures["output_tokens"] - 13]
    assert figures["tokens_per_pass"] == 1
    times = [r.statistics.time_per_output_token for r in plain.requests]
    ranked = sorted(
        1e3 * each for each in times
    )  # 13: the 7th, 12th and 13th are those that so many do not exceed
    of_times = [figures["tpot_ms"][name] for name in ("p50", "p90", "p99")]
    assert of_times == pytest.approx([ranked[6], ranked[11], ranked[12]], abs=1e-3)
    fixed = found["3", "fixed"].to_dict()
    assert fixed["tokens_per_pass"] > 1
    assert len(fixed["block_length_histogram"]) == 5
    assert 0 < fixed["host_share"] < 1


def test_a_closed_loop_keeps_so_many_requests_in_flight(runtime: Runtime, monkeypatch: Any) -> None:
    scheduler, seen = runtime.scheduler, list[int]()
    step = scheduler.step

    def watched(lengths: Any) -> Any:
        seen.append(len(scheduler.active) + len(scheduler.waiting))
        return step(lengths)

    monkeypatch.setattr(scheduler, "step", watched)
    points(runtime, Load(3), requests=12, max_tokens=8)
    assert max(seen) == 3
    assert seen.count(3) > len(seen) / 2


def test_an_open_loop_counts_from_the_arrival(runtime: Runtime) -> None:
    found = points(runtime, Load(2, rate=400.0), requests=8, max_tokens=8)
    point = found["400/s", "fixed"]
    arrivals = [r.arrived for r in point.requests]
    assert arrivals == sorted(arrivals)
    assert len(set(arrivals)) == 8
    plain = [
        r.arrived - found["400/s", "plain"].requests[0].arrived for r in found["400/s", "plain"].requests
    ]
    assert [r.arrived - arrivals[0] for r in point.requests] == pytest.approx(plain)
    assert point.to_dict()["concurrency"] is None
    assert point.to_dict()["rate"] == 400


def test_the_command(bundle: Path, tmp_path: Path, command: Command) -> None:
    plotted = tmp_path / "load.png"
    loads = ("--requests", "6", "--max-tokens", "8", "--concurrency", "1,2", "--rate", "300")
    options = ("bench", bundle, *loads, "--plot", plotted, "--block-length", "5")
    shown = command(*options)
    assert shown.code == 0
    lines = shown.out.splitlines()
    assert "tokens of the methods: all equal" in lines
    assert max(map(len, lines)) <= 100  # times of a busy machine are wide
    assert [line.split()[:2] for line in lines[6:]] == [
        [load, method] for load in ("1", "2", "300/s") for method in ("plain", "draft", "adaptive", "tree")
    ]
    loads_shown = [line for line in shown.err.splitlines() if "warning" not in line]
    assert loads_shown == [f"load {load} ..." for load in ("1", "2", "300/s")]
    assert plotted.read_bytes().startswith(b"\x89PNG")
    document = command(*options, "--json").json
    assert document["same_tokens"] is True
    assert document["bundles"][str(bundle)]["fixed_block_length"] == 5
    points = [(point["concurrency"], point["rate"]) for point in document["points"][::4]]
    assert points == [(1, None), (2, None), (None, 300)]


def test_several_bundles_take_turns_and_share_one_table(bundles: list[Path], command: Command) -> None:
    asked = ("--requests", "4", "--max-tokens", "12", "--concurrency", "2", "--methods", "plain,draft")
    document = command("bench", *bundles, *asked, "--json").json
    points = document["points"]
    expected = [(str(path), method) for path in bundles for method in ("plain", "draft")]
    assert [(p["bundle"], p["method"]) for p in points] == expected
    assert document["same_tokens"]
    assert len({p["output_tokens"] for p in points}) == 1
    drafted = {p["bundle"]: p["tokens_per_pass"] for p in points if p["method"] == "draft"}
    assert drafted[str(bundles[0])] > 1
    rows = [line.split()[:3] for line in command("bench", *bundles, *asked).out.splitlines()[-4:]]
    assert rows == [["2", *each] for each in expected]
    assert command("bench", bundles[0], bundles[0]).code == 2


def test_a_plot_is_refused_before_the_work(bundle, tmp_path, monkeypatch, command) -> None:
    for wrong in ("missing/load.svg", "load.xyz"):
        refused = command("bench", bundle, "--plot", tmp_path / wrong)
        assert (refused.code, f"--plot {tmp_path / wrong}: " in refused.err) == (1, True)
    monkeypatch.setattr(plots, "available", lambda: False)
    with pytest.raises(DFlashError, match="matplotlib"):
        plots.check(tmp_path / "load.svg")


def test_the_cost_of_exact_mode(bundle, tmp_path, monkeypatch, command) -> None:
    monkeypatch.setenv("DFLASH_TRT_CACHE", str(tmp_path))
    asked = ("bench", bundle, "--exact", "--requests", "2", "--max-tokens", "4", "--concurrency", "1")
    lines = command(*asked).out.splitlines()
    assert f"{bundle}: exact mode: chains only; a plain pass takes 1.00 times as long" in " ".join(lines[2:5])
    assert command(*asked, "--json").json["bundles"][str(bundle)]["exact"]["rule"]["any_tree"] is False


def test_prompts_of_a_file_and_json_alone(bundle: Path, tmp_path: Path, command: Command) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "12 + 7 ="}\n{"messages": [{"role": "user", "content": "Add."}]}\n')
    options = ("--prompts", prompts, "--requests", "2", "--max-tokens", "4", "--rate", "500")
    document = command("bench", bundle, *options, "--methods", "plain,draft", "--json").json
    assert [(p["method"], p["rate"]) for p in document["points"]] == [("plain", 500), ("draft", 500)]


def test_different_tokens_are_an_error(bundle, command, monkeypatch) -> None:
    outputs = MethodPoint.outputs.fget

    def altered(self: MethodPoint) -> Any:
        found = outputs(self)
        return found if self.method.name == "plain" else found[:-1]

    monkeypatch.setattr(MethodPoint, "outputs", property(altered))
    done = command("bench", bundle, "--requests", "2", "--max-tokens", "4", "--concurrency", "1")
    assert (done.code, "DIFFERENT" in done.out) == (1, True)


@pytest.mark.parametrize(
    "wrong", [["--methods", "plain,fast"], ["--rate", "0"], ["--concurrency", "0"], ["--max-tokens", "1"]]
)
def test_wrong_usage(bundle: Path, wrong: list[str], command: Command) -> None:
    refused = command("bench", bundle, *wrong)
    assert (refused.code, wrong[0] in refused.err) == (2, True)


def test_trees_of_a_fixed_size(bundle: Path, command: Command) -> None:
    options = ("--requests", "4", "--max-tokens", "16", "--concurrency", "1", "--methods", "plain,tree")
    document = command("bench", bundle, *options, "--tree-nodes", "12", "--json").json
    assert (document["same_tokens"], document["tree_nodes"]) == (True, 12)
    assert document["points"][1]["block_length_histogram"][12] > 0
    refused = command("bench", bundle, *options, "--tree-nodes", "0")
    assert refused.code == 2
    assert "--methods has tree, but --tree-nodes is 0" in refused.err

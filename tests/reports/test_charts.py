"""Charts: every name and load is there, texts do not lie on each other, and the colours follow the viewer's mode."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from dflash_trt.errors import DFlashError
from dflash_trt.reports import charts
from tests.doubles.commands import Command

SVG = "{http://www.w3.org/2000/svg}"
pytest.importorskip("matplotlib")
NAMES = [f"a line with the number {number}" for number in range(9)]


def drawn() -> dict[str, str]:
    series = {name: [float(i), 2.0 + i, None, 4.0] for i, name in enumerate(NAMES)}
    points = {name: [(0.0, 1.0), (100.0, 1.5 + i)] for i, name in enumerate(NAMES)}
    groups = {name[-8:]: {"plain": 10.0, "drafting": 12.0 + i} for i, name in enumerate(NAMES)}
    return {
        "load": charts.load_chart(["16", "2", "40/s", "1"], {"A": series, "B": series}, title="T", x="X & Y"),
        "curve": charts.curve_chart(points, title="T", x="steps", y="tokens"),
        "stack": charts.stack_chart(
            dict.fromkeys(NAMES, 3.5), limit=9, limit_name="L", title="T", unit="GiB"
        ),
        "bars": charts.bars_chart({"P": groups}, title="T"),
    }


def test_every_name_is_there_and_the_loads_keep_their_order() -> None:
    found = drawn()
    for name in ("load", "curve"):
        texts = [t.text for t in ElementTree.fromstring(found[name]).iter(f"{SVG}text")]
        assert set(NAMES) <= set(texts)
    texts = [t.text for t in ElementTree.fromstring(found["load"]).iter(f"{SVG}text")]
    first = texts.index("16")
    assert texts[first : first + 4] == ["16", "2", "40/s", "1"]
    heights = [t.text for t in ElementTree.fromstring(found["bars"]).iter(f"{SVG}text")]
    assert {"10", "12", "20"} <= set(heights)
    assert drawn() == found  # the same figures give the same bytes


def test_texts_and_axes_follow_the_mode_of_the_viewer() -> None:
    for text in drawn().values():
        assert text.startswith("<svg")
        assert "prefers-color-scheme: dark" in text
        assert "#010203" not in text
        assert "#ffffff" not in text
        assert "fill: #000000" not in text


def test_names_do_not_lie_on_each_other() -> None:
    """The boxes of all texts, as matplotlib lays them out, are apart and inside the picture."""
    figure, axes = charts._figure(2, "A title")
    for axis in axes:
        for number, name in enumerate(NAMES):
            axis.plot([0, 1], [number, number], label=name)
        axis.set_xlabel("a label of the axis")
    charts._legend(figure, axes[0])
    figure.draw_without_rendering()
    legend = figure.legends[0]
    boxes = [text.get_window_extent() for text in legend.get_texts()]
    boxes += [axis.xaxis.label.get_window_extent() for axis in axes]
    boxes += [text.get_window_extent() for text in figure.texts]
    boxes += [axis.get_window_extent() for axis in axes]
    for number, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[number + 1 :])
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.x1


def test_a_plan_is_drawn(tmp_path: Path, command: Command) -> None:
    out = tmp_path / "plan.svg"
    words = ("plan", "--target", "qwen3-8b", "--gpu", "rtx-4090", "--engine", "tensorrt-rtx", "--json")
    shown = command(*words, "--svg", out)
    assert (shown.code, shown.json["fits"]) == (1, False)
    texts = " ".join(t.text or "" for t in ElementTree.fromstring(out.read_text()).iter(f"{SVG}text"))
    assert "target weights" in texts
    assert "the memory of rtx-4090, 22 GiB" in texts


def test_without_the_library_the_hint_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charts, "available", lambda: False)
    with pytest.raises(DFlashError, match="matplotlib, which is not installed: pip install"):
        charts.bars_chart({"a": {"b": {"c": 1.0}}}, title="")


def test_a_command_asks_before_its_work_whether_it_can_draw(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: Command
) -> None:
    missing = tmp_path / "missing" / "drafters.svg"
    refused = command("compare", "--target", "tiny", "--drafter", "tiny", "--svg", missing)
    assert refused.code == 1
    assert f"--svg {missing}: is a directory, or its directory does not exist" in refused.err
    monkeypatch.setattr(charts, "available", lambda: False)
    refused = command("bench", "--server", "http://127.0.0.1:9", "--svg", tmp_path / "load.svg")
    assert refused.code == 1
    assert "matplotlib, which is not installed" in refused.err

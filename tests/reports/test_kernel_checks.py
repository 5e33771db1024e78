"""`selftest --kernels`: each kernel against its reference, without a bundle."""

from __future__ import annotations

import json

from dflash_trt.cli import main
from dflash_trt.reports import kernels


def test_kernels_are_checked_without_a_bundle(tmp_path, monkeypatch, capsys) -> None:
    report = tmp_path / "kernels.json"
    words = ["selftest", "--kernels", "--report", str(report)]
    assert main(words) == 0
    found = json.loads(report.read_text())
    assert found["gpu"] is None
    names = ("SampleRows", "AdjustRows", "BlockAcceptance", "Round")
    assert found["problems"] == {"float16": dict.fromkeys(names, "")}
    monkeypatch.setattr(kernels, "_accepted", lambda *given: "counts are wrong")
    assert main(words) == 1
    assert "failed  BlockAcceptance  float16  counts are wrong" in capsys.readouterr().out
    monkeypatch.delenv("TRITON_INTERPRET")
    assert main(words) == 1
    assert "sees no GPU here" in capsys.readouterr().err

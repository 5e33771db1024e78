"""The passes that read a prompt on the embedded engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_trt import LLM, SamplingParams
from dflash_trt.building.build import build
from dflash_trt.engines.onnxruntime import entry
from dflash_trt.engines.onnxruntime.engine import OnnxRuntimeEngine

PASS, PROMPT, PREFIX = 16, 70, 37


def test_passes_of_a_prompt_end_at_multiples_and_keep_its_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = build("tiny", None, tmp_path / "bundle", max_seq_len=256).path
    prompt = np.random.default_rng(0).integers(10, 500, PROMPT).tolist()
    with LLM(bundle, threads=1) as llm:
        whole = llm.logits(prompt)
    monkeypatch.setattr(entry, "PROMPT_PASS", PASS)
    passes: list[tuple[int, int]] = []
    run = OnnxRuntimeEngine.run

    def noted(self: OnnxRuntimeEngine, feeds: Any, **options: Any) -> Any:
        if "tokens" in feeds:
            passes.append((int(feeds["start"][0]), feeds["tokens"].shape[1]))
        return run(self, feeds, **options)

    monkeypatch.setattr(OnnxRuntimeEngine, "run", noted)
    with LLM(bundle, threads=1) as llm:
        np.testing.assert_array_equal(llm.logits(prompt), whole)
        one = SamplingParams(max_tokens=1)
        llm.generate(prompt[:PREFIX], one)
        passes.clear()
        again = llm.generate(prompt, one)
    assert again.statistics.num_cached_tokens == PREFIX
    assert [start for start, _ in passes] == [PREFIX, 48, 64]
    assert sum(count for _, count in passes) == PROMPT - PREFIX

"""The embedded engine's own choice of precision: a drafter beside a large head is in INT8."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_trt import LLM, SamplingParams
from dflash_trt.building.build import build
from dflash_trt.building.sources import known_configs
from dflash_trt.engines import registry
from dflash_trt.engines.onnxruntime import entry
from dflash_trt.formats.precision import Precision
from dflash_trt.models.configs import read_drafter_config, read_target_config


def chosen(pair: str, asked: Precision, engine: str = "onnxruntime", *, quantized: bool = False) -> Precision:
    target, drafter = known_configs(pair)
    configs = read_target_config(target), read_drafter_config(drafter)
    return registry.find(engine).choose_precision(asked, *configs, quantized=quantized)


def test_a_drafter_beside_a_large_head_is_in_int8() -> None:
    assert chosen("qwen3-4b", Precision()) == Precision(drafter="int8", head="int8")
    assert chosen("qwen3-4b", Precision(target="int4")) == Precision(
        target="int4", drafter="int8", head="int8"
    )


@pytest.mark.parametrize(
    "asked", [Precision(drafter="fp32"), Precision(head="int4"), Precision(drafter="int4")]
)
def test_what_is_asked_is_kept(asked: Precision) -> None:
    assert chosen("qwen3-4b", asked) == asked


def test_small_heads_quantized_pairs_and_other_engines_stay_as_stored() -> None:
    assert chosen("tiny", Precision()) == Precision()
    assert chosen("qwen3-4b", Precision(), quantized=True) == Precision()
    assert chosen("qwen3-4b", Precision(), "tensorrt") == Precision()


def test_many_requests_in_integers_are_warned_of_without_vnni(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bundle = build("tiny", None, tmp_path / "int8", max_seq_len=64, precision=Precision(target="int8"))
    for instructions, slots, warned in (("AVX-512, VNNI", 32, False), ("AVX2", 8, False), ("AVX2", 32, True)):
        monkeypatch.setattr("dflash_trt.hardware.instructions", lambda known=instructions: known)
        LLM(bundle.path, max_batch_size=slots).close()
        assert ("this processor has no VNNI" in caplog.text) == warned


def test_a_build_takes_the_choice_and_the_tokens_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entry, "LARGE_HEAD_BYTES", 0)
    small = build("tiny", None, tmp_path / "int8", max_seq_len=256)
    wide = build("tiny", None, tmp_path / "fp32", max_seq_len=256, precision=Precision(drafter="fp32"))
    assert small.manifest["quantization"]["drafter"] == "W8A16"
    assert wide.manifest["quantization"]["drafter"] is None
    assert small.manifest["target"]["weight_bytes"] == wide.manifest["target"]["weight_bytes"]
    params = SamplingParams(max_tokens=32, ignore_eos=True)
    with LLM(small.path) as drafting, LLM(wide.path) as plain:
        drafted = drafting.generate("12 + 7 =", params, block_length=8)
        assert drafted.token_ids == plain.generate("12 + 7 =", params, speculate=False).token_ids
        assert drafted.statistics.mean_acceptance_length > 1.5

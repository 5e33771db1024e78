"""Hybrid targets on the engine that runs plans, over a stand-in for TensorRT: states beside rows, in slots.

Tokens must equal those of the same pair on ONNX Runtime.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash_trt import LLM, SamplingParams
from dflash_trt.building import exactness
from dflash_trt.building.build import build
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.decoding.pair import PassRule
from dflash_trt.engines.caches import POSITION
from dflash_trt.engines.device.states import DeviceHybridCaches
from dflash_trt.engines.tensorrt.options import TensorRTOptions
from dflash_trt.errors import BundleError
from dflash_trt.runtime import Runtime
from tests.doubles.checkpoints import make_drafter
from tests.doubles.hybrid_checkpoints import DENSE, make_hybrid
from tests.engines.tensorrt.test_runtime import FLOAT32, here  # noqa: F401  # a fixture

BLOCK = 6
LAYERS = ["linear_attention", "full_attention", "linear_attention"]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory, here: Any) -> tuple[Bundle, Bundle]:  # noqa: F811
    """One hybrid pair, built for ONNX Runtime and for TensorRT."""
    directory = tmp_path_factory.mktemp("states")
    target = make_hybrid(directory / "target", DENSE, favourites=6, num_hidden_layers=3, layer_types=LAYERS)
    drafter = make_drafter(directory / "drafter", target, block_size=BLOCK, layers=1, taps=(0, 1))
    sources, options = (str(target), str(drafter)), TensorRTOptions(max_batch_size=4, prefill_chunk=32)
    return build(*sources, directory / "onnxruntime", max_seq_len=140), build(
        *sources,
        directory / "tensorrt",
        engine="tensorrt",
        max_seq_len=140,
        precision=FLOAT32,
        options=options,
    )


@pytest.fixture
def measured_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact mode measures one short answer, and keeps the result in a folder of its own."""
    monkeypatch.setenv("DFLASH_TRT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(exactness, "TOKENS", 4)
    monkeypatch.setattr(exactness, "_TIMED", 1)
    monkeypatch.setattr(Runtime, "_measured_prompts", lambda self: [list(range(6))])


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, 300, n).tolist() for n in (3, 50, 17, 1, 70)]


def params() -> list[SamplingParams]:
    return [
        SamplingParams(temperature=0.8 * (n % 2), max_tokens=n, seed=n, ignore_eos=True)
        for n in (40, 9, 60, 21, 12)
    ]


def test_the_tokens_are_those_of_onnxruntime(bundles: tuple[Bundle, Bundle]) -> None:
    """Five requests in three slots. Later rounds reuse prefixes at the boundaries where states were kept."""
    with LLM(bundles[0].path, threads=1) as reference:
        expected = [c.token_ids for c in reference.generate(prompts(), params())]
    with LLM(bundles[1].path, prefix_cache_bytes=1 << 22) as llm:
        pair: Any = llm._runtime.pair
        for block_length in (None, 1, BLOCK):
            found = llm.generate(prompts(), params(), block_length=block_length)
            assert [c.token_ids for c in found] == expected
        assert sum(c.statistics.num_accepted_tokens for c in found) > 0
        assert [c.statistics.num_cached_tokens for c in found][1] == 49
        caches = pair.target.caches
        assert isinstance(caches, DeviceHybridCaches)
        pair.arrays.wait()
        np.testing.assert_array_equal(caches._on_device.cpu().numpy(), caches._positions)
        llm._runtime.scheduler.follow(PassRule((4, BLOCK)))  # the copies of a row enter no state
        found = llm.generate(prompts(), params(), block_length=3)
        assert [c.token_ids for c in found] == expected


@pytest.mark.usefixtures("measured_here")
def test_exact_mode_opens(
    tmp_path: Path,
    here: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All widths agree, in every batch and however a prompt was cut, but for passes of one row, which ONNX Runtime
    multiplies in another way here, whatever the target.
    """
    heads = {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
    target = make_hybrid(
        tmp_path / "target", favourites=6, num_hidden_layers=2, layer_types=LAYERS[:2], **heads
    )
    drafter = make_drafter(tmp_path / "drafter", target, block_size=3, layers=1, taps=(0, 1))
    bundle = build(
        *(str(target), str(drafter), tmp_path / "bundle"),
        engine="tensorrt",
        max_seq_len=64,
        precision=FLOAT32,
        options=TensorRTOptions(max_batch_size=2, prefill_chunk=4),
    )
    greedy, asked = SamplingParams(max_tokens=9, ignore_eos=True), [prompts()[n] for n in (0, 2)]
    with LLM(bundle.path, max_batch_size=2, exact=True) as llm:
        assert llm.exactness is not None
        assert llm.exactness.rule == PassRule((2, 3))
        plain = llm.generate(asked, greedy, speculate=False)
        drafted = llm.generate(asked, greedy, block_length=3)
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
    assert sum(c.statistics.num_accepted_tokens for c in drafted) > 0


def test_states_that_do_not_fill_whole_units_are_refused_at_any_batch(tmp_path: Path, here: Any) -> None:  # noqa: F811
    """One slot's states follow those of the layer before."""
    heads = {"linear_num_key_heads": 1, "linear_num_value_heads": 1}
    target = make_hybrid(tmp_path / "target", favourites=6, num_hidden_layers=3, layer_types=LAYERS, **heads)
    drafter = make_drafter(tmp_path / "drafter", target, block_size=3, layers=1, taps=(0, 1))
    settings: dict[str, Any] = {"engine": "tensorrt", "max_seq_len": 64, "precision": FLOAT32}
    bundle = build(str(target), str(drafter), tmp_path / "bundle", **settings)
    for batch in (1, 2):
        with pytest.raises(
            BundleError, match=r"conv_state\.0 .* 576 bytes .* multiple of 256 bytes; build for ONNX"
        ):
            LLM(bundle.path, max_batch_size=batch)


def test_states_move_and_are_cleared_by_slot(bundles: tuple[Bundle, Bundle]) -> None:
    with LLM(bundles[1].path) as llm:
        pair: Any = llm._runtime.pair
        caches = pair.target.caches
        pair.prefill(prompts()[1][:20], 0, 1, draft=False)
        names = [name for name in caches.arrays if "_state" in name]
        assert len(names) == 8  # four of each of two layers

        def state(slot: int) -> dict[str, torch.Tensor]:
            pair.arrays.wait()
            return {name: caches.arrays[name][slot].cpu() for name in names}

        made = state(1)
        assert caches.position(1) == 19  # the last row of a prompt can be taken back
        assert list(caches.cut_lengths(1, 20)) == [19, 20]
        assert all(each.abs().max() > 0 for each in made.values())
        caches.copy(1, 0, 20)
        kept = caches.keep(1, 0, 20, 1)
        assert list(kept.lengths) == [19, 20]
        assert kept.size == caches.kept_bytes(20)
        caches.clear(1, 19)
        cleared = state(1)
        for name, before in made.items():
            assert torch.equal(cleared[name], torch.zeros_like(before) if "pending" in name else before)
        caches.clear(1)
        assert caches.position(1) == 0
        assert all(each.abs().max() == 0 for each in state(1).values())
        caches.restore(2, [kept], 20)
        for slot in (0, 2):
            assert caches.position(slot) == 19
            assert all(torch.equal(made[name], each) for name, each in state(slot).items())
        assert caches.keep(2, 0, 12, 1).lengths == ()  # the state has read more
        assert POSITION not in caches.arrays

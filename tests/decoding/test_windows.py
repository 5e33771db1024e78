"""Windows that are much shorter than the sequences: decoding gives what it gives with caches of all rows."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_trt import LLM, SamplingParams
from dflash_trt.building.build import build
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.decoding.length.trees import FixedTrees
from dflash_trt.decoding.params import RequestOptions
from dflash_trt.decoding.request import Request
from dflash_trt.errors import UsageError
from dflash_trt.runtime import Runtime
from tests.doubles.checkpoints import VOCAB, make_drafter, make_target
from tests.doubles.family_checkpoints import make_gpt_oss, make_gpt_oss_drafter
from tests.doubles.hybrid_checkpoints import DENSE, make_hybrid
from tests.doubles.kind_checkpoints import make_eagle3
from tests.doubles.schedules import AnyLengths

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
WINDOW, BLOCK, MOST = 20, 6, 560
WINDOWED = {"sliding_window": WINDOW, "head_dim": 128}  # rows move down by 128
# name: target, drafter, candidates for each place
PAIRS: dict[str, tuple[Any, Any, int]] = {
    "windows": (
        partial(make_target, layers=2, favourites=6, layer_types=(SLIDING, FULL), **WINDOWED),
        partial(make_drafter, layer_types=(SLIDING, FULL), **WINDOWED),
        1,
    ),
    "trees": (
        partial(make_target, layers=2, favourites=6, layer_types=(SLIDING, FULL), **WINDOWED),
        partial(make_drafter, layer_types=(SLIDING, SLIDING), is_causal=False, **WINDOWED),
        3,
    ),
    "sinks": (
        partial(make_gpt_oss, favourites=6, head_dim=128, sliding_window=WINDOW, num_hidden_layers=2),
        partial(make_gpt_oss_drafter, layers=1),
        3,
    ),
    "a drafter alone": (
        partial(make_target, layers=2, favourites=6),
        partial(make_drafter, layer_types=(SLIDING, SLIDING), **WINDOWED),
        1,
    ),
    "beside states": (
        partial(
            make_hybrid,
            architecture=DENSE,
            favourites=6,
            num_hidden_layers=3,
            layer_types=[LINEAR, FULL, LINEAR],
        ),
        partial(make_drafter, layer_types=(SLIDING, SLIDING), **WINDOWED),
        1,
    ),
}


@pytest.fixture(scope="module", params=PAIRS)
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    directory, (target, drafter, width) = tmp_path_factory.mktemp("windows"), PAIRS[request.param]
    target(directory / "target", max_position_embeddings=1024)
    drafter(directory / "drafter", directory / "target", block_size=BLOCK, taps=(0, 1))
    sources = str(directory / "target"), str(directory / "drafter")
    made = build(*sources, directory / "bundle", max_seq_len=MOST, tree_width=width)
    rows = [kind.rows for role in ("target", "drafter") for kind in made.cache_kinds(role) if kind.window]
    assert rows
    return made


@pytest.fixture
def all_rows() -> Iterator[pytest.MonkeyPatch]:
    """Until it is undone, every layer keeps all rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bundle, "cache_kinds", lambda *_: ())
        yield patch


def asked_at_random(seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts that share beginnings, most of them longer than the rows that a window keeps."""
    rng = random.Random(seed)
    common = np.random.default_rng(seed).integers(0, VOCAB, 400).tolist()
    asked = []
    for i in range(9):
        ids = common[: rng.randint(0, 400)]
        ids += np.random.default_rng(i).integers(0, VOCAB, rng.randint(1, 60)).tolist()
        temperature, penalty = rng.choice([(0.0, 1.0), (0.8, 1.0), (1.1, 1.2)])
        sampling = {"temperature": temperature, "repetition_penalty": penalty, "seed": i}
        asked.append((ids, SamplingParams(max_tokens=rng.randint(1, 90), ignore_eos=True, **sampling)))
    return asked


@pytest.mark.parametrize("seed", range(2))
def test_any_schedule_gives_the_tokens_of_caches_with_all_rows(
    bundle: Bundle, seed: int, all_rows: pytest.MonkeyPatch
) -> None:
    """Requests join, leave and are cancelled, in batches of mixed lengths, with drafts, trees and prefixes."""
    asked, rng = asked_at_random(seed), random.Random(seed)
    with LLM(bundle.path, max_batch_size=1, prefix_cache_bytes=0, threads=1) as llm:
        alone = [llm.generate(ids, params, speculate=False).token_ids for ids, params in asked]
    all_rows.undo()
    served = Runtime(
        bundle.path,
        max_batch_size=rng.randint(2, 4),
        prefill_chunk=rng.randint(20, 200),
        prefix_cache_bytes=rng.choice([1 << 21, 1 << 24]),
        threads=1,
        check="size",
    )
    chains = AnyLengths(seed)
    chains.most = BLOCK
    trees = bundle.manifest["tree_width"] > 1
    lengths: Any = chains
    if trees:
        lengths = FixedTrees(BLOCK, BLOCK - 1, 12)
        lengths.draft = chains.draft
    due = [
        (rng.randint(0, 60), served.request(ids, p, RequestOptions(speculate=rng.random() < 0.8)))
        for ids, p in asked
    ]
    got: dict[Request, list[int]] = {each: [] for _, each in due}
    for step in range(1500):
        for at, each in due:
            if at == step:
                served.scheduler.submit(each)
        if rng.random() < 0.01:
            served.scheduler.cancel(rng.choice(due)[1])
        for emission in served.scheduler.step(lengths):
            got[emission.request] += emission.token_ids
    assert served.scheduler.idle
    served.scheduler.close()
    for (_, each), tokens in zip(due, alone, strict=True):
        ended = each.stop.finish_reason == "length"
        assert ended or each.cancelled
        assert got[each] == (tokens if ended else tokens[: len(got[each])])
    assert sum(each.stop.finish_reason == "length" for _, each in due) > 4


def test_what_is_restored_continues_as_if_it_had_never_left(bundle: Bundle) -> None:
    """Turns of a chat between those of others: the same tokens, and the same drafts are accepted."""
    rng = np.random.default_rng(4)
    system = rng.integers(0, VOCAB, 270).tolist()
    turns = [rng.integers(0, VOCAB, n).tolist() for n in (30, 45, 25)]
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    found: list[list[tuple[list[int], list[int]]]] = []
    cached = 0
    for kept in (0, 1 << 26):
        with LLM(bundle.path, max_batch_size=1, prefill_chunk=64, prefix_cache_bytes=kept, threads=1) as llm:
            answers = []
            talks = [list(system), list(system)]
            for turn in turns:
                for talk in talks:
                    talk += turn
                    answer = llm.generate(talk, params, block_length=BLOCK)
                    talk += answer.token_ids
                    answers.append((answer.token_ids, answer.statistics.acceptance_histogram))
                    cached += answer.statistics.num_cached_tokens
                    talk.append(len(answers) if talk is talks[0] else 7)
            found.append(answers)
    assert found[0] == found[1]
    assert cached > 4 * 270


def test_kept_prefixes_hold_windows_only_at_their_cuts(tmp_path: Path) -> None:
    target, drafter, _ = PAIRS["sinks"]
    target(tmp_path / "target", max_position_embeddings=1024)
    drafter(tmp_path / "drafter", tmp_path / "target", block_size=BLOCK, taps=(0, 1))
    bundle = build(str(tmp_path / "target"), str(tmp_path / "drafter"), tmp_path / "bundle", max_seq_len=MOST)
    prompt = np.random.default_rng(1).integers(0, VOCAB, 513).tolist()
    whole, windowed = (
        sum(kind.row_bytes for kind in bundle.cache_kinds("target") if (kind.window is None) == without)
        for without in (True, False)
    )
    whole += 4 * bundle.feature_size  # which the drafter has not read
    with LLM(bundle.path, max_batch_size=1, prefill_chunk=512, threads=1) as llm:
        llm.generate(prompt, SamplingParams(max_tokens=1))
        kept = llm.runtime.scheduler.slots.prefixes.counts
        assert kept.tokens == 513
        # Both the chunk's end and the prompt's are cuts: the window before the last page, and the page.
        assert kept.bytes == 513 * whole + (WINDOW - 2 + 64 + 1) * windowed
        for other in (300, 512, 513):
            again = llm.generate([*prompt[:other], 1, 2], SamplingParams(max_tokens=1))
            assert again.statistics.num_cached_tokens == (other if other > 300 else 0)


@pytest.mark.parametrize("causal", [False, True])
def test_a_drafter_may_see_less_than_it_was_trained_for(tmp_path: Path, causal: bool) -> None:
    """The tokens stay those of plain decoding, and the drafter's memory ends with its window."""
    target = make_target(tmp_path / "target", favourites=6, head_dim=128, layers=2)
    drafter = make_drafter(
        tmp_path / "drafter", target, block_size=BLOCK, taps=(0, 1), is_causal=causal, head_dim=128
    )
    sources = str(target), str(drafter)
    whole = build(*sources, tmp_path / "whole", max_seq_len=MOST)
    narrow = build(*sources, tmp_path / "narrow", max_seq_len=MOST, drafter_window=12)
    assert [kind.window for kind in whole.cache_kinds("drafter")] == [None]
    (kind,) = narrow.cache_kinds("drafter")
    assert (kind.window, kind.stride, narrow.manifest["key"] != whole.manifest["key"]) == (12, 128, True)
    prompt = np.random.default_rng(1).integers(0, VOCAB, 300).tolist()
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    answers = []
    for bundle in (whole, narrow):
        with LLM(bundle.path, max_batch_size=1, threads=1) as llm:
            answers.append(llm.generate(prompt, params, block_length=BLOCK))
            assert answers[-1].statistics.num_accepted_tokens > 0
            rows = llm.runtime.pair.drafter.caches.kinds[0].records[0].finite
            assert (rows > 300) == (bundle is whole)
    assert answers[0].token_ids == answers[1].token_ids
    for window in (BLOCK - 1, 4096):
        with pytest.raises(UsageError, match=rf"--drafter-window is {window}, expected {BLOCK}\.\.4095"):
            build(*sources, tmp_path / "refused", drafter_window=window)


def test_heads_that_draft_one_after_another_have_no_window(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target")
    make_eagle3(tmp_path / "drafter", target)
    with pytest.raises(UsageError, match="drafts one token after another"):
        build(str(target), str(tmp_path / "drafter"), tmp_path / "refused", drafter_window=64)

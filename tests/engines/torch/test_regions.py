"""Cache rows of the engine on torch: each request has a region that grows with it."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_trt import LLM, SamplingParams
from dflash_trt.building.build import build
from dflash_trt.bundle.cache_kinds import CacheKind
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.engines.device.caches import DeviceCaches, Regions
from dflash_trt.engines.device.sizes import DECODE
from dflash_trt.engines.device.stream import HostStream
from tests.doubles.two_engines import FLOAT32
from tests.engines.torch.test_pairs import PAIRS


@pytest.mark.parametrize("seed", range(20))
def test_regions_grow_move_and_keep_their_rows(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any order. If a region cannot grow, there are not so many free rows. It needs no further memory."""

    def refused(rows: torch.Tensor) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    rng, slots, most, spare, kept = random.Random(seed), 5, 640, 64, seed % 3
    rows = torch.zeros(2, spare + rng.choice([640, 900, 1500]), 4)
    pool = Regions({"k_cache.0": rows}, HostStream(), slots - kept, most, spare, kept)
    held: dict[int, torch.Tensor] = {}
    if seed % 2:
        monkeypatch.setattr(torch.Tensor, "clone", refused)
    for _ in range(300):
        slot, other = rng.sample(range(slots), 2)
        match rng.choice(["grow", "grow", "free", "move"]):
            case "grow":
                count = rng.randint(1, most)
                if pool.reserve(slot, count):
                    old = held.get(slot, torch.zeros(2, 0, 4))
                    added = torch.randn(2, max(count - old.shape[1], 0), 4)
                    pool.write([added], slot, old.shape[1])
                    held[slot] = torch.cat((old, added), 1)
                else:
                    others = sum(len(each) for i, each in enumerate(pool._held) if i != slot)
                    assert others + count > rows.shape[1] - spare - 64
            case "free":
                count = rng.choice([0, 0, 100])
                pool.release(slot, count)
                if slot in held:
                    held[slot] = held[slot][:, :count]
            case "move":
                pool.move(slot, other, 0)
                swapped = {slot: held.get(other), other: held.get(slot)}
                held = {i: x for i, x in {**held, **swapped}.items() if x is not None}
        ranges = sorted((each.start, each.stop) for each in pool._held if each)
        assert all(stop <= start for (_, stop), (start, _) in pairwise(ranges))
        assert all(spare <= start and stop <= rows.shape[1] for start, stop in ranges)
        for i, expected in held.items():
            assert torch.equal(pool.rows(i)[0][:, : expected.shape[1]], expected)
        pool.point(DECODE, 0, 1)
        assert pool.regions[DECODE][0].tolist() == [each.start for each in pool._held[: slots - kept]]
    assert held


@pytest.mark.parametrize("regions", [False, True])
def test_a_window_may_pass_all_rows_that_are_there(regions: bool) -> None:
    """In a drafter's caches, of a request without drafts that has read a long prompt beside one with drafts."""
    kind = CacheKind(window=20, stride=32, rows=60, row_bytes=4, layers=(0,))
    rows = torch.zeros((2, 60, 4) if regions else (1, 2, 60, 4))
    caches = DeviceCaches({"k_cache.0": rows}, HostStream(), 1, [kind], most=[60] if regions else [])
    caches.advance(0, [1000], [4])
    assert caches.bases([], 1) == {"base.20": [960]}


def test_requests_that_share_little_memory_have_the_same_tokens(chains: Bundle) -> None:
    """As with memory for all. Prefixes are reused."""
    rng, found = random.Random(0), list[Any]()
    prompts = [[rng.randrange(3, 60) for _ in range(rng.choice([3, 20, 30]))] for _ in range(10)]
    prompts[3:6] = [prompts[2] + each for each in prompts[3:6]]
    params = [SamplingParams(max_tokens=rng.choice([5, 38]), ignore_eos=True, seed=i) for i in range(10)]
    for tokens in (None, 300):
        with LLM(chains.path, max_batch_size=4, threads=1, cache_tokens=tokens) as llm:
            found.append([each.token_ids for each in llm.generate(prompts, params)])
            pair = llm.runtime.pair
            assert pair.scarce == (tokens is not None)
            assert llm.metrics.cache_tokens == pair.tokens == (tokens or 4 * pair.capacity)
    assert found[0] == found[1]


def test_256_requests_at_once_over_little_memory_have_their_own_tokens(chains: Bundle) -> None:
    """Of mixed lengths, in 256 slots with memory for about 200 of them; rounds start ahead."""
    rng, counts = random.Random(3), list[int]()
    prompts = [[rng.randrange(3, 60) for _ in range(rng.choice([1, 2, 5, 12, 30]))] for _ in range(32)]
    params = [SamplingParams(max_tokens=rng.randint(2, 9), ignore_eos=True) for _ in range(32)]
    with LLM(chains.path, max_batch_size=1, threads=1, prefix_cache_bytes=0) as llm:
        alone = [each.token_ids for each in llm.generate(prompts, params, speculate=False)]
    memory = {"cache_tokens": 20_000, "max_batch_size": 256}
    with LLM(chains.path, threads=1, prompt_delay=60, **memory) as llm:  # type: ignore[arg-type]
        pair = llm.runtime.pair
        verified, pair.arrays.asynchronous = pair.verified, True
        pair.verified = lambda active, *given: counts.append(len(active)) or verified(active, *given)  # type: ignore
        found = llm.generate(8 * prompts, 8 * params, block_length=3)
    assert [each.token_ids for each in found] == 8 * alone
    assert 150 < max(counts) < 256


def test_a_kept_prefix_is_found_while_memory_is_free(chains: Bundle) -> None:
    """Whatever number of requests came in between. Then it gives way to them, also while a request that began with its
    rows runs. Answers are those without reuse.
    """
    rng = random.Random(1)

    def prompt(count: int) -> list[int]:
        return [rng.randrange(3, 60) for _ in range(count)]

    shared = prompt(30)
    between, after = [prompt(4) for _ in range(30)], [prompt(40) for _ in range(6)]
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    with LLM(chains.path, max_batch_size=4, threads=1, prefix_cache_bytes=0) as llm:
        together = [[*shared, 7], *after]
        expected = [each.token_ids for each in llm.generate([shared, *together], params)]
    with LLM(chains.path, max_batch_size=4, threads=1, cache_tokens=3000) as llm:
        slots, counts = llm.runtime.scheduler.slots, llm.runtime.scheduler.slots.prefixes.counts
        first, *_ = llm.generate([shared, *between], params)
        hit = llm.generate([shared], params)[0]
        assert (first.statistics.num_cached_tokens, hit.statistics.num_cached_tokens) == (0, 29)
        assert first.token_ids == hit.token_ids == expected[0]
        assert counts.tokens == sum(left.count for left in slots.left.values()) > 300
        assert len({left.tokens for left in slots.left.values()}) == len(slots.left)
        assert counts.dropped_tokens == 0 < counts.bytes < counts.limit_bytes
    with LLM(chains.path, max_batch_size=4, threads=1, cache_tokens=400) as llm:
        counts = llm.runtime.scheduler.slots.prefixes.counts
        llm.generate([shared], params)
        found = llm.generate(together, params)
        assert found[0].statistics.num_cached_tokens == 30
        assert [each.token_ids for each in found] == expected[1:]
        assert counts.dropped_tokens > 0
        assert llm.generate([shared], params)[0].token_ids == expected[0]


@pytest.mark.parametrize("name", ["gpt-oss, trees", "qwen3-next"])
def test_a_kept_prefix_of_windows_or_states_is_in_the_shared_memory(name: str, tmp_path: Path) -> None:
    """Only they are copied, at the ends of a prompt and of its answer: a next turn goes on from either. Memory for
    copies is limited. Answers are those without reuse.
    """
    make, fields, make_draft, drafter_fields, options = PAIRS[name]
    target = make(tmp_path / "target", **fields)
    drafter = make_draft(tmp_path / "drafter", target, **drafter_fields)
    options |= {"engine": "torch", "precision": FLOAT32, "max_seq_len": 200}
    bundle = build(str(target), str(drafter), tmp_path / "bundle", **options)
    rng, params = random.Random(2), SamplingParams(max_tokens=20, ignore_eos=True)
    texts = [[rng.randrange(3, 60) for _ in range(40 + i)] for i in range(6)]
    with LLM(bundle.path, max_batch_size=2, threads=1, prefix_cache_bytes=0) as llm:
        answers = [list(each.token_ids) for each in llm.generate(texts, params)]
        asked = [[*texts[0], *answers[0], 7, 8], [*texts[1], 9, 9]]
        expected = [each.token_ids for each in llm.generate(asked, params)]
    for limit in (1 << 28, 1):
        limits = {"cache_tokens": 900, "prefix_cache_bytes": limit}
        with LLM(bundle.path, max_batch_size=2, threads=1, **limits) as llm:
            slots, pair = llm.runtime.scheduler.slots, llm.runtime.pair
            found = llm.generate(texts, params) + llm.generate(asked, params)
            assert [list(each.token_ids) for each in found[:6]] == answers
            assert [each.token_ids for each in found[6:]] == expected
            whole, cut = (each.statistics.num_cached_tokens for each in found[6:])
            if limit == 1:
                assert len(slots.left) <= 1
                continue
            assert len(texts[0]) < whole <= len(asked[0]) - 2
            assert cut == len(texts[1])
            # The next turn has taken the place of the one before, and all other rows are there.
            assert len(slots.left) == len(texts) + 1
            assert sum(left.count for left in slots.left.values()) < pair.tokens
            llm.generate([[5, 6]], params)
            assert 0 < pair.marked_bytes <= limit

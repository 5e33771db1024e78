"""Cache rows of the engine on torch: each request has a region that grows with it."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch

from dflash_trt import LLM, SamplingParams
from dflash_trt.bundle.cache_kinds import CacheKind
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.engines.device.caches import DeviceCaches, Regions
from dflash_trt.engines.device.sizes import DECODE
from dflash_trt.engines.device.stream import HostStream


@pytest.mark.parametrize("seed", range(20))
def test_regions_grow_move_and_keep_their_rows(seed: int) -> None:
    """In any order. One region can have all rows, and if a region cannot grow, there is no room for it in one piece."""
    rng, slots, most, spare = random.Random(seed), 5, 640, 64
    rows = torch.zeros(2, spare + rng.choice([640, 900, 1500]), 4)
    pool = Regions({"k_cache.0": rows}, HostStream(), slots, most, spare)
    held: dict[int, torch.Tensor] = {}
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
                    own = len(pool._held[slot])
                    assert (
                        others + own + count > rows.shape[1] - spare - 64
                        or others + 2 * own + 64 > rows.shape[1]
                    )
            case "free":
                pool.release(slot)
                held.pop(slot, None)
            case "move":
                pool.move(slot, other, 0)
                swapped = {slot: held.get(other), other: held.get(slot)}
                held = {i: x for i, x in {**held, **swapped}.items() if x is not None}
        ranges = sorted((each.start, each.stop) for each in pool._held if each)
        assert all(stop <= start for (_, stop), (start, _) in pairwise(ranges))
        assert all(spare <= start and stop <= rows.shape[1] for start, stop in ranges)
        for i, expected in held.items():
            assert torch.equal(pool.rows(i)[0][:, : expected.shape[1]], expected)
        assert pool.regions[DECODE][0].tolist() == [each.start for each in pool._held]
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

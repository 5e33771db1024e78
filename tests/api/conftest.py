"""The pairs and their oracles, built once for the tests of this folder, and what each request gets alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_trt import LLM, Completion
from dflash_trt.building.build import build
from tests.api.loops import ASKED
from tests.api.pairs import CHUNK, MAX_SEQ_LEN, PAIRS, RANDOM, SHIPPED, SLOTS, Pair, make
from tests.doubles.bundles import bundle
from tests.doubles.reference import Drafter, load_target

__all__ = ["bundle"]


@pytest.fixture(scope="package")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Pair]]:
    pairs = {}
    for name in PAIRS:
        directory = tmp_path_factory.mktemp("pair")
        target, drafter = (
            (SHIPPED[name] / "target", SHIPPED[name] / "drafter")
            if name in SHIPPED
            else make(directory, *RANDOM[name])
        )
        bundle = build(str(target), str(drafter), directory / "bundle", max_seq_len=MAX_SEQ_LEN)
        llm = LLM(bundle.path, max_batch_size=SLOTS, prefill_chunk=CHUNK, threads=1)
        pairs[name] = Pair(name, target, drafter, llm)
    yield pairs
    for pair in pairs.values():
        pair.llm.close()


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest, pairs: dict[str, Pair]) -> Pair:
    return pairs[request.param]


@pytest.fixture
def lucky(pairs: dict[str, Pair]) -> Pair:
    return pairs["lucky"]


@pytest.fixture(scope="package", params=RANDOM)
def oracle(request: pytest.FixtureRequest, pairs: dict[str, Pair]) -> tuple[Pair, Any, Drafter]:
    pair = pairs[request.param]
    return pair, load_target(pair.target), Drafter(pair.drafter)


@pytest.fixture(scope="package")
def alone(bundle: Path) -> list[Completion]:
    with LLM(bundle, max_batch_size=1, prefix_cache_bytes=0, threads=1) as llm:
        return [llm.generate(tokens, params, speculate=False) for tokens, params in ASKED]

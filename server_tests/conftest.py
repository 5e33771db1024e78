from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dflash_trt import LLM
from dflash_trt.building.build import build
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.checkpoint.catalogue import PAIRS
from server_tests.serving import STUB, Serving, idle

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a GPU here would change what `auto` chooses
SHIPPED = [pair.name for pair in PAIRS if pair.target_repo is None]


@dataclass
class Served:
    """A shipped pair behind a server, and the same pair in this process."""

    bundle: Path
    server: Serving
    llm: LLM


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("bundles")
    return {name: build(name, None, directory / name, max_seq_len=512).path for name in SHIPPED}


@pytest.fixture(scope="module", params=SHIPPED)
def served(
    request: pytest.FixtureRequest, bundles: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    bundle = bundles[request.param]
    # A fixed length: the adaptive one stops drafting where it does not pay.
    length = Bundle.open(bundle).manifest["block_size"]
    # One pair with a response per round, the other with one per interval, the default.
    interval = ["--stream-interval=0"] * (request.param == SHIPPED[0])
    options = ("--max-batch-size=8", "--max-queue=64", f"--block-length={length}", *interval)
    server = Serving(bundle, tmp_path_factory.mktemp("log") / "log", *options)
    with LLM(bundle, max_batch_size=8, threads=1) as llm:
        yield Served(bundle, server, llm)
    assert server.stop() == 0
    assert server.processes("") == []


@pytest.fixture(scope="module")
def small(bundles: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    options = ("--max-batch-size=2", "--max-queue=2", "--grace=2", "--block-length=4")
    server = Serving(bundles["tiny"], tmp_path_factory.mktemp("log") / "log", *options)
    yield server
    assert server.stop() == 0


@pytest.fixture
def tiny(small: Serving) -> Serving:
    """A small server, whole and idle, whatever the test before did to it. A test may kill its engine."""
    small.until(
        lambda: (
            small.ready()
            and idle(small)
            and all(
                len(small.processes(program)) == 1 for program in (STUB, "bin/tritonserver", "serving.worker")
            )
        )
    )
    return small

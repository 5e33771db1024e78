"""The number of responses of a stream: one per round, or one per interval. The content is the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dflash_trt import LLM, SamplingParams
from server_tests.serving import Client, Serving, fetch, ids_of, tensors, text_of

PROMPT = "def add(a, b):"


@pytest.fixture(scope="module", params=[0, 3_600_000])
def server(
    request: pytest.FixtureRequest, bundles: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[int, Serving]]:
    options = ("--max-batch-size=2", "--block-length=auto", f"--stream-interval={request.param}")
    serving = Serving(bundles["tiny"], tmp_path_factory.mktemp("log") / "log", *options)
    yield request.param, serving
    assert serving.stop() == 0


def test_the_whole_of_a_stream(server: tuple[int, Serving], bundles: dict[str, Path]) -> None:
    interval, serving = server
    params = SamplingParams(max_tokens=400, temperature=1.0, seed=5, ignore_eos=True, logprobs=True)
    with LLM(bundles["tiny"], threads=1) as llm:
        expected = llm.generate(PROMPT, params)
    asked = {"text_input": PROMPT, "max_tokens": 400, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    with Client(serving.grpc) as client:
        answers = client.all(**asked, stream=True, return_log_probs=True, return_num_output_tokens=True)
    assert (text_of(answers), ids_of(answers)) == (expected.text, expected.token_ids)
    assert expected.logprobs is not None
    got = np.concatenate([answer["output_log_probs"][0, 0] for answer in answers])
    assert got.tolist() == pytest.approx(expected.logprobs, abs=2e-3)
    counts = [int(answer["num_output_tokens"][0, 0]) for answer in answers]
    assert counts == [answer["output_ids"].shape[1] for answer in answers]
    assert len(counts) > 1
    if interval:  # the first token, and all others
        assert counts == [1, 399]
    config = fetch(f"http://127.0.0.1:{serving.http_port}/v2/models/dflash/config")[1]
    assert f'"stream_interval_ms":{{"string_value":"{interval}"}}' in config
    assert '"block_length":{"string_value":"auto"}' in config


def test_ends_do_not_wait(server: tuple[int, Serving]) -> None:
    """Neither after a deadline nor after a client has left."""
    _, serving = server
    asked = {"text_input": PROMPT, "max_tokens": 450, "ignore_eos": True, "speculate": False, "stream": True}
    with Client(serving.grpc) as client:
        late = client.all(**asked, timeout=50_000)
        assert late[-1]["finish_reason"].tolist() == [[b"timeout"]]
        assert len(ids_of(late)) < 450
    client = Client(serving.grpc)
    client.ask(tensors(**asked))
    client.wait()
    client.leave(cancel=True)
    serving.until(lambda: serving.metric("dflash_request_success_total", finished_reason="cancelled") == 1)

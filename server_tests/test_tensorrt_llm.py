"""A bundle for TensorRT-LLM behind Triton's server. Our model drives the package; here it drives the tests' double."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_trt.building.build import build
from dflash_trt.text.tokenizer import Tokenizer
from dflash_trt.trtllm import TensorRTLLMOptions
from server_tests.serving import Serving

ROOT = Path(__file__).parent.parent
TOKENS = list(range(400, 430))
FAILS = 7  # a prompt with only this token
# The module that `import tensorrt_llm` finds: it puts the double in its place.
PACKAGE = f"""
import sys
from tests.doubles.tensorrt_llm_double import make_double
answers = {{({FAILS},): {TOKENS[:12]} + [ValueError("out of blocks")]}}
sys.modules[__name__] = module = make_double(lambda prompt: answers.get(tuple(prompt), {TOKENS}))
module.LLM.delay = 0.03  # seconds between responses, so that a stream has several
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Serving, Tokenizer]]:
    root = tmp_path_factory.mktemp("trtllm")
    (root / "tensorrt_llm.py").write_text(PACKAGE)
    for package in ("flash_attn/cute", "flashinfer"):  # the drafter's attention on H200
        (root / package).mkdir(parents=True)
        (root / package / "__init__.py").touch()
    (root / "flash_attn" / "__init__.py").touch()
    options = TensorRTLLMOptions(gpu="h200")
    bundle = build("tiny", None, root / "bundle", engine="tensorrt-llm", options=options)
    with pytest.MonkeyPatch.context() as patch:
        paths = [str(root), str(ROOT), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", ":".join(filter(None, paths)))
        serving = Serving(bundle.path, root / "log")
    yield serving, Tokenizer(bundle.path / "target")
    assert serving.stop() == 0


def test_answers_whole_and_streamed(server: tuple[Serving, Tokenizer]) -> None:
    serving, tokenizer = server
    text = tokenizer.decode(TOKENS[:20])
    asked = {"text_input": "def add(a, b):", "max_tokens": 20}
    status, answer = serving.generate(**asked)
    assert (status, answer["text_output"], answer["finish_reason"]) == (200, text, "length")
    assert answer["output_ids"] == TOKENS[:20]
    events = list(serving.generate_stream(**asked))
    assert "".join(event["text_output"] for event in events) == text
    assert len(events) > 1


def test_an_error_comes_after_the_tokens_before_it(server: tuple[Serving, Tokenizer]) -> None:
    serving, tokenizer = server
    events = list(serving.generate_stream(input_ids=[FAILS], max_tokens=20))
    assert "".join(event["text_output"] for event in events[:-1]) == tokenizer.decode(TOKENS[:12])
    assert "out of blocks" in events[-1]["error"]
    status, answer = serving.generate(input_ids=[FAILS], max_tokens=20)
    assert (status, answer["error"]) == (400, events[-1]["error"])
    assert serving.ready()

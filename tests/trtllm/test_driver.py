"""LLM and AsyncLLM over a bundle for TensorRT-LLM, with a strict double of the package."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest

from dflash_trt import LLM, AsyncLLM, SamplingParams
from dflash_trt.building.build import build
from dflash_trt.cli import main
from dflash_trt.errors import DFlashError, RequestError
from dflash_trt.trtllm import TensorRTLLMOptions, driver
from tests.doubles.exposition import Exposition
from tests.doubles.tensorrt_llm_double import make_double

# The packages that the drafter's attention imports.
ATTENTION = ("flash_attn", "flash_attn.cute", "flashinfer")
PROMPTS = ["What is 17 + 25?", "def add(a, b):", "Say hello."]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bundles")
    build("tiny", None, root / "onnx")
    build("tiny", None, root / "trtllm", engine="tensorrt-llm", options=TensorRTLLMOptions(gpu="h100"))
    return root


@pytest.fixture(scope="module")
def reference(bundles: Path) -> dict[tuple[int, ...], list[int]]:
    """The greedy tokens of the shipped pair's target on ONNX Runtime, beyond its end tokens."""
    found = {}
    with LLM(bundles / "onnx") as llm:
        for prompt in PROMPTS:
            completion = llm.generate(prompt, SamplingParams(max_tokens=48, ignore_eos=True))
            found[tuple(completion.prompt_token_ids)] = completion.token_ids
    return found


@pytest.fixture
def double(reference: dict[tuple[int, ...], list[int]], monkeypatch: pytest.MonkeyPatch) -> Any:
    module = make_double(lambda prompt: reference[tuple(prompt)])
    monkeypatch.setitem(sys.modules, "tensorrt_llm", module)
    for package in ATTENTION:
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    return module


def test_the_same_completions_as_on_onnx_runtime(bundles: Path, double: Any) -> None:
    """Tokens, text, finish reason: greedy, with stop ids, stop strings and budgets, one by one and together."""
    params = [
        SamplingParams(max_tokens=40),
        SamplingParams(max_tokens=7),
        SamplingParams(max_tokens=40, ignore_eos=True),
        SamplingParams(max_tokens=40, stop=("1", "a")),
        SamplingParams(max_tokens=40, ignore_eos=True, stop_token_ids=(300, 301, 302, 303)),
    ]
    with LLM(bundles / "onnx") as ours, LLM(bundles / "trtllm") as theirs:
        for p in params:
            expected = ours.generate(PROMPTS, p)
            found = theirs.generate(PROMPTS, p)
            for one, other in zip(expected, found, strict=True):
                assert other.token_ids == one.token_ids
                assert other.text == one.text
                assert other.finish_reason == one.finish_reason
                assert other.prompt_token_ids == one.prompt_token_ids
                assert other.statistics.num_generation_tokens == len(one.token_ids)
    assert double.made[0].closed


def test_streams_and_chats_as_every_engine(bundles: Path, double: Any) -> None:
    messages = [{"role": "user", "content": "hi"}]
    with LLM(bundles / "onnx") as ours, LLM(bundles / "trtllm") as theirs:
        prompt = ours.chat_prompt(messages)
        assert theirs.chat_prompt(messages) == prompt
        double.LLM.answer = staticmethod(lambda ids: [5, 6, 7, 2] if ids == prompt else [9] * 20)
        assert theirs.chat(messages).token_ids == [5, 6, 7, 2]
        chunks = list(theirs.stream("other", SamplingParams(max_tokens=20)))
    assert [len(chunk.token_ids) for chunk in chunks] == [1, 3, 8, 1, 3, 4]
    assert chunks[-1].finish_reason == "length"
    assert chunks[-1].statistics is not None
    assert all(chunk.statistics is None for chunk in chunks[:-1])


def test_acceptance_is_counted_by_decoding_iteration(bundles: Path, double: Any) -> None:
    """Runs of 1, 3, 8, 1, 3, 8 ... tokens. The first comes from the prompt pass and is not a round."""
    double.LLM.answer = staticmethod(lambda ids: [9] * 25)
    with LLM(bundles / "trtllm") as llm:
        statistics = llm.generate("x", SamplingParams(max_tokens=25)).statistics
        # After the first token: 3, 8, 1, 3, 8 and one more.
        assert statistics.num_drafts == 6
        assert statistics.num_accepted_tokens == 2 + 7 + 0 + 2 + 7 + 0
        assert statistics.mean_acceptance_length == pytest.approx(24 / 6)
        assert statistics.num_draft_tokens == 6 * 7
        found = Exposition(llm.metrics.prometheus())
    assert found["spec_decode_num_accepted_tokens_total"] == 18
    assert found["generation_tokens_total"] == 25
    assert statistics.time_to_first_token > 0


def test_responses_that_hold_several_iterations_are_counted_apart(bundles: Path, double: Any) -> None:
    double.LLM.answer = staticmethod(lambda ids: [9] * 13)
    original = double.LLM.generate_async

    def merged(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        step = result._responses

        def pairs() -> Any:
            yield next(step)
            while True:
                try:
                    next(step)
                except StopIteration:
                    return
                next(step, None)
                yield

        result._responses = pairs()
        return result

    double.LLM.generate_async = merged
    with LLM(bundles / "trtllm") as llm:
        statistics = llm.generate("x", SamplingParams(max_tokens=13)).statistics
    assert statistics.num_drafts == 3
    assert statistics.num_accepted_tokens == 12 - 3


def test_what_tensorrt_llm_is_asked(bundles: Path, double: Any) -> None:
    double.LLM.answer = staticmethod(lambda ids: [9] * 4)
    with LLM(bundles / "trtllm") as llm:
        llm.generate("x", SamplingParams(max_tokens=4, temperature=0.7, top_k=5, top_p=0.9, seed=3))
        llm.generate("x", SamplingParams(max_tokens=4, stop_token_ids=(11,)))
        llm.generate("x", SamplingParams(max_tokens=4, ignore_eos=True))
    made = double.made[0]
    sampled, greedy, endless = (request.params.values for request in made.requests)
    expected = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "seed": 3}
    assert {key: sampled[key] for key in expected} == expected
    assert greedy["top_k"] == 1
    assert "temperature" not in greedy
    eos = [2, 0]  # of the shipped target
    assert [greedy["end_id"], *greedy["stop_token_ids"]] == [*eos, 11]
    assert endless["ignore_eos"]
    assert endless["stop_token_ids"] is None
    speculative = made.kwargs["speculative_config"].values
    assert speculative["speculative_model"] == str(bundles / "trtllm" / "drafter")
    assert speculative["attention_backend"] == "FA4"
    assert made.model == str(bundles / "trtllm" / "target")


def test_a_target_without_a_drafter(bundles, double, tmp_path, monkeypatch) -> None:
    """Drafts are from a request's own text, by a class of TensorRT-LLM's own, and no drafter's attention is needed."""
    for package in ATTENTION:
        monkeypatch.delitem(sys.modules, package)
    asked: dict[str, Any] = {"engine": "tensorrt-llm", "no_drafter": True, "block_size": 8}
    bundle = build("tiny", None, tmp_path / "alone", options=TensorRTLLMOptions(gpu="h100"), **asked)
    assert not [name for name in bundle.manifest["files"] if "drafter" in name]
    assert bundle.manifest["cache_bytes_per_token"]["drafter"] == 0
    with LLM(bundles / "onnx") as ours, LLM(bundle.path) as theirs:
        expected = ours.generate(PROMPTS, SamplingParams(max_tokens=30))
        found = theirs.generate(PROMPTS, SamplingParams(max_tokens=30))
        assert [each.token_ids for each in found] == [each.token_ids for each in expected]
        for source in ("lookup", "drafter,lookup"):
            theirs.generate(PROMPTS[:1], SamplingParams(max_tokens=4), draft_source=source)
        with pytest.raises(DFlashError, match="draft_source is drafter"):
            theirs.generate("x", draft_source="drafter")
    drafting = double.made[0].kwargs["speculative_config"]
    assert isinstance(drafting, double.llmapi.SADecodingConfig)
    assert drafting.values == {
        "decoding_type": "SA", "max_draft_len": 7, "max_matching_ngram_size": -1, "enable_global_pool": False,
    }  # fmt: skip
    assert double.made[0].kwargs["kv_cache_config"].values["enable_block_reuse"] is True


def test_what_it_cannot_do_is_refused_by_name(bundles: Path, double: Any) -> None:
    with LLM(bundles / "trtllm") as llm:
        refused: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
            ("speculate", {}, {"speculate": False}), ("block_length is 3", {}, {"block_length": 3}),
            ("draft_source is lookup, but .* from: drafter", {}, {"draft_source": "lookup"}),
            ("min_p", {"min_p": 0.1, "temperature": 1.0}, {}), ("logprobs", {"logprobs": True}, {}),
            ("repetition_penalty", {"repetition_penalty": 1.2}, {}), ("bad_words", {"bad_words": ("no",)}, {}),
        ]  # fmt: skip
        for message, params, options in refused:
            with pytest.raises(RequestError, match=message):
                llm.generate("x", SamplingParams(**params), **options)
        with pytest.raises(DFlashError, match="gives no logits"):
            llm.logits([1, 2])
    assert double.made[0].requests == []


def test_a_refused_request_leaves_the_others_alone(bundles: Path, double: Any) -> None:
    def answer(ids: list[int]) -> list[int]:
        if len(ids) == 2:
            raise ValueError("no such luck")
        return [9] * 40

    double.LLM.answer = staticmethod(answer)
    double.LLM.delay = 0.001

    async def serve() -> None:
        async with AsyncLLM(bundles / "trtllm") as llm:
            params = SamplingParams(max_tokens=40)
            good = [llm.generate([1] * n, params) for n in (1, 3, 4)]
            found = await asyncio.gather(*good, llm.generate([1, 1], params), return_exceptions=True)
            refused = found.pop()
            assert isinstance(refused, RequestError)
            assert "TensorRT-LLM: ValueError: no such luck" in str(refused)
            assert [completion.token_ids for completion in found] == [[9] * 40] * 3

    asyncio.run(serve())


def test_an_engine_that_fails_ends_everything(bundles: Path, double: Any) -> None:
    def fail(ids: list[int]) -> list[int]:
        raise RuntimeError("CUDA error")

    double.LLM.answer = staticmethod(fail)

    async def serve() -> None:
        async with AsyncLLM(bundles / "trtllm") as llm:
            with pytest.raises(DFlashError, match="TensorRT-LLM: RuntimeError: CUDA error"):
                await llm.generate([1], SamplingParams(max_tokens=4))
            with pytest.raises(DFlashError, match="the engine failed"):
                await llm.generate([1], SamplingParams(max_tokens=4))

    asyncio.run(serve())


def test_many_at_once_with_cancellation_and_deadlines(bundles: Path, double: Any) -> None:
    double.LLM.answer = staticmethod(lambda ids: [len(ids)] * 60)
    double.LLM.delay = 0.001

    async def serve() -> None:
        async with AsyncLLM(bundles / "trtllm") as llm:
            params = SamplingParams(max_tokens=60)
            whole = [llm.generate([1] * n, params) for n in range(3, 9)]
            late = llm.generate([1], SamplingParams(max_tokens=60), timeout=0.0)
            stream = llm.stream([1, 1], params)
            assert (await anext(stream)).token_ids == [2]
            await stream.aclose()
            for n, completion in zip(range(3, 9), await asyncio.gather(*whole), strict=True):
                assert completion.token_ids == [n] * 60
            assert (await late).finish_reason == "timeout"
            assert llm.in_flight == 0

    asyncio.run(serve())
    assert double.made[0].aborted >= 1
    assert double.made[0].closed


def test_an_installed_release_that_lacks_fields_is_reported_before_loading(
    bundles, double, monkeypatch
) -> None:
    del double.llmapi.DFlashDecodingConfig.model_fields["attention_backend"]
    del double.llmapi.TorchLlmArgs.model_fields["stream_interval"]
    double.__version__ = "1.2.1"
    with pytest.raises(DFlashError) as raised:
        LLM(bundles / "trtllm")
    for part in (
        "stream_interval is not a field of its TorchLlmArgs",
        "speculative_config: DFlashDecodingConfig: extra fields not permitted: ['attention_backend']",
        "1.2.1",
    ):
        assert part in str(raised.value)
    monkeypatch.delattr(double.llmapi, "DFlashDecodingConfig")
    with pytest.raises(DFlashError, match="DFlashDecodingConfig"):
        LLM(bundles / "trtllm")
    assert double.made == []


@pytest.mark.parametrize(
    ("lacks", "message"),
    [
        ("value", r"kv_cache_config: .* dtype should be .* not 'auto'. Install 1\.4\.0rc1"),
        ("flashinfer", r"is FA4, but flashinfer .*pip install flashinfer-python"),
        ("tensorrt_llm", r"needs tensorrt_llm, not installed here.*tensorrt-llm/release:1\.4\.0rc1"),
        ("libcuda", r"cannot be imported \(OSError: libcuda\).*tensorrt-llm/release:1\.4\.0rc1"),
    ],
)
def test_what_is_missing_here_is_reported_before_loading(
    bundles, double, monkeypatch, lacks, message
) -> None:
    if lacks == "value":
        double.llmapi.KvCacheConfig.model_fields["dtype"]["enum"] = ["fp8", "nvfp4"]
    elif lacks == "libcuda":
        monkeypatch.setattr(driver.importlib, "import_module", Mock(side_effect=OSError(lacks)))
    else:
        monkeypatch.setitem(sys.modules, lacks, None)
    with pytest.raises(DFlashError, match=message):
        LLM(bundles / "trtllm")
    assert double.made == []


def test_a_selftest_has_no_passes_to_read(bundles, double, capsys) -> None:
    assert main(["selftest", str(bundles / "trtllm")]) == 1
    assert capsys.readouterr().err.endswith("selftest` reads passes; use `verify`\n")


def test_another_release_that_takes_every_field_is_a_warning(bundles, double, caplog) -> None:
    double.__version__ = "1.4.0rc2"
    LLM(bundles / "trtllm").close()
    assert "made for TensorRT-LLM 1.4.0rc1, 1.4.0rc2 is installed" in caplog.text

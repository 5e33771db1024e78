"""A stand-in for tensorrt_llm: only the calls of its reference, with their argument names.

Configuration classes accept exactly the fields of a release's schema. An LLM "generates" the result of
`answer(prompt)`, in responses like those of an engine with DFlash: one token after the prompt, then a run per
decoding iteration.
"""

from __future__ import annotations

import asyncio
import json
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, Literal, Self

from dflash_trt.engines.packages import TRTLLM_VERSION

# The fields of the release's TorchLlmArgs, with their sources.
SCHEMA: dict[str, Any] = json.loads(Path(__file__).with_name("llm_args.json").read_text())
Answer = Callable[[list[int]], list[Any]]  # tokens; an exception among them ends the request


def _config(name: str, schema: Mapping[str, Any]) -> type:
    fields = {key: dict(value) for key, value in schema["properties"].items()}  # tests change them

    def init(self: Any, **values: Any) -> None:
        if unknown := set(values) - set(fields):
            raise TypeError(f"{name}: extra fields not permitted: {sorted(unknown)}")
        for key, value in values.items():
            allowed = fields[key].get("enum")
            if allowed and value not in allowed:
                raise ValueError(f"{name}: {key} should be one of {allowed}, not {value!r}")
        self.values = values

    return type(name, (), {"__init__": init, "model_fields": fields})


class SamplingParams:
    """The documented fields that a caller may set here. Others are refused."""

    KNOWN = frozenset(
        [
            "end_id", "pad_id", "max_tokens", "bad", "bad_token_ids", "stop", "stop_token_ids",
            "include_stop_str_in_output", "n", "best_of", "use_beam_search", "top_k", "top_p", "seed",
            "temperature", "min_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty",
            "min_p", "logprobs", "return_perf_metrics", "exclude_input_from_output", "ignore_eos",
            "detokenize", "add_special_tokens", "skip_special_tokens",
        ]
    )  # fmt: skip

    def __init__(self, **values: Any) -> None:
        if unknown := set(values) - self.KNOWN:
            raise TypeError(f"SamplingParams got unexpected arguments {sorted(unknown)}")
        self.values = values


class CompletionOutput:
    def __init__(self) -> None:
        self.index, self.text = 0, ""
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None


class RequestOutput:
    """Iterated over with `async for`: yields itself after every response."""

    def __init__(self, llm: LLM, prompt: list[int], params: SamplingParams) -> None:
        self.llm, self.prompt_token_ids, self.params = llm, prompt, params
        self.outputs = [CompletionOutput()]
        self.decoding_iter = 0
        self.finished = self.aborted = False
        self._responses = self._run()

    def abort(self) -> None:
        self.aborted = True
        self.llm.aborted += 1

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Self:
        await asyncio.sleep(self.llm.delay)
        for _ in self._responses:
            return self
        raise StopAsyncIteration

    def _run(self) -> Iterator[None]:
        v, output = self.params.values, self.outputs[0]
        if len(self.prompt_token_ids) + v["max_tokens"] > self.llm.max_seq_len:
            raise ValueError("the request is longer than max_seq_len")
        ends = set() if v.get("ignore_eos") else {v["end_id"]}
        ends |= set(v.get("stop_token_ids") or ())
        tokens = self.llm.answer(self.prompt_token_ids)[: v["max_tokens"]]
        end = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
        at = 0
        while at < end and not self.aborted:
            run = 1 if at == 0 else self.llm.runs[self.decoding_iter % len(self.llm.runs)]
            self.decoding_iter += 1
            for token in tokens[at : min(at + run, end)]:
                if isinstance(token, Exception):
                    raise token
                output.token_ids.append(token)
            at += run
            if at >= end:
                self.finished = True
                output.finish_reason = "stop" if tokens[end - 1] in ends else "length"
            yield
        if self.aborted and not self.finished:
            self.finished, output.finish_reason = True, "cancelled"
            yield


class LLM:
    """`tensorrt_llm.LLM`: documented arguments, then fields of TorchLlmArgs."""

    answer: Answer
    runs: Sequence[int]
    delay: float = 0.0
    fields: frozenset[str]
    made: list[LLM]

    def __init__(
        self,
        model: str | Path,
        tokenizer: Any = None,
        tokenizer_mode: Literal["auto", "slow"] = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        if unknown := set(kwargs) - self.fields:
            raise TypeError(f"LLM got unexpected arguments {sorted(unknown)}")
        assert Path(model, "config.json").is_file(), model
        drafting = kwargs["speculative_config"].values
        if drafting["decoding_type"] == "DFlash":
            assert Path(drafting["speculative_model"], "config.json").is_file(), drafting
        self.model, self.kwargs, self.skip_tokenizer_init = model, kwargs, skip_tokenizer_init
        self.max_seq_len: int = kwargs["max_seq_len"]
        self.aborted, self.closed = 0, False
        self.requests: list[RequestOutput] = []
        self.made.append(self)

    def generate_async(
        self, inputs: list[int], sampling_params: SamplingParams | None = None, streaming: bool = False
    ) -> RequestOutput:
        assert self.skip_tokenizer_init
        assert isinstance(inputs, list), "text needs a tokenizer"
        assert isinstance(sampling_params, SamplingParams)
        assert sampling_params.values.get("end_id") is not None, "end_id is needed without a tokenizer"
        assert streaming
        self.requests.append(RequestOutput(self, inputs, sampling_params))
        return self.requests[-1]

    def shutdown(self) -> None:
        self.closed = True


def make_double(answer: Answer, *, version: str = TRTLLM_VERSION, runs: Sequence[int] = (1, 3, 8)) -> Any:
    """A module of that release. `runs`: the numbers of tokens of the decoding iterations, in turn."""
    schemas = {**SCHEMA["$defs"], "TorchLlmArgs": SCHEMA}
    made: list[LLM] = []
    members = {
        "answer": staticmethod(answer), "runs": runs, "fields": frozenset(SCHEMA["properties"]), "made": made,
    }  # fmt: skip
    module: Any = types.ModuleType("tensorrt_llm")
    module.__version__ = version
    module.__spec__ = ModuleSpec("tensorrt_llm", None)
    module.LLM = type("LLM", (LLM,), members)
    module.SamplingParams = SamplingParams
    module.made = made
    module.llmapi = types.SimpleNamespace(**{name: _config(name, schema) for name, schema in schemas.items()})
    return module

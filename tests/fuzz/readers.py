"""All readers of strangers' input: the files that each reads, and a call that reads them.

A call must return or raise DFlashError within the limits that run.py sets.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from pydantic import ValidationError

from dflash_trt import LLM, SamplingParams
from dflash_trt.building.build import build
from dflash_trt.building.defaults import choose_block_size, choose_max_seq_len
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.checkpoint.catalogue import known_configs
from dflash_trt.checkpoint.linears import stored_linear
from dflash_trt.checkpoint.pair import check_pair, check_tokenizers
from dflash_trt.checkpoint.quantization import read_quantization
from dflash_trt.checkpoint.rope import inverse_frequencies
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.errors import DFlashError, RequestError
from dflash_trt.models.configs import read_drafter_config, read_target_config
from dflash_trt.prompts import read_prompts
from dflash_trt.serving.openai import reading
from dflash_trt.serving.openai.errors import ApiError, from_validation
from dflash_trt.serving.openai.protocol import (
    ChatRequest,
    CompletionRequest,
    ResponsesRequest,
    SamplingFields,
)
from dflash_trt.serving.openai.structure import form_of
from dflash_trt.text import chat_template
from dflash_trt.text.chat_template import ChatTemplates
from dflash_trt.text.sandbox import Sandbox
from dflash_trt.text.tokenizer import Tokenizer
from tests.fuzz.mutate import mutate_bytes, mutate_json, mutate_safetensors, mutate_text

Mutator = Callable[[Random, bytes], bytes]
Files = Mapping[str, tuple[bytes, Mutator]]
TINY = known_configs("tiny")


@dataclass(frozen=True)
class Reader:
    """`prepare` writes the files that never change into a directory. `files`: name -> valid content, and its
    mutation.
    """

    files: Callable[[Path], Files]
    read: Callable[[Path], object]
    prepare: Callable[[Path], object] = lambda directory: None


def _safetensors(tensors: Mapping[str, tuple[str, list[int], int]]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(end)


_SHARD = _safetensors(
    {
        "model.layers.0.q_proj.weight": ("F8_E4M3", [4, 8], 32),
        "model.layers.0.q_proj.weight_scale": ("F32", [], 4),
        "model.norm.weight": ("BF16", [8], 16),
        "packed": ("F4", [2, 8], 8),
    }
)
_OTHER = _safetensors({"lm_head.weight": ("F32", [2, 4], 32)})
_FIRST = ("model.layers.0.q_proj.weight", "model.layers.0.q_proj.weight_scale", "model.norm.weight", "packed")
_INDEX = {
    "weight_map": {
        **dict.fromkeys(_FIRST, "model-00001-of-00002.safetensors"),
        "lm_head.weight": "model-00002-of-00002.safetensors",
    }
}
_QUANTIZED = {
    "producer": {"name": "modelopt", "version": "0.47"},
    "quantization": {
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": None,
        "exclude_modules": ["lm_head", "model.layers.1*"],
        "quantized_layers": {
            "model.layers.0.q_proj": {"quant_algo": "FP8"},
            "b": {"quant_algo": "NVFP4", "group_size": 16},
        },
    },
}
_MODELOPT = {
    "quantization_config": {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"weights": {"group_size": 16, "num_bits": 4}}},
    }
}


def _checkpoint(directory: Path) -> None:
    checkpoint = Checkpoint(directory)
    for name in list(checkpoint.tensors)[:50]:
        assert checkpoint.array(name).nbytes == checkpoint.tensors[name].nbytes
    stored_linear(checkpoint, "model.layers.0.q_proj", 8, 4)
    checkpoint.expect("model.norm.weight", (8,), ("BF16",))


def _target(directory: Path) -> None:
    config = read_target_config(directory)
    inverse_frequencies(config.rope, config.head_dim, config.max_position_embeddings)
    choose_max_seq_len(None, config, read_drafter_config(TINY[1]))


def _drafter(directory: Path) -> None:
    config = read_drafter_config(directory)
    inverse_frequencies(config.rope, config.head_dim, config.max_position_embeddings)
    target = read_target_config(known_configs("qwen3-8b")[0])
    choose_block_size(None, target, config)
    check_pair(target, config)


def _quantization(directory: Path) -> None:
    found = read_quantization(directory)
    for layer in ("lm_head", "model.layers.0.q_proj", "model.layers.1.mlp.experts.99.down_proj"):
        found.algorithm(layer)
    assert found.name is None or found.algorithms


def _tokenizer(directory: Path) -> None:
    tokenizer = Tokenizer(directory)
    for text in ("Hello, world! 12", "漢字 \x00\ufffd", ""):
        with suppress(RequestError):
            tokenizer.decode(tokenizer.encode(text)[:1000])
    check_tokenizers(directory, TINY[1], 1)


def _template(directory: Path) -> None:
    chat_template._SANDBOX = _quick_renderer()
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": None, "tool_calls": [{}]},
    ]
    templates = ChatTemplates(directory)
    for name in list(templates.sources)[:2]:
        templates.render(name, {"messages": messages, "add_generation_prompt": True, "tools": None})


@cache
def _quick_renderer() -> Sandbox:
    return Sandbox("chat_renderer", processes=1, seconds=1, memory=1 << 30)


@cache
def _llm(bundle: Path) -> LLM:
    return LLM(bundle, max_batch_size=2)


def _requests(directory: Path) -> None:
    """The requests of clients, by every way in. Admitted ones are decoded for some tokens."""
    llm = _llm(directory / "bundle")
    request = _parsed(directory / "request.json")
    if not isinstance(request, dict):
        return
    asked = request.get("params")
    known = (
        {k: v for k, v in asked.items() if k in SamplingParams.__dataclass_fields__}
        if isinstance(asked, dict)
        else {}
    )
    prompt: Any = request.get("prompt")
    with suppress(DFlashError):
        params = SamplingParams(**known)
        short = SamplingParams(**{**known, "max_tokens": min(params.max_tokens, 3)})
        llm.generate(prompt, short, speculate=True, block_length=request.get("block_length"))
    kwargs = request.get("kwargs")
    llm.chat_prompt(request.get("messages"), kwargs if isinstance(kwargs, dict) else None)


def _bodies(directory: Path) -> None:
    """A body of the OpenAI server, as each of its endpoints reads it."""
    body = (directory / "body.json").read_bytes()
    for kind in (ChatRequest, CompletionRequest, ResponsesRequest):
        try:
            reading.check_values(body)
            made = kind.model_validate_json(body)
            if isinstance(made, CompletionRequest):
                made.prompts()
                asked: SamplingFields = made
            else:
                asked = chat = made.chat() if isinstance(made, ResponsesRequest) else made
                reading.tools(chat.tools)
                reading.tool_choice(chat.tool_choice)
                chat.conversation()
            form_of(asked)
            asked.sampling()
        except ValidationError as error:
            raise DFlashError(from_validation(error).message) from None
        except ApiError as error:
            raise DFlashError(error.message) from None


_BODY = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "7"},
    ],
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "d", "name": "g", "input": "x"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "7"}]},
    ],
    "prompt": [[1, 2], "x"],
    "tools": [
        {"type": "function", "function": {"name": "f", "parameters": {}}, "cache_control": {}}, {"type": "web_search"},
    ],
    "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"function": {"name": "f"}}]},
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
    "stop": ["x"], "logit_bias": {"5": 1}, "seed": -1, "temperature": 0.001, "max_tokens": 2.0, "truncation": "auto",
    "stream_options": {"include_usage": True}, "length_penalty": 1.0, "documents": None, "text": {"format": None},
    "reasoning": {"effort": "low"}, "include": ["reasoning.encrypted_content"], "metadata": {"a": "b"},
}  # fmt: skip


def _parsed(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        return None


_PARAMS = SamplingParams(
    max_tokens=3, temperature=0.7, top_k=5, top_p=0.9, min_p=0.01, repetition_penalty=1.1,
    presence_penalty=0.1, frequency_penalty=0.1, seed=1, stop=["end"], stop_token_ids=[5], bad_words=["bad"],
    logprobs=True,
)  # fmt: skip
_REQUEST = {
    "prompt": [1, 2, 3], "params": asdict(_PARAMS), "block_length": 4,
    "messages": [{"role": "user", "content": "What is 17 + 25?"}], "kwargs": {"enable_thinking": False},
}  # fmt: skip


def _known(name: str, role: int) -> Callable[[Path], Files]:
    directory = known_configs(name)[role]
    names = [n for n in ("config.json", "generation_config.json") if (directory / n).is_file()]
    return lambda _: {n: ((directory / n).read_bytes(), mutate_json) for n in names}


def _tokenizer_files(directory: Path) -> Files:
    return {"tokenizer.json": ((TINY[0] / "tokenizer.json").read_bytes(), mutate_json)}


def _template_files(directory: Path) -> Files:
    settings = json.loads((TINY[0] / "tokenizer_config.json").read_text())
    template = settings["chat_template"].encode()
    return {
        "tokenizer_config.json": (json.dumps(settings).encode(), mutate_json),
        "chat_template.jinja": (template, mutate_text),
    }


def _bundle(directory: Path) -> None:
    build("tiny", None, directory / "bundle", max_seq_len=64)


def _manifest(directory: Path) -> Files:
    return {"bundle/manifest.json": ((directory / "bundle" / "manifest.json").read_bytes(), mutate_json)}


def _fixed(**files: tuple[object, Mutator]) -> Callable[[Path], Files]:
    return lambda directory: {
        name: (content if isinstance(content, bytes) else json.dumps(content).encode(), mutator)
        for name, (content, mutator) in files.items()
    }


_PROMPTS = b'{"id": "a", "category": "c", "prompt": "text"}\n{"messages": [{"role": "user", "content": "x"}]}'

READERS: Mapping[str, Reader] = {
    "safetensors": Reader(_fixed(**{"model.safetensors": (_SHARD, mutate_safetensors)}), _checkpoint),
    "index": Reader(
        _fixed(**{"model.safetensors.index.json": (_INDEX, mutate_json)}),
        _checkpoint,
        lambda d: [
            (d / f"model-0000{i}-of-00002.safetensors").write_bytes(data)
            for i, data in ((1, _SHARD), (2, _OTHER))
        ],
    ),
    "config-qwen3": Reader(_known("qwen3-8b", 0), _target),
    "config-llama": Reader(_known("llama-3.1-8b", 0), _target),
    "config-qwen3-moe": Reader(_known("qwen3-coder-30b-a3b", 0), _target),
    "config-gpt-oss": Reader(_known("gpt-oss-20b", 0), _target),
    "config-drafter": Reader(_known("qwen3-8b", 1), _drafter),
    "quantization": Reader(_fixed(**{"hf_quant_config.json": (_QUANTIZED, mutate_json)}), _quantization),
    "quantization-config": Reader(_fixed(**{"config.json": (_MODELOPT, mutate_json)}), _quantization),
    "tokenizer": Reader(
        _tokenizer_files, _tokenizer, lambda d: shutil.copyfile(TINY[0] / "config.json", d / "config.json")
    ),
    "template": Reader(_template_files, _template),
    "prompts": Reader(
        _fixed(**{"prompts.jsonl": (_PROMPTS, mutate_bytes)}), lambda d: read_prompts(d / "prompts.jsonl", 0)
    ),
    "prompt": Reader(
        _fixed(**{"prompts.jsonl": (_PROMPTS.split(b"\n")[1], mutate_json)}),
        lambda d: read_prompts(d / "prompts.jsonl", 0),
    ),
    "manifest": Reader(_manifest, lambda d: Bundle.open(d / "bundle"), _bundle),
    "bodies": Reader(_fixed(**{"body.json": (_BODY, mutate_json)}), _bodies),
    "requests": Reader(_fixed(**{"request.json": (_REQUEST, mutate_json)}), _requests, _bundle),
}

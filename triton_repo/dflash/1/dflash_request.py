"""One request to the model: the message to the engine that its inputs make, and the responses to it."""

from __future__ import annotations

import contextlib
import json
import threading
from typing import Any

import dflash_wire as wire
import numpy as np
import triton_python_backend_utils as pb_utils

SAMPLING = (
    *("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "ignore_eos"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
# Inputs of TensorRT-LLM's models for what this model lacks, with the values that ask for nothing. Tensors may be empty.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "beam_width": (1,), "length_penalty": (1.0, 0.0), "beam_search_diversity_rate": (0.0,), "decoder_text_input": ("",),
    **dict.fromkeys(("early_stopping", "return_context_logits", "return_generation_logits"), (False,)),
    **dict.fromkeys(("prompt_table_extra_id", "prompt_vocab_size", "lora_task_id"), (0,)),
    **dict.fromkeys(("prompt_embedding_table", "lora_weights", "lora_config"), ()),
}  # fmt: skip
# guided_decoding_guide_type: the field of StructuredOutputs.
GUIDES = {
    "json": "json_object",
    "json_schema": "json",
    "regex": "regex",
    "ebnf_grammar": "grammar",
    "choice": "choice",
}
# The engine's names of fields: the inputs of this model.
NAMES = {
    "stop": "stop_words",
    "n": "num_return_sequences",
    "top_logprobs": "num_top_log_probs",
    "logit_bias": "embedding_bias_words",
    **dict.fromkeys(("json", "regex", "choice", "grammar", "structured_outputs"), "guided_decoding_guide"),
}
CODES = {"BUSY": "UNAVAILABLE"}  # codes that Triton does not have
PARAMETERS = {"id", "timeout"}
MAX_NESTING = 100  # levels of lists and objects in an input of JSON
TIMES = ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns")


class Refused(Exception):
    """An impossible request. The message names the input."""


class PendingRequest:
    """The state of a request until its last response."""

    def __init__(self, sender: Any) -> None:
        self.wanted: set[str] = set()
        self.prompt = ""  # the input that has it
        self.num_input_tokens, self.left = 0, 1  # sequences that have not ended
        self.cum_log_probs: dict[int, float] = {}  # by sequence
        self._sender, self._lock = sender, threading.Lock()
        self._over = False  # answered, or known to be cancelled

    def send(self, response: Any, *, final: bool) -> None:
        """Send a response. After a final one there is none."""
        with self._lock:
            self._over = self._over or final
            try:
                flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
                self._sender.send(response, flags=flags)
            except pb_utils.TritonModelException as error:  # this response is lost, the model continues
                pb_utils.Logger.log_error(f"dflash: a response could not be sent: {error}")

    def refuse(self, code: str, message: str) -> None:
        """Answer with an error."""
        error = pb_utils.TritonError(message, getattr(pb_utils.TritonError, CODES.get(code, code)))
        self.send(pb_utils.InferenceResponse(error=error), final=True)

    def give_up(self, error: Exception) -> None:
        """Answer a request with an error, unless its last answer was sent."""
        if not self._over:
            self.refuse("INTERNAL", f"{type(error).__name__}: {error}")

    def has_left(self) -> bool:
        """Whether the client has left. Asking after the last response would crash the server."""
        with self._lock:
            if self._over or not self._sender.is_cancelled():
                return False
            self._over = True
            return True


class Inputs:
    """The inputs of a request by name."""

    def __init__(self, request: Any) -> None:
        self.given = {tensor.name(): tensor for tensor in request.inputs()}

    def numbers(self, name: str) -> list[Any]:
        """The values of a numeric input; none if it is absent."""
        values = self.given[name].as_numpy().ravel() if name in self.given else np.array([])
        # The decimal that was written, not its float32 value as a float64.
        return [float(str(v)) for v in values] if values.dtype == np.float32 else values.tolist()

    def strings(self, name: str) -> list[str]:
        """The texts of an input. Raises Refused."""
        try:
            return [v.decode() for v in self.given[name].as_numpy().ravel()] if name in self.given else []
        except UnicodeDecodeError as error:
            raise Refused(f"{name} is not valid UTF-8 (byte {error.start})") from error

    def one(self, name: str, default: Any) -> Any:
        """The first value of a numeric input."""
        return self.numbers(name)[0] if name in self.given else default


def read_request(request: Any, pending: PendingRequest) -> wire.EngineRequest:
    """The message to the engine. The rest of the request is kept in `pending`. Raises Refused."""
    inputs = Inputs(request)
    prompts = [name for name in ("text_input", "input_ids", "messages") if name in inputs.given]
    if len(prompts) != 1:
        raise Refused(f"{' and '.join(prompts)} are given, expected one" if prompts else
                      "neither text_input nor input_ids nor messages is given, expected one")  # fmt: skip
    check_neutral(inputs)
    words, weights = inputs.strings("embedding_bias_words"), inputs.numbers("embedding_bias_weights")
    if len(words) != len(weights):
        raise Refused(f"embedding_bias_words has {len(words)}, embedding_bias_weights {len(weights)} values")
    (pending.prompt,) = prompts
    message: wire.EngineRequest = {
        "params": sampling(inputs),
        "end_id": inputs.one("end_id", -1),
        "stream": inputs.one("stream", False),
        "n": inputs.one("num_return_sequences", 1),
        "priority": inputs.one("priority", 0),
        "bias_words": list(zip(words, weights, strict=True)),
        "echo": not inputs.one("exclude_input_in_output", True),
        "speculate": inputs.one("speculate", True),
        "block_length": inputs.one("block_length", None),
        "tree_nodes": inputs.one("tree_nodes", None),
    }
    if pending.prompt == "text_input":
        message["prompt"] = inputs.strings("text_input")[0]
    elif pending.prompt == "input_ids":
        message["prompt"] = inputs.numbers("input_ids")
    else:
        message["messages"] = read_json("messages", inputs.strings("messages")[0], list)
        given_kwargs = inputs.strings("chat_template_kwargs") or ["{}"]
        message["chat_template_kwargs"] = read_json("chat_template_kwargs", given_kwargs[0], dict)
    pending.left = max(1, message["n"])
    parameters = json.loads(request.parameters() or "{}")
    if unknown := sorted(parameters.keys() - PARAMETERS):  # a misspelt field of JSON comes as one
        raise Refused(f"{unknown[0][:100]!r} is not a field of this model; see /v2/models/dflash/config")
    # Microseconds, from gRPC's field or from the "parameters" of an HTTP request.
    timeout = request.timeout() or parameters.get("timeout", 0)
    if not isinstance(timeout, int) or timeout < 0:
        raise Refused(f"parameter timeout is {timeout!r}, expected microseconds, an integer of 0 or more")
    message["timeout"] = timeout / 1e6 or None
    switches = ("return_num_input_tokens", "return_num_output_tokens", "return_perf_metrics")
    pending.wanted = {name for name in switches if inputs.one(name, False)}
    return message


def check_neutral(inputs: Inputs) -> None:
    """Raise Refused for an input that asks for what this model lacks."""
    for name in NEUTRAL.keys() & inputs.given.keys():
        values = inputs.strings(name) if name == "decoder_text_input" else inputs.numbers(name)
        if strange := [value for value in values if value not in NEUTRAL[name]]:
            expected = repr(NEUTRAL[name][0]) if NEUTRAL[name] else "nothing"
            raise Refused(f"{name} is {strange[0]!r}, expected {expected}: this model has no such feature")


def sampling(inputs: Inputs) -> dict[str, Any]:
    """The fields of SamplingParams."""
    params = {name: inputs.numbers(name)[0] for name in SAMPLING if name in inputs.given}
    # TensorRT-LLM's clients send "" for no stop word and -1 for no end_id.
    params["stop"] = [word for word in inputs.strings("stop_words") if word]
    params["bad_words"] = [word for word in inputs.strings("bad_words") if word]
    if "min_length" in inputs.given:
        params.setdefault("min_tokens", inputs.numbers("min_length")[0])
    params["top_logprobs"] = inputs.one("num_top_log_probs", 0)
    params["logprobs"] = inputs.one("return_log_probs", False) or bool(params["top_logprobs"])
    kinds, texts = (inputs.strings(f"guided_decoding_guide{end}") for end in ("_type", ""))
    params["structured_outputs"] = guide(kinds, texts)
    return params


def guide(kinds: list[str], texts: list[str]) -> dict[str, Any] | None:
    """The fields of StructuredOutputs, from the inputs of guided decoding. Empty texts count as none."""
    kind, text = (kinds or [""])[0], (texts or [""])[0]
    if not kind and not text:
        return None
    if kind not in GUIDES:
        raise Refused(f"guided_decoding_guide_type is {kind!r}, expected {', '.join(GUIDES)}")
    if bool(text) == (kind == "json"):
        raise Refused(
            f"guided_decoding_guide is {text[:40]!r}, expected {'none' if text else 'one'} for type {kind}"
        )
    if kind == "choice":
        return {"choice": read_json("guided_decoding_guide", text, list)}
    return {GUIDES[kind]: text or True}


def read_json(name: str, text: str, kind: type) -> Any:
    """The value of an input that is JSON of this kind. Raises Refused."""
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(read := json.loads(text), kind):
            if is_deeper(read, MAX_NESTING):  # the engine's parser might not read it
                raise Refused(f"{name} has more than {MAX_NESTING} levels of lists and objects")
            return read
    raise Refused(f"{name} is {text[:40]!r}, expected JSON of a {kind.__name__}")


def is_deeper(value: Any, levels: int) -> bool:
    """Whether JSON has more levels of lists and objects than this. Parsers fail on many, or crash."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(levels):
        inside = (inner for each in level for inner in (each.values() if isinstance(each, dict) else each))
        level = [inner for inner in inside if isinstance(inner, dict | list)]
    return bool(level)


def longest_input(message: wire.EngineRequest, prompt: str) -> str:
    """The largest input of a request, and its size. prompt: the input that has the prompt."""
    texts = {prompt: message["prompt"] if "prompt" in message else message["messages"]}
    texts |= {"stop_words": message["params"]["stop"], "bad_words": message["params"]["bad_words"]}
    sizes = {name: len(json.dumps(value)) - 2 for name, value in texts.items()}
    name = max(sizes, key=sizes.__getitem__)
    return f"{name} has {sizes[name]} bytes in JSON"


def named(error: wire.Error, prompt: str) -> str:
    """The text of an engine's error, with this model's name for the field. prompt: the input that has the prompt."""
    field, text = error["field"], error["text"]
    name = prompt if field == "prompt" else NAMES.get(field)
    return name + text.partition(field)[2] if name else text


def tensors(pending: PendingRequest, update: wire.Update) -> list[Any]:
    """The outputs of one response, each with the batch dimension."""
    text, ids = update["text"], update["token_ids"]
    echo_text, echo_ids = update.get("echo", ("", []))
    pending.num_input_tokens = update.get("num_input_tokens", pending.num_input_tokens)
    outputs = {
        "text_output": np.array([[(echo_text + text).encode()]], dtype=object),
        "output_ids": np.array([echo_ids + ids], dtype=np.int32),
    }
    if "return_num_input_tokens" in pending.wanted:
        outputs["num_input_tokens"] = np.array([[pending.num_input_tokens]], dtype=np.int32)
    if "return_num_output_tokens" in pending.wanted:
        outputs["num_output_tokens"] = np.array([[len(ids)]], dtype=np.int32)
    if "logprobs" in update:
        index = update.get("index", 0)
        total = pending.cum_log_probs.get(index, 0.0) + sum(update["logprobs"])
        pending.cum_log_probs[index] = total
        outputs["output_log_probs"] = np.array([[update["logprobs"]]], dtype=np.float32)
        outputs["cum_log_probs"] = np.array([[total]], dtype=np.float32)
    if "index" in update:
        outputs["sequence_index"] = np.array([[update["index"]]], dtype=np.int32)
    if "top_logprobs" in update:
        shape = (1, len(ids), -1, 2) if ids else (1, 0, 0, 2)
        pairs = np.array(update["top_logprobs"], np.float64).reshape(shape)
        outputs["top_log_prob_ids"] = pairs[..., 0].astype(np.int32)
        outputs["top_log_probs"] = pairs[..., 1].astype(np.float32)
    if "finish_reason" in update:
        outputs["finish_reason"] = np.array([[update["finish_reason"].encode()]], dtype=object)
        if "return_perf_metrics" in pending.wanted:
            drafted, accepted = update["num_draft_tokens"], update["num_accepted_tokens"]
            outputs["acceptance_rate"] = np.array([[accepted / max(drafted, 1)]], dtype=np.float32)
            outputs["total_accepted_draft_tokens"] = np.array([[accepted]], dtype=np.int32)
            outputs["total_draft_tokens"] = np.array([[drafted]], dtype=np.int32)
            for name, nanoseconds in zip(TIMES, update["times"], strict=True):
                outputs[name] = np.array([[nanoseconds]], dtype=np.int64)
    return [pb_utils.Tensor(name, values) for name, values in outputs.items()]

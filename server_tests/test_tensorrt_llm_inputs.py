"""Inputs that clients of TensorRT-LLM's models send: chats, guides, several sequences, and neutral values."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from server_tests.serving import Client, Serving, ids_of, refused, tensors

PROMPT = "def add(a, b):"
NEUTRAL: dict[str, Any] = {
    "length_penalty": 1.0, "early_stopping": False, "beam_search_diversity_rate": 0.0, "decoder_text_input": "",
    "return_context_logits": False, "return_generation_logits": False, "prompt_table_extra_id": 0,
    "prompt_vocab_size": 0, "lora_task_id": 0, "num_return_sequences": 1, "guided_decoding_guide_type": "",
    "guided_decoding_guide": "", "min_length": 0,
}  # fmt: skip


def test_values_that_ask_for_nothing_change_nothing(tiny: Serving) -> None:
    plain = tiny.generate(text_input=PROMPT, max_tokens=9)[1]
    for model in ("dflash", "ensemble"):
        status, answer = tiny.generate(model=model, text_input=PROMPT, max_tokens=9, **NEUTRAL)
        assert (status, answer["output_ids"]) == (200, plain["output_ids"])


@pytest.mark.parametrize(
    "fields",
    [
        {"length_penalty": 0.5}, {"return_context_logits": True}, {"lora_task_id": 3}, {"decoder_text_input": "x"},
    ],
)  # fmt: skip
def test_other_values_are_refused_by_name(tiny: Serving, fields: dict[str, Any]) -> None:
    status, answer = tiny.generate(text_input=PROMPT, max_tokens=2, **fields)
    assert (status, next(iter(fields)) in answer["error"]) == (400, True)


def test_an_unknown_field_is_refused(tiny: Serving) -> None:
    status, answer = tiny.generate(text_input=PROMPT, max_token=2)
    assert status == 400
    assert "'max_token' is not a field of this model" in answer["error"]


def test_messages_go_through_the_chat_template(tiny: Serving) -> None:
    messages = json.dumps([{"role": "user", "content": "What is 17 + 25?"}])
    status, chat = tiny.generate(messages=messages, max_tokens=12, exclude_input_in_output=False)
    assert status == 200
    prompt = chat["output_ids"][: -len(tiny.generate(messages=messages, max_tokens=12)[1]["output_ids"])]
    status, same = tiny.generate(input_ids=prompt, max_tokens=12)
    assert chat["output_ids"] == prompt + same["output_ids"]
    for wrong in ("[", "{}"):
        status, answer = tiny.generate(messages=wrong, max_tokens=2)
        assert (status, "messages is" in answer["error"]) == (400, True)


def test_min_tokens_bias_and_top_log_probs(tiny: Serving) -> None:
    ends = {"text_input": PROMPT, "max_tokens": 20, "end_id": 17}
    status, answer = tiny.generate(
        **ends, min_tokens=6, embedding_bias_words=["a"], embedding_bias_weights=[50.0], num_top_log_probs=3
    )
    assert status == 200
    assert len(answer["output_ids"]) >= 6
    assert len(set(answer["output_ids"][:6])) == 1  # the biased token alone
    count = len(answer["output_ids"])
    assert (len(answer["top_log_probs"]), len(answer["top_log_prob_ids"])) == (3 * count, 3 * count)
    best = answer["top_log_probs"][::3]
    assert all(math.isfinite(number) and number <= 0 for number in best)
    status, answer = tiny.generate(
        text_input=PROMPT, embedding_bias_words=["two words"], embedding_bias_weights=[1.0], max_tokens=2
    )
    assert (status, "embedding_bias_words contains 'two words'" in answer["error"]) == (400, True)


def test_several_sequences_are_told_apart(tiny: Serving) -> None:
    fields: dict[str, Any] = {"text_input": PROMPT, "max_tokens": 16, "temperature": 1.0, "ignore_eos": True}
    with Client(tiny.grpc) as client:
        for stream in (False, True):
            answers = client.all(**fields, seed=5, num_return_sequences=2, stream=stream)
            assert {int(answer["sequence_index"][0, 0]) for answer in answers} == {0, 1}
            for index in (0, 1):
                mine = [answer for answer in answers if answer["sequence_index"][0, 0] == index]
                (alone,) = client.all(**fields, seed=5 + index)
                assert ids_of(mine) == ids_of([alone])
                assert [("finish_reason" in answer) for answer in mine].count(True) == 1
        refusal = refused(lambda: client.all(**fields, num_return_sequences=129))
        assert "num_return_sequences is 129" in refusal


def test_a_guide_gives_the_text_its_form(tiny: Serving) -> None:
    pytest.importorskip("llguidance")
    schema = json.dumps({"type": "object", "properties": {"n": {"enum": [1, 22]}}, "required": ["n"],
                         "additionalProperties": False})  # fmt: skip
    ask: dict[str, Any] = {"text_input": PROMPT, "max_tokens": 60}
    for speculate in (True, False):
        guide = {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": schema}
        status, answer = tiny.generate(**ask, **guide, speculate=speculate)
        assert (status, json.loads(answer["text_output"])["n"] in (1, 22)) == (200, True)
    for kind, guide_text, texts in (
        ("choice", '["red", "blue"]', ("red", "blue")),
        ("regex", "[ab]{3}x", None),
    ):
        status, answer = tiny.generate(
            **ask, guided_decoding_guide_type=kind, guided_decoding_guide=guide_text
        )
        assert status == 200
        assert answer["text_output"] in texts if texts else answer["text_output"].endswith("x")
    wrong = {
        "structural_tag": ("x", "guided_decoding_guide_type is"),
        "regex": ("[a", "guided_decoding_guide cannot be compiled"),
        "json": ("{}", "expected none for type json"),
        "": ("x", "guided_decoding_guide_type is ''"),
    }
    for kind, (text, error) in wrong.items():
        status, answer = tiny.generate(**ask, guided_decoding_guide_type=kind, guided_decoding_guide=text)
        assert (status, error in answer["error"]) == (400, True), answer


def test_empty_tensors_of_adapters_are_taken(tiny: Serving) -> None:
    import tritonclient.grpc as grpcclient

    inputs = tensors(text_input=PROMPT, max_tokens=3)
    for name, kind, dtype in (("lora_weights", "FP16", np.float16), ("lora_config", "INT32", np.int32)):
        inputs.append(grpcclient.InferInput(name, [1, 0, 0], kind))
        inputs[-1].set_data_from_numpy(np.zeros((1, 0, 0), dtype))
    with Client(tiny.grpc) as client:
        client.ask(inputs)
        assert len(ids_of(client.rest())) == 3

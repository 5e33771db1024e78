"""Answers to clients: every field over HTTP and gRPC, the engine's own tokens, and errors that name the field."""

from __future__ import annotations

import json
import math
import random
import re
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_trt import SamplingParams
from server_tests.conftest import Served
from server_tests.serving import NUMPY, TYPES, Client, fetch, ids_of, refused, tensors, text_of

PROMPT = "def add(a, b):"
PARAMETERS = [
    {}, {"temperature": 0.7, "top_k": 20, "seed": 2**64 - 1}, {"temperature": 1.0, "top_p": 0.95, "seed": 7},
    {"temperature": 1.3, "min_p": 0.05, "seed": 3, "repetition_penalty": 1.2},
    {"presence_penalty": 0.5, "frequency_penalty": 0.25}, {"ignore_eos": True},
]  # fmt: skip


@pytest.mark.parametrize("fields", PARAMETERS, ids=str)
def test_the_same_answer_over_http_and_grpc_streamed_or_not(served: Served, fields: dict[str, Any]) -> None:
    expected = served.llm.generate(PROMPT, SamplingParams(max_tokens=40, **fields))
    asked = {"text_input": PROMPT, "max_tokens": 40, **fields}
    for model in ("dflash",) if fields else ("dflash", "ensemble"):
        status, answer = served.server.generate(model=model, **asked)
        assert (status, answer["text_output"], answer["finish_reason"]) == (
            200,
            expected.text,
            expected.finish_reason,
        )
        assert answer["output_ids"] == expected.token_ids
        events = list(served.server.generate_stream(model=model, **asked))
        assert "".join(event["text_output"] for event in events) == expected.text
        with Client(served.server.grpc) as client:
            whole = client.all(model=model, **asked)
            assert len(whole) == 1
            streamed = client.all(model=model, stream=True, **asked)
        for answers in (whole, streamed):
            assert (text_of(answers), ids_of(answers)) == (expected.text, expected.token_ids)
            assert answers[-1]["finish_reason"].tolist() == [[expected.finish_reason.encode()]]
        assert all("finish_reason" not in part for part in streamed[:-1])
        assert events[-1]["finish_reason"] == expected.finish_reason


def test_64_requests_at_once_get_the_tokens_of_generate(served: Served) -> None:
    rng = random.Random(0)
    texts = [
        PROMPT, "What is 17 + 25?", "Mila has 58 stickers.", '{"name":', "héllo wörld ", "x = [1, 2, 3]\n",
    ]  # fmt: skip
    prompts = [rng.choice(texts) * rng.randint(1, 4) + str(i % 8) for i in range(64)]
    params = [
        SamplingParams(max_tokens=rng.randint(1, 40), temperature=float(i % 2), seed=i) for i in range(64)
    ]
    expected = [c.token_ids for c in served.llm.generate(prompts, params)]
    order, got = list(range(64)), {str(i): list[dict[str, Any]]() for i in range(64)}
    rng.shuffle(order)
    with Client(served.server.grpc) as one, Client(served.server.grpc) as other:
        for i in order:
            fields: dict[str, Any] = {
                "max_tokens": params[i].max_tokens,
                "temperature": float(i % 2),
                "seed": i,
            }
            if i % 3:
                fields["text_input"] = prompts[i]
            else:
                fields["input_ids"] = served.llm.tokenizer.encode(prompts[i])
            fields |= {"stream": bool(i % 4), "speculate": i % 5 != 0, "block_length": 1 + i % 8}
            (one if i % 2 else other).ask(tensors(**fields), key=str(i))
        for client in (one, other):
            open_requests = 32
            while open_requests:
                key, outputs, last = client.wait()
                got[key].append(outputs)
                open_requests -= last
    assert {key: ids_of(answers) for key, answers in got.items()} == {str(i): expected[i] for i in range(64)}


def test_counts_logprobs_and_timing_are_sent_where_asked_for(served: Served) -> None:
    params = SamplingParams(max_tokens=30, logprobs=True, ignore_eos=True)
    expected = served.llm.generate(PROMPT, params)
    switches = {
        f"return_{x}": True for x in ("num_input_tokens", "num_output_tokens", "perf_metrics", "log_probs")
    }
    asked = {"text_input": PROMPT, "max_tokens": 30, "ignore_eos": True}
    with Client(served.server.grpc) as client:
        streamed = client.all(stream=True, **asked, **switches)
        plain = client.all(**asked)
    assert plain[0].keys() == {"text_output", "output_ids", "finish_reason"}
    counts = [int(part["num_output_tokens"][0, 0]) for part in streamed]
    assert counts == [part["output_ids"].shape[1] for part in streamed]
    assert sum(counts) == 30
    assert {int(part["num_input_tokens"][0, 0]) for part in streamed} == {len(expected.prompt_token_ids)}
    logprobs = [float(x) for part in streamed for x in part["output_log_probs"][0, 0]]
    assert logprobs == pytest.approx(expected.logprobs, abs=2e-3)
    cumulative = [float(part["cum_log_probs"][0, 0]) for part in streamed]
    assert cumulative[-1] == pytest.approx(math.fsum(logprobs), abs=1e-3)
    assert cumulative == sorted(cumulative, reverse=True)
    last = {name: values[0, 0] for name, values in streamed[-1].items() if values.shape == (1, 1)}
    drafted, accepted = int(last["total_draft_tokens"]), int(last["total_accepted_draft_tokens"])
    assert 0 < accepted <= drafted
    assert accepted + len(expected.token_ids) > accepted
    assert last["acceptance_rate"] == pytest.approx(accepted / drafted)
    names = ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns")
    times = [int(last[name]) for name in names]
    assert times == sorted(times)
    assert 0 < times[-1] - times[0] < 60e9
    _, answer = served.server.generate(**asked, **switches)
    assert answer["num_output_tokens"] == 30
    assert answer["total_draft_tokens"] == drafted


def test_words_ends_and_the_prompt_itself(served: Served) -> None:
    server, llm = served.server, served.llm
    free = llm.generate(PROMPT, SamplingParams(max_tokens=40, ignore_eos=True))
    stop = free.text[len(free.text) // 2 :][:3]
    expected = llm.generate(PROMPT, SamplingParams(max_tokens=40, ignore_eos=True, stop=[stop, "qqq"]))
    asked = {"text_input": PROMPT, "max_tokens": 40, "ignore_eos": True}
    _, answer = server.generate(**asked, stop_words=["qqq", stop])
    assert (answer["text_output"], answer["finish_reason"]) == (expected.text, "stop")
    # The values that TensorRT-LLM's own examples send.
    _, answer = server.generate(**asked, stop_words="", bad_words="", pad_id=2, end_id=-1, beam_width=1)
    assert answer["output_ids"] == free.token_ids
    _, answer = server.generate(**asked, end_id=free.token_ids[9])
    assert answer["output_ids"] == free.token_ids[: free.token_ids.index(free.token_ids[9]) + 1]
    word = llm.tokenizer.decode(free.token_ids[4:5])
    banned = llm.generate(PROMPT, SamplingParams(max_tokens=40, ignore_eos=True, bad_words=[word]))
    _, answer = server.generate(**asked, bad_words=[word])
    assert answer["output_ids"] == banned.token_ids != free.token_ids
    for stream in (False, True):
        with Client(server.grpc) as client:
            whole = client.all(**asked, exclude_input_in_output=False, stream=stream)
        assert text_of(whole) == PROMPT + free.text
        assert ids_of(whole) == free.prompt_token_ids + free.token_ids


def test_every_byte_of_a_text_comes_through(served: Served) -> None:
    text = 'a\x00b "quoted" \\ \n\t é 漢字 🙂 </s>'
    expected = served.llm.generate(text, SamplingParams(max_tokens=12))
    with Client(served.server.grpc) as client:
        answers = client.all(text_input=text, max_tokens=12, exclude_input_in_output=False)
    assert text_of(answers) == served.llm.tokenizer.decode(expected.prompt_token_ids) + expected.text
    status, answer = served.server.generate(text_input=text, max_tokens=12)
    assert (status, answer["text_output"]) == (200, expected.text)


# Fields beside the prompt, and the expected error.
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"text_input": ""}, "text_input is empty"), ({"text_input": "a b " * 600}, "text_input has .* tokens"),
    ({"text_input": "a" * 1_000_000}, "text_input has 1000000 bytes"),
    ({"text_input": "a" * 60_000}, "text_input has 60000 bytes"),
    ({"text_input": "a", "stop_words": ["b" * 1_000_000]}, "stop_words has 1000000 characters"),
    ({"text_input": "a", "bad_words": ["b" * 9_000]}, "bad_words has 9000 characters"),
    ({"input_ids": []}, "input_ids is empty"), ({"input_ids": [1, 10**9]}, "input_ids has token id 1000000000"),
    ({"input_ids": [-1]}, "input_ids has token id -1"),
    ({"input_ids": [-1], "exclude_input_in_output": False, "stream": True}, "input_ids has token id -1"),
    ({"text_input": "a", "input_ids": [1]}, "text_input and input_ids are given"),
    ({"max_tokens": 3}, "neither text_input nor input_ids"),
    ({"text_input": "a", "max_tokens": 0}, "max_tokens is 0"),
    ({"text_input": "a", "max_tokens": 10_000}, "max_tokens is 10000"),
    ({"text_input": "a", "temperature": -1.0}, "temperature is -1"),
    ({"text_input": "a", "temperature": float("nan")}, "temperature is nan"),
    ({"text_input": "a", "temperature": float("inf")}, "temperature is inf"),
    ({"text_input": "a", "top_p": 0.0}, "top_p is 0"), ({"text_input": "a", "top_k": -2}, "top_k is -2"),
    ({"text_input": "a", "min_p": 2.0}, "min_p is 2"),
    ({"text_input": "a", "repetition_penalty": 1e-30}, "repetition_penalty is 1e-30"),
    ({"text_input": "a", "presence_penalty": 1e6}, "presence_penalty is 1"),
    ({"text_input": "a", "frequency_penalty": -1e6}, "frequency_penalty is -1"),
    ({"text_input": "a", "beam_width": 4}, "beam_width is 4"), ({"text_input": "a", "end_id": -7}, "end_id is -7"),
    ({"text_input": "a", "end_id": 10**9}, "end_id is 1000000000"),
    ({"text_input": "a", "block_length": 0}, "block_length is 0"),
    ({"text_input": "a", "block_length": 99}, "block_length is 99"),
    ({"text_input": "a", "stop_words": ["x"] * 2000}, "stop_words has 2000"),
    ({"text_input": "a", "bad_words": ["x"] * 2000}, "bad_words has 2000"),
    ({"text_input": b"a\xff\xfe"}, "text_input is not valid UTF-8 .byte 1"),
    ({"text_input": "a", "stop_words": [b"ok", b"\xc3"]}, "stop_words is not valid UTF-8"),
    ({"text_input": "a", "bad_words": [b"\x80"]}, "bad_words is not valid UTF-8"),
    ({"text_input": "a", "seed": [1, 2]}, "seed|text_input"), ({"text_input": ["a", "b"]}, "text_input"),
    # The engine's own parser of JSON reads fewer levels than the first one.
    *(({"messages": "[" * depth + "]" * depth}, "messages") for depth in (101, 970, 980, 985, 990, 2000)),
    (
        {
            "text_input": "a",
            "guided_decoding_guide_type": "choice",
            "guided_decoding_guide": "[" * 985 + "]" * 985,
        },
        "guided_decoding_guide",
    ),
]  # fmt: skip


def test_a_bad_request_is_refused_by_its_field_and_disturbs_no_neighbour(served: Served) -> None:
    expected = served.llm.generate(PROMPT, SamplingParams(max_tokens=300, ignore_eos=True))
    with Client(served.server.grpc) as neighbour:
        asked = {"text_input": PROMPT, "max_tokens": 300, "ignore_eos": True, "stream": True}
        neighbour.ask(tensors(**asked))
        for fields, message in WRONG:
            with Client(served.server.grpc) as client:
                refusal = refused(lambda fields=fields, client=client: client.all(**fields))
            assert re.search(message, refusal), refusal
            if not re.search("nan|inf|xff|x80|xc3", str(fields)):
                status, answer = served.server.generate(**fields)
                assert status == 400, answer
                # Triton itself refuses an empty list, and takes a list for a batch if the model has a scalar.
                if not any(isinstance(v, list) and (not v or n not in LISTS) for n, v in fields.items()):
                    assert re.search(message, answer["error"]), answer
        assert ids_of(neighbour.rest()) == expected.token_ids


def test_wrong_types_shapes_and_bodies(served: Served) -> None:
    server = served.server
    wrong = [
        ("max_tokens", "INT64", np.array([[3]], np.int64)), ("max_tokens", "INT32", np.array([3], np.int32)),
        ("max_tokens", "INT32", np.array([[3, 4]], np.int32)), ("temperature", "FP64", np.array([[0.5]])),
        ("stream", "INT32", np.array([[1]], np.int32)), ("text_input", "BYTES", np.array([["a", "b"]], dtype=object)),
        ("no_such_field", "INT32", np.array([[1]], np.int32)),
    ]  # fmt: skip
    for name, kind, values in wrong:
        extra = grpcclient.InferInput(name, list(values.shape), kind)
        extra.set_data_from_numpy(values)
        with Client(server.grpc) as client:

            def call(client: Client = client, extra: Any = extra) -> None:
                client.ask([*tensors(input_ids=[1]), extra])
                client.wait()

            assert name in refused(call)
    url = f"http://127.0.0.1:{server.http_port}/v2/models/dflash/generate"
    bodies: list[bytes] = [
        b"", b"{", b"[]", b'{"text_input": {"a": 1}}', b'{"text_input": "\xff"}', b'{"max_tokens": "x"}',
    ]  # fmt: skip
    bodies += [
        b'{"text_input": "a", "max_tokens": 99999999999999}',
        b'{"text_input": "a", "parameters": {"timeout": "x"}}',
    ]
    for body in bodies:
        status, text = fetch(url, body)
        assert status >= 400, (body, text)  # for a body that is not JSON, Triton answers 500
        assert "error" in json.loads(text)
    assert server.generate(text_input="a", max_tokens=1)[0] == 200


VALUES = {
    "INT32": st.integers(-(2**31), 2**31 - 1) | st.integers(-1, 40),
    "FP32": st.floats(width=32) | st.floats(0, 2, width=32),
    "FP16": st.floats(width=16),
    "UINT64": st.integers(0, 2**64 - 1),
    "BOOL": st.booleans(),
    "BYTES": st.text(max_size=30) | st.binary(max_size=30),
}
LISTS = ("stop_words", "bad_words", "input_ids")


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """Any of the fields, with any values of their types; mostly one prompt and few tokens."""
    names = draw(st.lists(st.sampled_from(sorted(set(TYPES) - {"max_tokens"})), max_size=6, unique=True))
    fields = {
        name: draw(st.lists(VALUES[TYPES[name]], max_size=5)) if name in LISTS else draw(VALUES[TYPES[name]])
        for name in names
    }
    if "input_ids" not in fields and draw(st.integers(0, 9)):
        fields.setdefault("text_input", draw(st.text(max_size=60)))
    fields["max_tokens"] = draw(st.integers(-1, 12))
    return fields


@given(requests())
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_request_is_answered_or_refused(served: Served, fields: dict[str, Any]) -> None:
    with Client(served.server.grpc) as client:
        refusal = ""
        try:
            client.all(**fields)
        except grpcclient.InferenceServerException as error:
            refusal = str(error.message())
    full = "requests are in flight, which is the limit" in refusal  # by the sequences of one request
    assert not refusal or full or any(name in refusal for name in TYPES), refusal
    assert served.server.ready()


@given(st.sampled_from(sorted(TYPES)), st.binary(max_size=40), st.lists(st.integers(0, 5), max_size=3))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_raw_bytes_of_any_length_do_no_harm(served: Served, name: str, raw: bytes, shape: list[int]) -> None:
    tensor = grpcclient.InferInput(name, shape or [1, 1], TYPES[name])
    tensor._raw_content = raw
    prompt = [] if name in ("text_input", "input_ids") else tensors(text_input="a")
    few = [] if name == "max_tokens" else tensors(max_tokens=2)
    with Client(served.server.grpc) as client:
        client.ask([*prompt, *few, tensor])
        with suppress(grpcclient.InferenceServerException):
            client.rest()
    assert served.server.ready()


def test_statistics_and_metrics(served: Served) -> None:
    """Triton counts them, we count them, and the counts appear a moment later."""
    server = served.server
    server.until(lambda: server.metric("dflash_num_requests_running") == 0)

    def success() -> int:
        stats = json.loads(server.get("/v2/models/dflash/stats")[1])
        return int(stats["model_stats"][0]["inference_count"])

    def tokens() -> float:
        return server.metric("dflash_generation_tokens_total")

    def rounds_of_3() -> float:
        return server.metric("dflash_block_length_rounds_total", length="3")

    before, tokens_before, rounds_before = success(), tokens(), rounds_of_3()
    assert server.generate(text_input=PROMPT, max_tokens=40, ignore_eos=True, block_length=3)[0] == 200
    server.until(lambda: success() > before)
    server.until(lambda: tokens() >= tokens_before + 40)
    server.until(lambda: rounds_of_3() > rounds_before)
    server.until(lambda: server.metric("nv_inference_request_success", model="dflash") >= 1)

    def derived() -> bool:
        shown = server.metrics()
        drafts, drafted, accepted = (
            shown(f"dflash_spec_decode_num_{x}_total") for x in ("drafts", "draft_tokens", "accepted_tokens")
        )
        acceptance = shown("dflash_mean_acceptance_length"), shown("dflash_draft_acceptance_rate")
        return acceptance == pytest.approx((1 + accepted / drafts, accepted / drafted))

    server.until(derived)
    assert 0 < server.metric("dflash_draft_acceptance_rate") < 1
    assert server.metric("dflash_request_success_total", finished_reason="length") > 0
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "request_generation_tokens"):
        shown = server.metrics()
        assert shown(f"dflash_{name}_bucket", le="+Inf") == shown(f"dflash_{name}_count") > 0
    server.until(lambda: server.metric("dflash_num_requests_running") == 0)


def test_types_of_the_fields_are_those_of_the_model(served: Served) -> None:
    config = json.loads(served.server.get("/v2/models/dflash/config")[1])
    assert {
        i["name"]: i["data_type"].removeprefix("TYPE_").replace("STRING", "BYTES") for i in config["input"]
    } == TYPES
    assert all(i["optional"] for i in config["input"])
    assert set(NUMPY) == set(TYPES.values())

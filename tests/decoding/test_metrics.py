"""Metrics agree with the requests' statistics, and these with their rounds."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from dflash_trt.decoding.metrics import Distribution, Metrics
from dflash_trt.decoding.params import SamplingParams
from dflash_trt.decoding.request import Request
from dflash_trt.decoding.results import Statistics
from tests.doubles.exposition import Exposition
from tests.doubles.fake_engines import BLOCK
from tests.doubles.pool import Pool, request
from tests.doubles.schedules import AnyLengths, prompt


@pytest.fixture(scope="module")
def served() -> tuple[Pool, list[Request]]:
    pool, lengths = Pool(3, 5), AnyLengths(3)
    requests = [
        request(
            prompt(5 + i % 9, i % 4),
            SamplingParams(max_tokens=1 + 3 * (i % 7)),
            draft=i % 5 > 0,
            count_prompt=not 30 <= i < 38,
        )
        for i in range(40)
    ]
    requests[7].deadline = 0.0
    for each in requests:
        pool.scheduler.submit(each)
    for step in range(2000):
        if step == 4:
            pool.scheduler.cancel(requests[20])
        pool.scheduler.step(lengths)
    return pool, requests


def test_the_sums_are_those_of_the_requests(served) -> None:
    pool, requests = served
    total = Statistics.merge(r.statistics for r in requests)
    prompts = [r.statistics for r in requests if r.output and r.options.count_prompt]
    assert len(prompts) < len(requests) - 8
    found = Exposition(pool.scheduler.metrics.prometheus())
    assert found["prompt_tokens_total"] == sum(s.num_prompt_tokens for s in prompts)
    assert found["prompt_tokens_cached_total"] == sum(s.num_cached_tokens for s in prompts) > 0
    assert found["generation_tokens_total"] == total.num_generation_tokens
    assert found["spec_decode_num_drafts_total"] == total.num_drafts > 0
    assert found["spec_decode_num_draft_tokens_total"] == total.num_draft_tokens
    assert found["spec_decode_num_accepted_tokens_total"] == total.num_accepted_tokens > 0
    assert (found["num_requests_running"], found["num_requests_waiting"]) == (0, 0)


def test_labelled_counters_and_distributions(served) -> None:
    pool, requests = served
    found = Exposition(pool.scheduler.metrics.prometheus())
    reasons = {"stop": 0, "length": 38, "cancelled": 1, "timeout": 1, "error": 0}
    assert found.samples["request_success_total"] == reasons
    total = Statistics.merge(r.statistics for r in requests)
    places = total.num_accepted_tokens_per_pos
    per_place = found.samples["spec_decode_num_accepted_tokens_per_pos_total"]
    assert per_place == {str(i): n for i, n in enumerate(places)}
    assert sum(per_place.values()) == total.num_accepted_tokens
    rounds = found.samples["block_length_rounds_total"]
    assert list(rounds) == [str(n) for n in range(1, len(rounds) + 1)]
    assert 1 < len(rounds) <= BLOCK
    passes = max(len(each.statistics.block_length_histogram) for each in requests)
    assert len(rounds) == passes - 1
    ended = [r for r in requests if r.stop.finish_reason == "length"]
    counts = {
        "time_to_first_token_seconds": sum(bool(r.output) for r in requests),
        "request_queue_time_seconds": sum(bool(r.output) for r in requests),
        "e2e_request_latency_seconds": len(ended),
        "request_time_per_output_token_seconds": sum(r.params.max_tokens > 1 for r in ended),
        "request_prefill_time_seconds": sum(bool(r.output) for r in requests),
        "request_decode_time_seconds": sum(bool(r.output) for r in requests),
        "request_prompt_tokens": sum(bool(r.output) and r.options.count_prompt for r in requests),
        "request_generation_tokens": len(requests),
        "spec_decode_num_accepted_tokens_per_draft": total.num_drafts,
        "inter_token_latency_seconds": sum(max(0, r.statistics.num_generation_tokens - 1) for r in requests),
    }
    for name, count in counts.items():
        assert found[f"{name}_count"] == count
    times = [r.statistics.time_per_output_token for r in ended if r.params.max_tokens > 1]
    assert found["request_time_per_output_token_seconds_sum"] == pytest.approx(sum(times))


def test_each_round_is_in_the_histogram_of_each_request(served) -> None:
    for each in served[1]:
        histogram = each.statistics.block_length_histogram
        assert sum(histogram[2:]) == each.statistics.num_drafts
        drafted = sum((n - 1) * count for n, count in enumerate(histogram) if n)
        assert drafted == each.statistics.num_draft_tokens


def test_before_anything_was_served() -> None:
    found = Exposition(Metrics().prometheus())
    assert found["generation_tokens_total"] == found["time_to_first_token_seconds_count"] == 0


def test_what_became_of_prefixes(served) -> None:
    pool, _ = served
    found, counts = Exposition(pool.scheduler.metrics.prometheus()), vars(pool.prefixes.counts)
    assert counts["kept_tokens"] > counts["tokens"] > 0
    assert counts["reused_tokens"] > 0
    for name, value in counts.items():
        end = "_total" if name.split("_")[0] in ("kept", "reused", "dropped", "refused") else ""
        assert found[f"prefix_cache_{name}{end}"] == value


def test_gauges_follow_the_steps() -> None:
    pool = Pool(2, 2, chunk=4)
    for i in range(5):
        pool.scheduler.submit(request(prompt(6, i), SamplingParams(max_tokens=9)))
    seen: list[Any] = []
    for _ in range(4):
        pool.scheduler.step(AnyLengths(1))
        found = Exposition(pool.scheduler.metrics.prometheus())
        seen.append((found["num_requests_running"], found["num_requests_waiting"]))
        scheduler = pool.scheduler
        rows = sum(each.committed for each in scheduler._running)
        assert found["kv_cache_usage_perc"] == pytest.approx(rows / (2 * scheduler.pair.capacity))
        assert rows > 0
    assert seen[0] == (1, 4)
    assert (2, 3) in seen


def test_buckets() -> None:
    times = Distribution()
    for value in (0.0, 1e-4, 1.0, 1e6):
        times.add(value)
    assert sum(times.counts) == 4
    assert (times.counts[0], times.counts[-1]) == (2, 1)


def test_another_thread_may_read_while_it_is_written() -> None:
    pool, stop = Pool(3, 3), threading.Event()
    texts: list[str] = []

    def read() -> None:
        while not stop.is_set():
            texts.append(pool.scheduler.metrics.prometheus())

    reader = threading.Thread(target=read)
    reader.start()
    lengths = AnyLengths(2)
    for i in range(60):
        pool.scheduler.submit(request(prompt(3, i), SamplingParams(max_tokens=6)))
    while not pool.scheduler.idle:
        pool.scheduler.step(lengths)
    stop.set()
    reader.join()
    generated = [Exposition(text)["generation_tokens_total"] for text in texts[:: len(texts) // 20 + 1]]
    assert generated == sorted(generated)


def test_servers_with_counters_and_gauges_only_show_the_same_numbers(served) -> None:
    """Including prefixes and the buckets of histograms. The rates of drafting are computed."""
    metrics = served[0].scheduler.metrics
    found = Exposition(metrics.prometheus())
    shown: dict[str, dict[str, float]] = {}
    for name, text, labels, value in json.loads(json.dumps(metrics.samples())):
        assert text
        shown.setdefault(name.removeprefix("dflash_"), {})["".join(labels.values())] = value
    for family, kind in found.types.items():
        name = family.removeprefix("dflash_")
        if kind == "histogram":
            for end in ("bucket", "sum", "count"):
                values = found.samples[f"{name}_{end}"]
                assert shown.pop(f"{name}_{end}") == pytest.approx(values)
        else:
            name += "_total" * (kind == "counter")
            assert shown.pop(name) == found.samples[name]
    total = Statistics.merge(r.statistics for r in served[1])
    assert shown == {
        "mean_acceptance_length": {"": total.mean_acceptance_length},
        "draft_acceptance_rate": {"": total.draft_acceptance_rate},
    }


def drafted(*rounds: tuple[int, int]) -> Statistics:
    statistics = Statistics()
    for length, accepted in rounds:
        statistics.record_round(length, accepted)
    return statistics


def test_figures_of_one_request() -> None:
    statistics = drafted((7, 7), (7, 0), (7, 2), (3, 2))
    assert statistics.num_drafts == 4
    assert statistics.num_draft_tokens == 24
    assert statistics.num_accepted_tokens == 11
    assert statistics.num_accepted_tokens_per_pos == [3, 3, 1, 1, 1, 1, 1]
    assert statistics.acceptance_histogram == [1, 0, 2, 0, 0, 0, 0, 1]
    assert statistics.mean_acceptance_length == statistics.tokens_per_pass == pytest.approx(1 + 11 / 4)
    statistics.record_round(0, 0)  # a pass without a draft
    assert statistics.mean_acceptance_length == pytest.approx(1 + 11 / 4)
    assert statistics.tokens_per_pass == pytest.approx(1 + 11 / 5)
    assert statistics.draft_acceptance_rate == pytest.approx(11 / 24)


def test_nodes_of_trees() -> None:
    statistics = drafted((3, 1))
    for drafts, accepted in ((7, 2), (15, 3), (0, 0)):
        statistics.record_round(drafts, accepted, tree=True)
    assert (statistics.num_trees, statistics.num_tree_nodes) == (2, 8 + 16)
    assert statistics.mean_tree_nodes == 12
    assert drafted((3, 1)).mean_tree_nodes == 0


def test_merge_adds_up() -> None:
    a, b = drafted((3, 1), (3, 3)), drafted((7, 6))
    a.num_generation_tokens, a.time_to_first_token, a.generation_time, a.verify_time = 6, 1.0, 5.0, 0.5
    b.num_generation_tokens, b.time_to_first_token, b.generation_time, b.verify_time = 8, 4.0, 7.0, 0.25
    merged = Statistics.merge([a, b])
    assert merged.acceptance_histogram == [0, 1, 0, 1, 0, 0, 1, 0]
    assert merged.num_accepted_tokens == a.num_accepted_tokens + b.num_accepted_tokens
    assert merged.num_drafts == 3
    assert merged.num_requests == 2
    assert merged.time_to_first_token == 2.5
    assert merged.time_per_output_token == 1.0
    assert merged.verify_time == 0.75
    assert Statistics.merge([merged, Statistics()]).num_requests == 3
    assert a.acceptance_histogram == [0, 1, 0, 1]
    assert Statistics.merge([]).num_requests == 0


def test_to_dict_is_json_and_has_the_derived_figures() -> None:
    values = json.loads(json.dumps(drafted((3, 1)).to_dict()))
    assert values["mean_acceptance_length"] == 2.0
    assert values["num_accepted_tokens_per_pos"] == [1, 0, 0]
    assert values["num_draft_tokens"] == 3
    nothing = Statistics(num_generation_tokens=1).to_dict()
    assert (nothing["mean_acceptance_length"], nothing["draft_acceptance_rate"]) == (1.0, 0.0)
    assert (nothing["num_accepted_tokens_per_pos"], nothing["time_per_output_token"]) == ([], 0.0)

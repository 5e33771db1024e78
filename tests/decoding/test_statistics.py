from __future__ import annotations

import json

import pytest

from dflash_trt.decoding.results import Statistics


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

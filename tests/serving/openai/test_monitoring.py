"""The dashboard and the alerts ask for metrics that the server has."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.serving.openai.conftest import Server

FOLDER = Path(__file__).parents[3] / "monitoring"


def expressions() -> list[str]:
    panels = json.loads((FOLDER / "grafana" / "dashboard.json").read_text())["panels"]
    rules = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"][0]["rules"]
    return [target["expr"] for panel in panels for target in panel["targets"]] + [
        rule["expr"] for rule in rules
    ]


@pytest.fixture(scope="module")
def names(server: Server) -> set[str]:
    server.post("/v1/completions", {"prompt": "x = [", "max_tokens": 30})
    return set(re.findall(r"^(dflash_\w+)", server.http.get("/metrics").text, re.MULTILINE))


def test_every_metric_of_the_dashboard_and_the_alerts_exists(names: set[str]) -> None:
    asked = {name for text in expressions() for name in re.findall(r"dflash_\w+", text)}
    assert len(asked) > 15
    assert asked <= names


def test_metrics_are_prometheus_text_with_histograms(server: Server, names: set[str]) -> None:
    text = server.http.get("/metrics").text
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"):
        counts = [float(n) for n in re.findall(rf"^dflash_{name}_bucket\{{le=\S+ (\S+)$", text, re.MULTILINE)]
        assert counts == sorted(counts)
        assert counts[-1] == float(re.search(rf"^dflash_{name}_count (\S+)$", text, re.MULTILINE)[1])  # type: ignore[index]

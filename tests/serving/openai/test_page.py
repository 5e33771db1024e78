"""The page, which loads nothing from elsewhere (test_browser.py has it in a browser), and the metrics."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.serving.openai.conftest import Server


def scripts(server: Server) -> str:
    return "".join(server.http.get(f"/page/{name}.js").text for name in ("page", "markdown"))


def test_the_page_and_its_parts_are_served_with_a_policy(server: Server) -> None:
    for path, kind in (
        ("/", "text/html"),
        ("/page/page.css", "text/css"),
        ("/page/page.js", "text/javascript"),
        ("/page/markdown.js", "text/javascript"),
    ):
        answer = server.http.get(path)
        assert (answer.status_code, answer.headers["content-type"].split(";")[0]) == (200, kind)
        assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert server.http.get("/page/index.html").status_code == 404
    assert server.http.get("/page/..%2fapp.py").status_code == 404


def test_what_the_page_sets_in_place_of_the_server_s_defaults_is_said_there(server: Server) -> None:
    inputs = re.findall(r'<input id="(\w+)" type="number"([^>]*)>', server.http.get("/").text)
    values = {name: re.search(r' value="(\d+)"', rest) for name, rest in inputs}
    assert {"temperature", "tokens"} <= {name for name, value in values.items() if value}
    for name, rest in inputs:
        if value := values[name]:
            assert f'title="The page sets {value[1]}' in rest, name


def test_the_page_names_only_files_and_elements_that_exist(server: Server) -> None:
    page, script = server.http.get("/").text, scripts(server)
    links = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert [link for link in links if server.http.get(f"/{link}").status_code != 200] == ["data:,"]
    assert "http" not in page + script
    used = set(re.findall(r'\$\("([\w-]+)"\)', script)) | {
        f"{n}-{x}" for n in ("plain", "draft") for x in ("bar", "text", "figures", "strip", "rate")
    }
    assert used <= set(re.findall(r'id="([\w-]+)"', page))


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
        assert counts[-1] == float(re.search(rf"^dflash_{name}_count (\S+)$", text, re.MULTILINE)[1])

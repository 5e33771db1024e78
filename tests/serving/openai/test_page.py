"""The page is served whole, and loads nothing from elsewhere. test_browser.py has the same page in a browser."""

from __future__ import annotations

import re

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


def test_the_page_names_only_files_and_elements_that_exist(server: Server) -> None:
    page, script = server.http.get("/").text, scripts(server)
    links = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert [link for link in links if server.http.get(f"/{link}").status_code != 200] == ["data:,"]
    assert "http" not in page + script
    used = set(re.findall(r'\$\("([\w-]+)"\)', script)) | {
        f"{n}-{x}" for n in ("plain", "draft") for x in ("bar", "text", "figures", "strip", "rate")
    }
    assert used <= set(re.findall(r'id="([\w-]+)"', page))

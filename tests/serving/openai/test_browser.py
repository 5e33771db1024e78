"""The page in a real browser: Chromium, driven by Playwright. Nothing here runs where one of them is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from build_scripts.browser import chromium, missing
from tests.serving.openai.conftest import Server

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))
QUESTION = "What is the difference between Borvik and Torva in trade and food?"
PATIENCE = 60_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as opened:
        yield opened


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens a page. At the end none may have had an error, or asked another host for anything."""
    pages, faults = list[Any](), list[str]()

    def opened(url: str, **options: Any) -> Any:
        page = browser.new_page(**options)
        pages.append(page)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda said: said.type in ("error", "warning") and faults.append(said.text))
        page.on("request", lambda asked: asked.url.startswith(f"{url}/") or faults.append(asked.url))
        page.goto(f"{url}/")
        page.locator("#state.up").wait_for(timeout=PATIENCE)
        return page

    opened.faults = faults  # type: ignore[attr-defined]
    yield opened
    for page in pages:
        page.close()
    assert faults == []


def ask(page: Any, text: str, button: str = "#ask [type=submit]", **settings: str) -> None:
    for field, value in settings.items():
        page.fill(f"#{field}", value)
    page.fill("#prompt", text)
    page.click(button)


def done(page: Any) -> None:
    page.locator("#stop:disabled").wait_for(timeout=PATIENCE)


def texts(page: Any, selector: str) -> list[str]:
    found: list[str] = page.locator(selector).all_text_contents()
    return found


def test_a_chat_streams_and_colours_the_accepted_drafts(server: Server, opened: Callable[..., Any]) -> None:
    page = opened(server.url)
    page.evaluate(
        """() => { window.seen = [];
        const look = () => seen.push(document.querySelectorAll(".assistant span").length);
        new MutationObserver(look).observe(document.getElementById("messages"), {childList: true, subtree: true}); }"""
    )
    ask(page, QUESTION)
    done(page)
    answer = server.openai.chat.completions.create(
        model="tiny", temperature=0, max_tokens=128, messages=[{"role": "user", "content": QUESTION}]
    )
    assert texts(page, ".assistant > div:first-child") == [answer.choices[0].message.content]
    assert len(set(page.evaluate("() => seen"))) > 3  # it grew in steps
    speculation = answer.usage.model_extra["speculation"]  # type: ignore[index,union-attr]
    drafted, own = page.locator(".assistant .drafted").first, page.locator(".assistant .own").first
    ground = "e => getComputedStyle(e).backgroundColor"
    assert drafted.evaluate(ground) != own.evaluate(ground)
    bars = {name: page.locator(f".assistant .strip {which}").count() for name, which in
            (("accepted", "i[class='']"), ("own", ".ends"), ("missed", ".missed"))}  # fmt: skip
    assert bars["accepted"] == speculation["accepted_tokens"] > 10
    assert bars["accepted"] + bars["missed"] == speculation["draft_tokens"]
    assert bars["accepted"] + bars["own"] == answer.usage.completion_tokens  # type: ignore[union-attr]
    figures = texts(page, ".assistant .figures")[0]
    assert f"of {speculation['draft_tokens']} drafts accepted" in figures
    assert f"{answer.usage.completion_tokens} tokens" in figures  # type: ignore[union-attr]


def test_a_race_gives_the_same_text_with_and_without_drafts(
    server: Server, opened: Callable[..., Any]
) -> None:
    page = opened(server.url)
    ask(page, QUESTION, "#race", temperature="0.8", seed="7", tokens="48")
    done(page)
    plain, drafted = texts(page, "#plain-text, #draft-text")
    assert plain == drafted != ""
    assert "the same text" in texts(page, "#verdict")[0]
    assert page.locator("#plain-text .drafted").count() == 0 < page.locator("#draft-text .drafted").count()
    assert page.locator("#plain-strip > span").count() > page.locator("#draft-strip > span").count()
    assert [int(each.split()[0]) > 0 for each in texts(page, ".lane .name b")] == [True, True]


def test_the_charts_follow_the_server(server: Server, opened: Callable[..., Any]) -> None:
    page = opened(server.url)
    ask(page, QUESTION)
    ask(page, QUESTION, "#race")
    done(page)
    page.wait_for_function("() => document.querySelectorAll('.chart polyline')[0].points.length > 2")
    titles = texts(page, ".chart p > span")
    most = dict(zip(titles, texts(page, ".chart small"), strict=True))
    assert {
        "Tokens per second",
        "Tokens per round",
        "Batch",
        "KV cache in use",
        "Prefix cache in use",
    } <= set(titles)
    for title in ("Tokens per second", "Tokens per round", "Prefix cache in use"):
        assert float(most[title].split()[1]) > 0, most
    for area in page.locator(".chart polygon").all():
        assert "NaN" not in area.get_attribute("points")


def test_a_chat_remembers_is_stopped_and_cleared(server: Server, opened: Callable[..., Any]) -> None:
    page = opened(server.url)
    ask(page, "Compare Eskara and Sellin by size and age.", tokens="12")
    done(page)
    before = server.metric('dflash_request_success_total{finished_reason="cancelled"}')
    ask(page, "And Borvik?", tokens="400", temperature="2")
    page.locator(".assistant").nth(1).locator(".own").nth(2).wait_for(timeout=PATIENCE)
    page.click("#stop")
    done(page)
    server.until(
        lambda: server.metric('dflash_request_success_total{finished_reason="cancelled"}') == before + 1
    )
    assert page.locator(".message").count() == 4
    page.click("#clear")
    assert page.locator(".message").count() == 0
    assert page.locator("#welcome").is_visible()


def test_a_refusal_is_shown_and_the_question_stays(server: Server, opened: Callable[..., Any]) -> None:
    page = opened(server.url)
    ask(page, "word " * 600)
    page.locator(".message.error").wait_for(timeout=PATIENCE)
    assert "tokens" in texts(page, ".message.error")[0]
    assert page.locator(".message.user, .message.assistant").count() == 0
    assert page.input_value("#prompt").startswith("word word")
    assert len(opened.faults) == 1  # type: ignore[attr-defined]
    assert "400" in opened.faults.pop()  # type: ignore[attr-defined]  # the browser notes the status


def test_text_is_readable_in_light_and_dark(server: Server, opened: Callable[..., Any]) -> None:
    grounds = set()
    for scheme in ("light", "dark"):
        page = opened(server.url, color_scheme=scheme)
        for selector in (
            "#state",
            ".legend .drafted",
            ".legend .own",
            ".chart b",
            ".chart small",
            "#ask [type=submit]",
            "#welcome",
        ):
            ink, ground = page.locator(selector).first.evaluate(
                """element => { const own = getComputedStyle(element); let at = element;
                while (/, 0\\)$/.test(getComputedStyle(at).backgroundColor)) at = at.parentElement;
                return [own.color, getComputedStyle(at).backgroundColor]; }"""
            )
            assert contrast(ink, ground) > 4.5, (scheme, selector, ink, ground)
        grounds.add(page.locator("body").evaluate("e => getComputedStyle(e).backgroundColor"))
    assert len(grounds) == 2


def contrast(one: str, other: str) -> float:
    """The ratio of two colours as WCAG 2.2 defines it, from CSS's rgb(r, g, b)."""

    def luminance(colour: str) -> float:
        parts = [int(each) / 255 for each in colour[colour.index("(") + 1 : -1].split(",")[:3]]
        red, green, blue = (
            each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def test_nothing_is_cut_off_on_a_phone(server: Server, opened: Callable[..., Any]) -> None:
    page = opened(server.url, viewport={"width": 360, "height": 740}, is_mobile=True, has_touch=True)
    ask(page, QUESTION + " " + "x" * 200, "#race", tokens="8")
    done(page)
    assert page.evaluate("() => document.documentElement.scrollWidth") == 360
    for part in page.locator("button, input, .lane, .chart").all():
        box = part.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 360


def test_the_page_says_when_the_server_is_gone(server: Server, opened: Callable[..., Any]) -> None:
    page = opened(server.url)
    page.context.set_offline(True)
    page.locator("#state.down").wait_for(timeout=PATIENCE)
    assert texts(page, "#state") == ["The server does not answer"]
    page.context.set_offline(False)
    page.locator("#state.up").wait_for(timeout=PATIENCE)
    assert all("INTERNET_DISCONNECTED" in fault for fault in opened.faults)  # type: ignore[attr-defined]
    opened.faults.clear()  # type: ignore[attr-defined]

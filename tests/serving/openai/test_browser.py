"""The page in a real browser: Chromium, driven by Playwright. Nothing here runs where one of them is missing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.serving.openai.conftest import Server

playwright = pytest.importorskip(
    "playwright.sync_api", reason="there is no playwright: pip install playwright"
)
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium")
# The browser itself sends nothing to its vendor. A container has no sandbox and no GPU.
ARGUMENTS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking \
    --disable-component-update --disable-sync"
)
QUESTION = "What is the difference between Borvik and Torva in trade and food?"
PATIENCE = 60_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        yield started.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS.split())


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

    opened.faults = faults
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
    contents: list[str] = page.locator(selector).all_text_contents()
    return contents


def test_a_chat_streams_and_colours_the_accepted_drafts(server: Server, opened: Callable[..., Any]) -> None:
    page = opened(server.url)
    # The browser may hand over the whole answer in one piece. Here each event is a piece of its own.
    page.evaluate(
        """() => { const fetch = window.fetch, seen = window.seen = new Set();
        window.fetch = async (url, options) => {
            const answer = await fetch(url, options);
            if (!url.endsWith("completions")) return answer;
            const events = (await answer.text()).match(/[^]*?\\n\\n/g).map((event) => new TextEncoder().encode(event));
            return new Response(new ReadableStream({ async pull(stream) {
                await new Promise((next) => setTimeout(next, 5));
                seen.add(document.querySelectorAll(".assistant span").length);
                if (events.length) stream.enqueue(events.shift()); else stream.close();
            } }, { highWaterMark: 0 }));
        }; }"""
    )
    ask(page, QUESTION)
    done(page)
    answer = server.openai.chat.completions.create(
        model="tiny", temperature=0, max_tokens=128, messages=[{"role": "user", "content": QUESTION}]
    )
    assert texts(page, ".assistant > div:first-child") == [answer.choices[0].message.content]
    assert page.evaluate("() => seen.size") > 3  # it grew in steps
    speculation = answer.usage.model_extra["speculation"]
    drafted, own = page.locator(".assistant .drafted").first, page.locator(".assistant .own").first
    ground = "e => getComputedStyle(e).backgroundColor"
    assert drafted.evaluate(ground) != own.evaluate(ground)
    bars = {name: page.locator(f".assistant .strip {which}").count() for name, which in
            (("accepted", "i[class='']"), ("own", ".ends"), ("missed", ".missed"))}  # fmt: skip
    assert bars["accepted"] == speculation["accepted_tokens"] > 10
    assert bars["accepted"] + bars["missed"] == speculation["draft_tokens"]
    assert bars["accepted"] + bars["own"] == answer.usage.completion_tokens
    figures = texts(page, ".assistant .figures")[0]
    assert f"of {speculation['draft_tokens']} drafts accepted" in figures
    assert f"{answer.usage.completion_tokens} tokens" in figures


def test_a_race_runs_in_turn_and_gives_the_same_text_with_and_without_drafts(server, opened) -> None:
    page = opened(server.url)
    page.evaluate(
        """() => { window.asked = [];
        const fetch = window.fetch, plain = document.getElementById("plain-text");
        window.fetch = (url, options) => {
            if (url.endsWith("completions")) asked.push([JSON.parse(options.body).speculate, plain.textContent]);
            return fetch(url, options); }; }"""
    )
    ask(page, QUESTION, "#race", temperature="0.8", seed="7", tokens="48")
    done(page)
    plain, drafted = texts(page, "#plain-text, #draft-text")
    assert plain == drafted != ""
    # The drafted lane is asked for when the plain one has its whole text.
    assert page.evaluate("() => asked") == [[False, ""], [True, plain]]
    assert page.locator("#plain-text .drafted").count() == 0 < page.locator("#draft-text .drafted").count()
    assert page.locator("#plain-strip > span").count() > page.locator("#draft-strip > span").count()
    slow, fast = (float(each.split()[0]) for each in texts(page, "#plain-rate, #draft-rate"))
    (verdict,) = texts(page, "#verdict")
    assert verdict.startswith(f"{fast / slow:.2f} times as fast with drafts")
    assert "the same text" in verdict


def answering(page: Any, *texts: str) -> None:
    """Let the server answer with these texts, in pieces of seven characters."""
    left = list(texts)

    def fulfil(route: Any) -> None:
        text, events = left.pop(0), list[str]()
        for at in range(0, len(text), 7):
            piece = text[at : at + 7]
            tokens = {"tokens": 2, "accepted": 1, "verified": 3, "drafted": piece[:4], "own": piece[4:]}
            events.append(json.dumps({"choices": [{"delta": {"content": piece}, "rounds": [tokens]}]}))
        body = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"])
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    page.route("**/v1/chat/completions", fulfil)


HOSTILE = """<img src=x onerror="window.broken = 1"> <script>window.broken = 2</script>
[a link](javascript:window.broken=3) ![a picture](http://example.com/x.png) <a href="javascript:void 0">x</a>
**<b onmouseover=alert(1)>bold</b>** and `<svg/onload=alert(1)>`

- <iframe src="javascript:window.broken=4"></iframe>

```html"><script>window.broken = 5</script>
<script>window.broken = 6</script>
```
# <style>* { display: none }</style>
"""


def test_what_a_model_writes_is_never_html(server: Server, opened: Callable[..., Any]) -> None:
    page = opened(server.url)
    answering(page, HOSTILE)
    ask(page, "x")
    done(page)
    kinds = page.locator(".assistant > div:first-child").evaluate(
        "place => [...new Set([...place.querySelectorAll('*')].map(each => each.tagName))].sort()"
    )
    assert kinds == ["BUTTON", "CODE", "DIV", "PRE", "SPAN"]
    attributes = page.locator(".assistant > div:first-child").evaluate(
        "place => [...new Set([...place.querySelectorAll('*')].flatMap(each => each.getAttributeNames()))].sort()"
    )
    assert attributes == ["aria-label", "class", "role", "style", "tabindex", "title", "type"]
    shown = texts(page, ".assistant > div:first-child")[0]
    for line in HOSTILE.splitlines()[:2]:
        assert line in shown  # as it was written
    assert texts(page, ".assistant pre") == ["<script>window.broken = 6</script>"]
    assert texts(page, ".assistant .item > div") == ['<iframe src="javascript:window.broken=4"></iframe>\n']
    assert page.evaluate("() => window.broken") is None
    policy = server.http.get("/").headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy


LISTS = """Two things:

1. **First** of all
   goes on

2. Second:
   - inner *one*
   - inner `two`

Then code:
```python
def add(a, b):

    return a + b  # - no list
```
and the end: 2 ** 3 ** 2."""


def test_code_and_lists_are_drawn(server: Server, opened: Callable[..., Any]) -> None:
    page = opened(server.url)
    answering(page, LISTS)
    ask(page, "x")
    done(page)
    place = page.locator(".assistant > div:first-child")
    assert texts(page, ".assistant pre code") == ["def add(a, b):\n\n    return a + b  # - no list"]
    assert texts(page, ".assistant .bullet") == ["1.", "2.", "•", "•"]
    assert texts(page, ".assistant .item > div") == [
        "**First** of all\n   goes on\n", "Second:\n", "inner *one*\n", "inner `two`\n",
    ]  # fmt: skip
    assert place.locator("> div").last.text_content() == "and the end: 2 ** 3 ** 2."
    # The colours are those of the rounds, inside of what is drawn, too.
    assert place.locator("pre .drafted").count() > 3
    assert place.locator(".item .own").count() > 3
    for selector in (
        "#messages",
        "#plain-text",
        "#draft-text",
        ".code pre",
    ):  # what scrolls has the keyboard, too
        assert page.locator(selector).get_attribute("tabindex") == "0", selector


def test_a_conversation_survives_a_reload_until_it_is_cleared(server, opened) -> None:
    page = opened(server.url)
    ask(page, QUESTION, tokens="24")
    done(page)
    before = page.locator("#messages").inner_html()
    page.reload()
    page.locator(".assistant").wait_for(timeout=PATIENCE)
    assert page.locator("#messages").inner_html() == before
    with page.expect_request("**/v1/chat/completions") as second:
        ask(page, "And Borvik?", tokens="8")
    roles = [each["role"] for each in second.value.post_data_json["messages"]]
    assert roles == ["user", "assistant", "user"]
    done(page)
    page.click("#clear")
    page.reload()
    page.locator("#state.up").wait_for(timeout=PATIENCE)
    assert page.locator(".message").count() == 0
    page.evaluate("() => sessionStorage.setItem('dflash-trt conversation', '[{}')")
    page.reload()
    page.locator("#state.up").wait_for(timeout=PATIENCE)
    assert page.locator(".message").count() == 0
    assert page.locator("#welcome").is_visible()


def test_a_full_context_offers_to_leave_out_the_oldest_turns(server, opened) -> None:
    page = opened(server.url)
    sent = list[list[dict[str, str]]]()
    page.on(
        "request",
        lambda asked: asked.url.endswith("/completions") and sent.append(asked.post_data_json["messages"]),
    )
    questions = [f"Question {number}: compare Eskara and Sellin. " + "word " * 60 for number in range(9)]
    for question in questions:
        ask(page, question, tokens="8")
        done(page)
        if page.locator(".message.error").count():
            break
    button = page.locator(".message.error button")
    assert "Leave out the oldest" in button.text_content()
    asked = len(sent[-1])
    assert asked > 3
    button.click()
    page.wait_for_function(
        "count => document.querySelectorAll('.assistant').length === count", arg=asked // 2 + 1
    )
    done(page)
    assert page.locator(".message.error").count() == 0
    assert sent[-1] == sent[-2][len(sent[-2]) - len(sent[-1]) :]
    assert 0 < len(sent[-1]) < len(sent[-2])
    assert texts(page, ".left") == ["The model no longer sees what is above."]
    page.reload()
    page.locator(".left").wait_for(timeout=PATIENCE)
    assert page.locator(".message.user").count() == asked // 2 + 1
    opened.faults.clear()  # the browser notes each status 400


def test_a_chat_remembers_is_stopped_and_cleared(server: Server, opened: Callable[..., Any]) -> None:
    page = opened(server.url)
    ask(page, "Compare Eskara and Sellin by size and age.", tokens="12")
    done(page)
    before = server.metric('dflash_request_success_total{finished_reason="cancelled"}')
    # Four answers take all of their tokens and are stopped from within the page: a click from outside may be late.
    page.evaluate(
        """() => { const fetch = window.fetch;
        window.fetch = (url, options) => fetch(url, options?.body ? {...options,
            body: JSON.stringify({...JSON.parse(options.body), ignore_eos: true, n: 4})} : options);
        const stop = document.getElementById("stop"), seen = document.querySelectorAll(".own").length;
        new MutationObserver(() => {
            if (document.querySelectorAll(".own").length > seen + 2 && !stop.disabled) stop.click();
        }).observe(document.getElementById("messages"), {childList: true, subtree: true}); }"""
    )
    ask(page, "And Borvik?", tokens="400", temperature="2")
    page.locator(".assistant").nth(1).locator(".own").nth(2).wait_for(state="attached", timeout=PATIENCE)
    done(page)
    server.until(
        lambda: server.metric('dflash_request_success_total{finished_reason="cancelled"}') == before + 4
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
    assert len(opened.faults) == 1
    assert "400" in opened.faults.pop()  # the browser notes the status


def test_nothing_is_cut_off_on_a_phone(server: Server, opened: Callable[..., Any]) -> None:
    page = opened(server.url, viewport={"width": 360, "height": 740}, is_mobile=True, has_touch=True)
    ask(page, QUESTION + " " + "x" * 200, "#race", tokens="8")
    done(page)
    assert page.evaluate("() => document.documentElement.scrollWidth") == 360
    for part in page.locator("button, input, .lane").all():
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
    assert all("INTERNET_DISCONNECTED" in fault for fault in opened.faults)
    opened.faults.clear()

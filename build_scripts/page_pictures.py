"""Draw the pictures of the server's page, docs/page_*.webp, in a browser: a chat and a race on a real server.

    python -m build_scripts.page_pictures BUNDLE [--questions FILE]

It needs playwright (pip install playwright) and Chromium (apt-get install chromium). The figures in the pictures are
those of the machine that drew them.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from build_scripts import harness
from build_scripts.browser import chromium, missing

DOCS = Path(__file__).parent.parent / "docs"
QUESTIONS = [
    "What is the difference between Borvik and Torva in trade and food?",
    "Tara has 13 oranges, keeps 3 and shares the rest equally among 5 friends. How many oranges does each friend get?",
    "Please implement `count_odd`: given a list of scores, return how many of them are odd.",
]
# Name, width and height in CSS pixels, device pixels for each, and colours.
PICTURES = [
    ("light", 1280, 900, 1.0, "light"),
    ("dark", 1280, 900, 1.0, "dark"),
    ("phone", 390, 844, 1.25, "dark"),
]
PATIENCE = 240_000  # milliseconds; the machine may be busy


def main() -> None:
    """Draw all pictures."""
    parser = harness.parser(__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument(
        "--questions", type=Path, metavar="FILE", help="one per line; the last one is the race's"
    )
    args = parser.parse_args()
    if why := missing():
        parser.error(why)
    questions = args.questions.read_text(encoding="utf-8").splitlines() if args.questions else QUESTIONS
    with harness.openai_server(args.bundle, "--stream-interval=0") as server, chromium() as browser:
        for name, width, height, scale, colours in PICTURES:
            page = browser.new_page(
                viewport={"width": width, "height": height}, device_scale_factor=scale, color_scheme=colours
            )
            page.goto(f"http://127.0.0.1:{server.port}/")
            picture = _draw(page, questions)
            file = DOCS / f"page_{name}.webp"
            file.write_bytes(_webp(picture))
            print(f"{file.relative_to(DOCS.parent)}  {file.stat().st_size / 1000:.0f} kB")
            page.close()


def _draw(page: Any, questions: list[str]) -> bytes:
    """Ask, race with the last question, and take the page: all of a wide one, of a phone's the race."""
    for number, question in enumerate(questions):
        page.fill("#prompt", question)
        page.click("#ask [type=submit]" if number < len(questions) - 1 else "#race")
        page.locator("#stop:disabled").wait_for(timeout=PATIENCE)
    page.mouse.move(0, 0)
    page.wait_for_timeout(1200)  # the charts take the counters of the race
    wide = page.viewport_size["width"] > 1000
    page.evaluate(
        "wide => scrollTo(0, wide ? 0 : document.getElementById('race-section').offsetTop - 8)", wide
    )
    picture: bytes = page.screenshot(full_page=wide)
    return picture


def _webp(png: bytes) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").save(out, "WEBP", quality=75, method=6)
    return out.getvalue()


if __name__ == "__main__":
    main()

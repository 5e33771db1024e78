"""A browser without a window, for the tests and pictures of the server's page: Chromium as Debian packages it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# The browser itself sends nothing to its vendor. A container has no sandbox and no GPU.
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def missing() -> str | None:
    """The name of a missing part and how to install it; None if both parts are here."""
    try:
        import playwright  # noqa: F401
    except ImportError:
        return "there is no playwright: pip install playwright"
    if shutil.which("chromium") is None:
        return "there is no chromium: apt-get install chromium"
    return None


@contextmanager
def chromium() -> Iterator[Any]:
    """Playwright's browser, with an empty profile."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()

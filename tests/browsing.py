"""One browser for the tests of a file, or of tests/report, which lets no page make a request or report an error."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium of this machine."""
    with started() as running:
        yield running


@contextmanager
def started() -> Iterator[Browser]:
    """Chromium of this machine. While it runs, this thread can run no other event loop."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    path = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if path is None:
        pytest.skip(f"needs one of the browsers {', '.join(_BROWSERS)}")
    with playwright.sync_playwright() as running:
        chromium = running.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def opened(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Open a page in a tab: `opened(path, fragment="", width=1280, dark=False)`.

    At the end of the test, it fails if a tab logged an error, showed a dialog, or asked for
    anything but the page itself.
    """
    with _tabs(browser) as open_page:
        yield open_page


@pytest.fixture(scope="module")
def opened_once(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Like `opened`, for a tab that several tests of a file use, each another part of its page."""
    with _tabs(browser) as open_page:
        yield open_page


@contextmanager
def _tabs(browser: Browser) -> Iterator[Callable[..., Page]]:
    tabs: list[Page] = []
    problems: list[str] = []

    def open_page(path: Path, fragment: str = "", width: int = 1280, dark: bool = False) -> Page:
        scheme: Any = "dark" if dark else "light"
        tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        tab.set_default_timeout(120_000)  # ends a hang; a busy machine is slow
        tabs.append(tab)
        url = path.as_uri()
        tab.on("pageerror", lambda error: problems.append(f"error: {error}"))
        tab.on(
            "console",
            lambda message: (
                problems.append(f"console: {message.text}")
                if message.type in ("error", "warning")
                else None
            ),
        )
        tab.on(
            "request",
            lambda request: (
                problems.append(f"request: {request.url[:200]}")
                if request.url.split("#")[0] != url
                else None
            ),
        )
        tab.on("dialog", lambda dialog: (problems.append("dialog"), dialog.dismiss()))
        tab.goto(url + fragment)
        tab.wait_for_selector("html[data-ready]", state="attached")
        return tab

    yield open_page
    for tab in tabs:
        tab.close()
    assert problems == []


def problems(tab: Page, within: str | None = None) -> list[tuple[str, str]]:
    """What axe finds that is serious or critical, in the page or in a part of it.

    It tests all rules on the light page, and only the colours on the dark one.
    """
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe")
    found = []
    for scheme, rules in (
        ("light", {}),
        ("dark", {"runOnly": {"type": "rule", "values": ["color-contrast"]}}),
    ):
        tab.emulate_media(color_scheme=scheme)
        frames(tab)
        # Without resultTypes, axe describes each element that passes, which takes four times as long.
        options = {**rules, "resultTypes": ["violations"]}
        response = axe.Axe().run(tab, within, options).response
        assert len(response["passes"]) > (0 if rules or within else 10)
        found += [
            (each["id"], each["nodes"][0]["html"])
            for each in response["violations"]
            if each["impact"] in ("serious", "critical")
        ]
    return found


def address(tab: Page, fragment: str) -> None:
    """Follow a link inside the page."""
    tab.evaluate("fragment => { location.hash = fragment }", fragment)
    frames(tab)


def frames(tab: Page) -> None:
    """Wait until what was asked for is painted."""
    tab.evaluate(
        "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
    )

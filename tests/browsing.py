"""One browser for the tests of a file, which lets no page make a request or report an error."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium of this machine."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    path = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if path is None:
        pytest.skip(f"needs one of the browsers {', '.join(_BROWSERS)}")
    with playwright.sync_playwright() as running:
        started = running.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def opened(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Open a page in a tab: `opened(path, fragment="", width=1280, dark=False)`.

    At the end of the test, it fails if a tab logged an error, showed a dialog, or asked for
    anything but the page itself.
    """
    tabs: list[Page] = []
    problems: list[str] = []

    def open_page(path: Path, fragment: str = "", width: int = 1280, dark: bool = False) -> Page:
        scheme: Any = "dark" if dark else "light"
        tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        tab.set_default_timeout(20_000)
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


def problems(tab: Page) -> list[tuple[str, str]]:
    """What axe finds that is serious or critical."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe")
    found: dict[str, Any] = axe.Axe().run(tab).response
    assert len(found["passes"]) > 10
    return [
        (each["id"], each["nodes"][0]["html"])
        for each in found["violations"]
        if each["impact"] in ("serious", "critical")
    ]

"""Names from a trace are text on the page: they run nothing, and load nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from browsing import address
from builders import annotation, call, frame, kernel, span, step, write_capture

from instrument.base.printable import printable

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

HOSTILE = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(2)>",
    "\"'`><svg onload=alert(3)>",
    "javascript:alert(4)//",
    "line\u2028separator\u2029",
    "null\0byte",
    "\u202egnp.exe",
    "<!--<script>",
    "{{ 7 * 7 }} ${alert(5)}",
    "__proto__",
    "constructor",
)


FRAGMENTS = (
    "#<img src=x onerror=alert(1)>",
    "#timeline?from=javascript:alert(1)&to=%00",
    "#verdict?%",
    "#__proto__",
)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a capture in which every name is hostile, its own too."""
    events = [step(0, 0, 20_000), step(1, 20_000, 20_000)]
    for start in (0, 20_000):
        for k, name in enumerate(HOSTILE):
            at, number = start + 1000 * k, start + k + 1
            events += [
                frame(f"f.py({k}): {name}", at, 900),
                annotation(name, at + 10, 800),
                span(f"operator {name}", at + 20, 500),
                call("cudaLaunchKernel", at + 30, 10, number),
                kernel(f"kernel {name}", at + 60, 400, correlation=number),
            ]
    folder = tmp_path_factory.mktemp("hostile")
    path = folder / "report.html"
    write_capture(folder, events, HOSTILE[1]).report(path)
    return path


def test_names_titles_and_fragments_are_text(opened: Callable[..., Page], hostile: Path) -> None:
    tab = opened(hostile, FRAGMENTS[0])
    for fragment in FRAGMENTS[1:]:
        address(tab, fragment)
    assert tab.locator("h1").inner_text() == HOSTILE[1]
    scripts = tab.evaluate("document.scripts.length")
    tab.click("#open-all")
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    shown = tab.evaluate(
        "[...document.querySelectorAll('td, span, button')].flatMap(each => [each.title, each.textContent])"
    )
    for name in HOSTILE:
        for text in (name, f"operator {name}", f"kernel {name}"):
            assert any(printable(text) in each for each in shown), text
    assert tab.evaluate("document.scripts.length") == scripts == 2
    assert tab.evaluate("document.querySelectorAll('img, svg[onload], iframe').length") == 0
    # the fixture asserts that there was no dialog, no request and no error


def test_the_policy_lets_nothing_else_run(browser: Browser, hostile: Path) -> None:
    html = hostile.read_text(encoding="utf-8")
    changed = html.replace(
        "<main", "<script>document.title = 'run'</script><p style='color:red'></p><main", 1
    )
    assert changed != html
    other = hostile.with_name("changed.html")
    other.write_text(changed, encoding="utf-8")
    refused: list[str] = []
    tab = browser.new_page()
    tab.on("console", lambda message: refused.append(message.text))
    tab.goto(other.as_uri())
    tab.wait_for_selector("html[data-ready]", state="attached")
    policy = tab.locator("meta[http-equiv]").get_attribute("content")
    assert policy is not None
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert tab.title() != "run"
    assert any("script" in text for text in refused)
    assert any("style" in text for text in refused)
    tab.close()

"""The parts of a section of the page, and a page of given sections."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from instrument.read.show.page.page import page


def page_of(folder: Path, **sections: Any) -> Path:
    """The file of a page with these sections."""
    path = folder / "report.html"
    payload = {"title": "a", "begin_ns": 0, "sections": sections}
    path.write_text(page(payload).html, encoding="utf-8")
    return path


def parts(section: Any, kind: str) -> list[dict[str, Any]]:
    """All parts of a kind, also those inside others, in the order of the page."""
    return [each for each in _all(section) if each.get("kind") == kind]


def tables(section: Any) -> dict[str, dict[str, Any]]:
    """The tables by their captions."""
    return {table["caption"]: table for table in parts(section, "table")}


def words(section: Any) -> str:
    """All texts of a section, each on its line."""
    return "\n".join(part["text"] for part in parts(section, "text"))


def facts(section: Any) -> dict[str, tuple[str, str]]:
    """The value and the note of each box, by its label."""
    return {
        box["label"]: (box["value"], box["note"])
        for part in parts(section, "facts")
        for box in part["items"]
    }


def _all(part: Any) -> Iterator[dict[str, Any]]:
    if isinstance(part, dict):
        yield part
        for each in part.values():
            yield from _all(each)
    elif isinstance(part, list | tuple):
        for each in part:
            yield from _all(each)

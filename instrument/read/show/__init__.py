"""Reports for readers: text, JSON, Markdown, HTML pages, notebook output, flame graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from instrument.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from instrument.read.show.page.page import Page

__all__ = [
    "Page",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Page": "page.page",
    },
)

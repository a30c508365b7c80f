"""The pictures and sample pages of the documentation, which docs/make_pictures.py makes."""

from __future__ import annotations

import base64
import gzip
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
ASSETS = DOCS / "assets"
PAGES = "".join(page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md"))
PAGES = PAGES.replace("(../assets/", "(assets/")  # from pages in subfolders
SHOWN = set(re.findall(r"\(assets/([\w-]+\.(?:webp|svg))(?:#only-(?:light|dark))?\)", PAGES))


def test_pages_show_every_picture_in_both_colours() -> None:
    made = {path.name for path in ASSETS.iterdir() if path.suffix in (".webp", ".svg")}
    assert made == SHOWN
    for name in SHOWN - {"terminal.svg", "watch.svg"}:
        stem, suffix = name.split(".")
        light = stem.removesuffix("-dark")
        assert f"(assets/{light}.{suffix}#only-light)" in PAGES
        assert f"(assets/{light}-dark.{suffix}#only-dark)" in PAGES


@pytest.mark.parametrize("page", sorted(ASSETS.glob("samples/*.html")), ids=lambda page: page.stem)
def test_a_sample_page_names_no_folder_of_a_person(page: Path) -> None:
    assert f"(assets/samples/{page.name})" in PAGES
    packed = re.findall(r'id="payload">([^<]+)<', page.read_text(encoding="utf-8"))[0]
    payload = gzip.decompress(base64.b64decode(packed)).decode()
    assert not re.findall(r'/(?:home|root|Users|tmp)/[^\s"]*', payload)


@pytest.mark.parametrize("trace", sorted(ASSETS.glob("samples/*.gz")), ids=lambda trace: trace.stem)
def test_a_sample_trace_names_no_folder_of_a_person(trace: Path) -> None:
    assert f"(assets/samples/{trace.name})" in PAGES
    assert not re.findall(rb'/(?:home|root|Users|tmp)/[^\s"]*', gzip.decompress(trace.read_bytes()))

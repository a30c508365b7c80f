"""Memory over time as data and as a page."""

from __future__ import annotations

import gzip
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from builders import Event, allocation, annotation, steps, write_capture

from instrument import Session
from instrument.capture import Capture
from instrument.sinks.memory import Memory

MIB = 1024**2


def memory(at_us: int, mebibytes: int, address: int, total: int) -> Event:
    size, total = mebibytes * MIB, total * MIB
    return allocation(at_us, size, address, total, device=0, reserved=64 * MIB)


MEMORY = [  # in the matrix product of step 3 and of step 4, in forward, and from before
    memory(260, 24, 1, 32),
    memory(650, 6, 2, 38),
    memory(900, -24, 1, 14),
    memory(1300, 10, 3, 24),
    memory(1500, -8, 9, 16),
]


@pytest.fixture
def written(tmp_path: Path) -> Capture:
    hostile = annotation('<script>"&', 640, 20)
    capture = write_capture(tmp_path, [*steps(), hostile, *MEMORY])
    Memory().write(capture, capture.folder)
    return capture


class Page(HTMLParser):
    """What a page holds, told while checking that its tags are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "line"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1].append(data)


def test_the_page_shows_the_peak_the_steps_and_the_sizes(written: Capture) -> None:
    text = (written.folder / "memory.html").read_text(encoding="utf-8")
    page = Page(text)
    assert "<b>38.00 MiB</b>in use at the peak, after 390.000 µs" in text
    assert "<b>64.00 MiB</b>the most memory that the allocator held" in text
    rows = [tuple(row) for row in page.rows]
    assert ("aten::mm", "24.00 MiB", "1", "0 ns") in rows
    assert ("forward/attention", "24.00 MiB", "1", "0 ns") in rows
    assert ('forward/<script>"&', "6.00 MiB", "1", "390.000 µs") in rows
    assert ("[before the window]", "8.00 MiB", "–", "–") in rows
    assert ("3", "8.00 MiB", "6.00 MiB", "38.00 MiB") in rows
    assert ("4", "14.00 MiB", "2.00 MiB", "24.00 MiB") in rows
    assert ("24.00 MiB", "1", "24.00 MiB", "0") in rows
    areas = [attributes for tag, attributes in page.tags if tag == "polygon"]
    assert len(areas) == 3, "before, and two ranges"
    assert [attributes["class"] for attributes in areas] == [
        "series-before",
        "series-0",
        "series-1",
    ]
    assert all(f".series-{name} {{" in text for name in (*range(8), "before", "others", "unknown"))
    for tag, attributes in page.tags:
        for point in re.findall(r"[-\d.]+,[-\d.]+", attributes.get("points") or ""):
            x, y = map(float, point.split(","))
            assert 70 <= x <= 960, tag
            assert 18 <= y <= 318, tag


def test_the_page_loads_nothing_and_runs_nothing(written: Capture) -> None:
    text = (written.folder / "memory.html").read_text(encoding="utf-8")
    page = Page(text)
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in page.tags}
    assert not re.search(r"https?:|url\(|@import|\son\w+=", text)
    policies = [attributes["content"] for _, attributes in page.tags if "http-equiv" in attributes]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'"]


def test_the_data_are_what_the_views_say(written: Capture) -> None:
    data = json.loads((written.folder / "memory.json").read_text())
    memory = written.memory
    assert data["format"] == 1
    for name in ("devices", "steps", "sizes"):
        assert data[name] == [row._asdict() for row in getattr(memory, name)]
    assert data["live_at_peak"]["cuda:0"] == [row._asdict() for row in memory.live("range")]
    (curve,) = data["curves"]
    assert (curve["device"], curve["by"], curve["reserved_bytes"]) == (
        "cuda:0",
        "range",
        [64 * MIB] * 5,
    )
    assert curve["times_ns"] == [260_000, 650_000, 900_000, 1_300_000, 1_500_000]
    assert [sum(values) // MIB for values in zip(*curve["live_bytes"].values())] == [
        32,
        38,
        14,
        24,
        16,
    ]


def test_the_raw_form_has_every_event(written: Capture) -> None:
    raw = json.loads(gzip.decompress((written.folder / "memory.raw.json.gz").read_bytes()))
    events = written.memory.events
    assert raw["columns"] == list(events.columns)
    assert raw["events"] == [list(row) for row in events]
    assert len(events) == len(MEMORY)


def test_forms_kind_and_rows_are_chosen(tmp_path: Path) -> None:
    capture = write_capture(tmp_path, [*steps(), *MEMORY])
    before = {path.name for path in capture.folder.iterdir()}
    Memory(forms=["html"], by="operator", rows=1).write(capture, capture.folder)
    assert {path.name for path in capture.folder.iterdir()} - before == {"memory.html"}
    text = (capture.folder / "memory.html").read_text(encoding="utf-8")
    assert "By operator: " in text
    assert "In use at the peak, by operator, 1 of 3" in text
    assert [row[0] for row in Page(text).rows if row[0].startswith(("aten", "["))] == ["aten::mm"]


def test_a_trace_without_addresses_still_has_its_curve(tmp_path: Path) -> None:
    old = [
        {**event, "args": {k: v for k, v in event["args"].items() if "To" not in k and k != "Addr"}}
        for event in MEMORY
    ]
    capture = write_capture(tmp_path, [*steps(), *old])
    Memory().write(capture, capture.folder)
    text = (capture.folder / "memory.html").read_text(encoding="utf-8")
    Page(text)
    assert "<b>30.00 MiB</b>more at the peak than at the start" in text
    assert "The trace holds no addresses, so the chart cannot show what used the memory." in text
    assert "In use at the peak" not in text


def test_a_recording_of_torchs(tmp_path: Path) -> None:
    with Session("memory", wait=0, warmup=0, active=1, output_dir=str(tmp_path)) as session:
        record_like_a_user()
        session.step()
    folder = session.captures[0].folder
    made = {path.name for path in folder.iterdir()}
    assert made >= {"memory.html", "memory.json", "memory.raw.json.gz", "table.txt"}
    (device,) = json.loads((folder / "memory.json").read_text())["devices"]
    assert (device["device"], device["peak_net_bytes"]) == ("cpu", 3 * 4 * 1000), (
        "two that are added, and their sum"
    )
    Page((folder / "memory.html").read_text(encoding="utf-8"))


def record_like_a_user() -> None:
    import torch

    torch.ones(1000) + torch.ones(1000)

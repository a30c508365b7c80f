"""Memory over time as data and as a page."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from builders import MEMORY, MIB, annotation, payload_of, steps, write_capture
from page_parts import facts, parts, tables

from instrument import Session
from instrument.export.sinks.memory import Memory
from instrument.read.capture import Capture
from instrument.read.show.page.memory import memory


@pytest.fixture
def written(tmp_path: Path) -> Capture:
    hostile = annotation('<script>"&', 640, 20)
    capture = write_capture(tmp_path, [*steps(), hostile, *MEMORY])
    Memory().write(capture, capture.folder)
    return capture


def test_the_page_is_the_section_of_the_report(written: Capture) -> None:
    payload = payload_of(written.folder / "memory.html")
    assert payload["title"] == f"Memory of {written.name}"
    assert payload["sections"] == {"memory": memory(written)}


def test_no_name_is_markup(written: Capture) -> None:
    text = (written.folder / "memory.html").read_text(encoding="utf-8")
    assert '<script>"&' not in text
    found = tables(payload_of(written.folder / "memory.html"))["In use at the peak, by range"]
    assert 'forward/<script>"&' in found["cells"]["name"]


def test_the_data_are_what_the_views_say(written: Capture) -> None:
    data = json.loads((written.folder / "memory.json").read_text())
    assert data["format"] == 1
    for name in ("devices", "steps"):
        assert data[name] == [row._asdict() for row in getattr(written, f"memory_{name}")]
    assert data["live_at_peak"]["cuda:0"] == [row._asdict() for row in written.memory_live("range")]
    (curve,) = data["curves"]
    assert (curve["device"], curve["by"]) == ("cuda:0", "range")
    assert curve["reserved_bytes"] == [64 * MIB] * 5
    assert curve["times_ns"] == [260_000, 650_000, 900_000, 1_300_000, 1_500_000]
    assert [sum(values) // MIB for values in zip(*curve["live_bytes"].values())] == [
        32, 38, 14, 24, 16,
    ]  # fmt: skip


def test_the_raw_form_has_every_event(written: Capture) -> None:
    raw = json.loads(gzip.decompress((written.folder / "memory.raw.json.gz").read_bytes()))
    events = written.memory_events
    assert raw["columns"] == list(events.columns)
    assert raw["events"] == [list(row) for row in events]
    assert len(events) == len(MEMORY)


def test_forms_kind_and_rows_are_chosen(tmp_path: Path) -> None:
    capture = write_capture(tmp_path, [*steps(), *MEMORY])
    before = {path.name for path in capture.folder.iterdir()}
    Memory(forms=["html"], by="operator", rows=1).write(capture, capture.folder)
    assert {path.name for path in capture.folder.iterdir()} - before == {"memory.html"}
    found = tables(payload_of(capture.folder / "memory.html"))
    by_operator, by_range = (name for name in found if name.startswith("In use"))
    assert (by_operator, by_range) == (
        "In use at the peak, by operator",
        "In use at the peak, by range",
    )
    assert found[by_operator]["cells"]["name"] == ["aten::mm"]
    assert len(found["Steps on cuda:0"]["cells"]["number"]) == 1


def test_a_trace_without_addresses_still_has_its_curve(tmp_path: Path) -> None:
    old = [
        {**event, "args": {k: v for k, v in event["args"].items() if "To" not in k and k != "Addr"}}
        for event in MEMORY
    ]
    capture = write_capture(tmp_path, [*steps(), *old])
    Memory().write(capture, capture.folder)
    found = payload_of(capture.folder / "memory.html")
    assert facts(found)["Growth from the start to the peak"][0] == "30.00 MiB"
    assert not any(name.startswith("In use") for name in tables(found))
    (chart,) = parts(found, "memory")
    assert [series["name"] for series in chart["series"]] == ["[unknown]"]


def test_a_recording_of_torchs(tmp_path: Path) -> None:
    given = {"wait": 0, "warmup": 0, "active": 1, "export": "inline", "output_dir": str(tmp_path)}
    with Session("memory", **given) as session:
        record_like_a_user()
        session.step()
    folder = session.captures[0].folder
    made = {path.name for path in folder.iterdir()}
    assert made >= {"memory.html", "memory.json", "memory.raw.json.gz", "table.txt"}
    (device,) = json.loads((folder / "memory.json").read_text())["devices"]
    assert (device["device"], device["peak_net_bytes"]) == ("cpu", 3 * 4 * 1000), (
        "two that are added, and their sum"
    )
    assert parts(payload_of(folder / "memory.html"), "memory")[0]["device"] == "cpu"


def record_like_a_user() -> None:
    import torch

    torch.ones(1000) + torch.ones(1000)

"""Columns kept of a trace: the same, current, never in the way."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from builders import allocation, annotation, span, write_capture, write_trace

from capture.by_hand import same
from instrument import cache
from instrument.capture import Capture
from instrument.trace import column_cache, reader
from instrument.trace.events import Events

READ = reader.read
NAMES = ("é中", "b")
TRACE = [
    span(NAMES[n % 2], n, 2.5, Input_Dims=[[n % 3]], tid=f"t{n}", External_id=2**40 + n)
    for n in range(20)
]


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache's folder, in which small traces are kept too."""
    monkeypatch.setattr(column_cache, "KEPT_FROM_EVENTS", 10)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    return cache.location()


def kept_of(trace: Path) -> Path:
    return cache.location() / column_cache.entry_of(trace)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(
        tmp_path,
        [*TRACE, allocation(3, -64), annotation("r", 0, 9, finished=False)],
        baseTimeNanoseconds=9,
    )


def no_reading(path: Path) -> Events:
    raise AssertionError(f"{path} was read again")


def test_the_second_opening_reads_no_trace_and_gives_the_same(trace, folder, monkeypatch) -> None:
    first = Capture.load(trace).events
    assert [p.name for p in trace.parent.iterdir()] == ["trace.json"], "nothing beside it"
    assert [*folder.iterdir()] == [kept_of(trace)]
    monkeypatch.setattr(reader, "read", no_reading)
    second = Capture.load(trace).events
    assert same(first, second)
    assert first.correlation.strides == second.correlation.strides == (0,), "equal values: one"
    assert second.base_ns == 9
    assert second.start_ns.tolist()[:3] == [0, 1000, 2000]


def test_a_changed_trace_is_read_again(trace) -> None:
    column_cache.read(trace)
    before = trace.stat()
    trace.write_text(trace.read_text().replace('"b"', '"c"'))
    os.utime(trace, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert column_cache.read(trace).names[1] == "c"
    assert column_cache.read(trace).names[1] == "c"


@pytest.mark.parametrize("at", [0, 8, 40, -1])
def test_a_damaged_file_is_replaced(trace, at) -> None:
    first = column_cache.read(trace)
    kept = kept_of(trace)
    content = bytearray(kept.read_bytes())
    content[at] ^= 0x55
    for damaged in (bytes(content), bytes(content[: len(content) // 2]), b"", b"\xff" * 20):
        kept.write_bytes(damaged)
        assert same(column_cache.read(trace), first)


@pytest.mark.parametrize("other", ["version", "format"])
def test_what_another_version_of_this_package_kept_is_read_anew(trace, monkeypatch, other) -> None:
    column_cache.read(trace)
    with monkeypatch.context() as patch:
        patch.setattr(reader, "read", no_reading)
        column_cache.read(trace)
        if other == "version":
            patch.setattr(column_cache, "__version__", "0.0.7")
        else:
            patch.setattr(column_cache, "FORMAT", column_cache.FORMAT - 1)
        with pytest.raises(AssertionError, match="was read again"):
            column_cache.read(trace)
        patch.setattr(reader, "read", READ)
        column_cache.read(trace)
    assert same(column_cache.read(trace), READ(trace))
    monkeypatch.setattr(reader, "read", no_reading)
    column_cache.read(trace)


def test_deleting_it_does_no_harm(trace) -> None:
    first = column_cache.read(trace)
    kept_of(trace).unlink()
    assert same(column_cache.read(trace), first)


def test_another_file_in_the_place_of_a_trace_is_read_anew(trace) -> None:
    column_cache.read(trace)
    before = trace.stat()
    other = trace.with_name("other")
    other.write_text(trace.read_text().replace('"b"', '"c"'))
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(trace)
    assert (trace.stat().st_size, trace.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert column_cache.read(trace).names[1] == "c"


def test_what_the_exporter_has_read_is_known_when_the_folder_has_its_name(
    tmp_path, monkeypatch
) -> None:
    whole = write_capture(tmp_path, [span("b", k, 1) for k in range(20)], "c").folder
    queued = whole.rename(whole.with_name(".c.queued"))
    first = Capture.load(queued).events
    queued.rename(whole)
    monkeypatch.setattr(reader, "read", no_reading)
    assert same(Capture.load(whole).events, first)


def test_a_small_trace_keeps_nothing(trace, monkeypatch) -> None:
    monkeypatch.setattr(column_cache, "KEPT_FROM_EVENTS", 22)
    column_cache.read(trace)
    assert [p.name for p in trace.parent.iterdir()] == ["trace.json"]
    assert not cache.location().exists()


@pytest.mark.parametrize(
    ("column", "value"),
    [("name", 99), ("name", -1), ("category", 9), ("thread", 99), ("shapes", 9), ("grid", 0)],
)
def test_an_index_that_leads_out_of_its_list_is_not_read(trace, column, value) -> None:
    events = column_cache.read(trace)
    changed = getattr(events, column).copy()
    changed[3] = value
    events = replace(events, **{column: changed})
    column_cache._save(column_cache.entry_of(trace), events, column_cache._state(trace))
    assert column_cache._load(column_cache.entry_of(trace), column_cache._state(trace)) is None
    assert column_cache.read(trace).names == (*NAMES, "r")


def test_columns_of_other_lengths_are_not_read(trace) -> None:
    events = column_cache.read(trace)
    column_cache._save(
        column_cache.entry_of(trace),
        replace(events, external_id=events.external_id[1:]),
        column_cache._state(trace),
    )
    assert column_cache._load(column_cache.entry_of(trace), column_cache._state(trace)) is None

"""Columns kept beside a trace: the same, current, never in the way."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from capture.traces import allocation, annotation, same, span, write
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
def keep_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(column_cache, "KEPT_FROM_EVENTS", 10)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write(
        tmp_path,
        [*TRACE, allocation(3, -64), annotation("r", 0, 9, finished=False)],
        baseTimeNanoseconds=9,
    )


def no_reading(path: Path) -> Events:
    raise AssertionError(f"{path} was read again")


def test_the_second_opening_reads_no_trace_and_gives_the_same(trace, monkeypatch) -> None:
    first = Capture.load(trace).events
    assert sorted(p.name for p in trace.parent.iterdir()) == ["trace.json", "trace.json.columns"]
    monkeypatch.setattr(reader, "read", no_reading)
    second = Capture.load(trace).events
    assert same(first, second)
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
    kept = column_cache.path_of(trace)
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
            patch.setattr(
                "importlib.metadata.version", lambda name: {"torch-instrument": "0.0.7"}[name]
            )
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
    column_cache.path_of(trace).unlink()
    assert same(column_cache.read(trace), first)


def test_nothing_is_written_where_the_folder_is_read_only(trace) -> None:
    trace.parent.chmod(0o555)
    try:
        column_cache.read(trace)
        assert [p.name for p in trace.parent.iterdir()] == ["trace.json"]
    finally:
        trace.parent.chmod(0o755)


def test_a_full_disk_leaves_nothing_behind(trace, monkeypatch) -> None:
    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert len(column_cache.read(trace)) == 21
    assert [p.name for p in trace.parent.iterdir()] == ["trace.json"]


def test_a_small_trace_keeps_nothing(trace, monkeypatch) -> None:
    monkeypatch.setattr(column_cache, "KEPT_FROM_EVENTS", 22)
    column_cache.read(trace)
    assert [p.name for p in trace.parent.iterdir()] == ["trace.json"]


def test_columns_behind_a_link_are_not_read(trace, tmp_path) -> None:
    column_cache.read(trace)
    kept = column_cache.path_of(trace)
    kept.rename(tmp_path / "elsewhere")
    kept.symlink_to(tmp_path / "elsewhere")
    content = (tmp_path / "elsewhere").read_bytes()
    with pytest.raises(OSError, match="symbolic link"):
        column_cache._load(kept, column_cache._state(trace))
    assert len(column_cache.read(trace)) == 21
    assert not kept.is_symlink()
    assert (tmp_path / "elsewhere").read_bytes() == content


@pytest.mark.parametrize(
    ("column", "value"),
    [("name", 99), ("name", -1), ("category", 9), ("thread", 99), ("shapes", 9), ("grid", 0)],
)
def test_an_index_that_leads_out_of_its_list_is_not_read(trace, column, value) -> None:
    events = column_cache.read(trace)
    getattr(events, column)[3] = value
    column_cache._save(column_cache.path_of(trace), events, column_cache._state(trace))
    assert column_cache._load(column_cache.path_of(trace), column_cache._state(trace)) is None
    assert column_cache.read(trace).names == (*NAMES, "r")


def test_columns_of_other_lengths_are_not_read(trace) -> None:
    events = column_cache.read(trace)
    column_cache._save(
        column_cache.path_of(trace),
        replace(events, python_id=events.python_id[1:]),
        column_cache._state(trace),
    )
    assert column_cache._load(column_cache.path_of(trace), column_cache._state(trace)) is None

"""The user's cache: bounded, private, safe to share among processes, and never a reason to fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from builders import steps, write_capture

from instrument import cache
from instrument.capture import Capture
from instrument.cli.command import main
from instrument.trace import column_cache

ENTRIES = [f"{cache.COLUMNS}{k:032x}" for k in range(9)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(cache.BYTES_VARIABLE, raising=False)
    monkeypatch.setattr(cache, "_temporary", {})
    monkeypatch.setattr(column_cache, "KEPT_FROM_EVENTS", 1)
    return tmp_path / "cache" / "torch-instrument"


def add(name: str, size: int, age_s: float = 0) -> None:
    with cache.adding(name) as file:
        file.write(b"x" * size)
    if age_s:
        at = time.time() - age_s
        os.utime(cache.location() / name, (at, at))


def filled(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "file").write_text(text) and None


def fetched(name: str) -> str:
    return f"{cache.FETCHED}{name * 32}"


def told(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> list[str]:
    assert main(["cache", *arguments]) == status
    out, err = capsys.readouterr()
    return (err if status else out).splitlines()


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert cache.location() == tmp_path / "other" / "torch-instrument"
    for given in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        assert cache.location() == tmp_path / ".cache" / "torch-instrument"


def test_the_least_recently_used_go_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.BYTES_VARIABLE, "350")
    for age, name in enumerate(ENTRIES[:3]):
        add(name, 100, age_s=1000 - age)
    assert len(cache.entries()) == 3
    cache.open_entry(ENTRIES[0]).close()
    add(ENTRIES[3], 100)
    assert {entry.path.name for entry in cache.entries()} == {ENTRIES[0], ENTRIES[2], ENTRIES[3]}, (
        "1 was used before"
    )
    add(ENTRIES[4], 351)
    assert ENTRIES[4] not in {entry.path.name for entry in cache.entries()}, (
        "it is larger than all may be"
    )
    assert sum(entry.size for entry in cache.entries()) <= 350


def test_a_fetched_capture_in_use_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.BYTES_VARIABLE, "10")
    first, second = (cache.folder_of(fetched(name), filled("x" * 20)) for name in "ab")
    assert (first / "file").exists()
    assert (second / "file").exists()
    at = time.time() - cache._IN_USE_S - 1
    os.utime(first, (at, at))
    third = cache.folder_of(fetched("c"), filled("x"))
    assert not first.exists()
    assert (second / "file").exists()
    assert (third / "file").exists()


def test_what_others_put_there_and_what_is_being_written_stays(folder: Path) -> None:
    add(ENTRIES[0], 5)
    (folder / "notes.txt").write_text("mine")
    (folder / ".0123456789ab.tmp").write_text("being written")
    (folder / ".ba9876543210.tmp").mkdir()
    at = time.time() - cache._UNFINISHED_S - 1
    os.utime(folder / ".ba9876543210.tmp", (at, at))
    assert [entry.path.name for entry in cache.clear()] == [ENTRIES[0]]
    assert sorted(path.name for path in folder.iterdir()) == [".0123456789ab.tmp", "notes.txt"]


def test_only_its_user_may_look_and_no_other_may_write(folder: Path) -> None:
    add(ENTRIES[0], 1)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / ENTRIES[0]).stat().st_mode & 0o077 == 0
    folder.chmod(0o777)
    add(ENTRIES[1], 1)
    assert folder.stat().st_mode & 0o777 == 0o700


def test_another_users_folder_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(ENTRIES[0], 1)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(PermissionError, match="belongs to another user"):
        cache.open_entry(ENTRIES[0])
    with pytest.raises(PermissionError, match="belongs to another user"):
        add(ENTRIES[1], 1)


def test_no_link_is_followed(folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("the user's")
    folder.mkdir(parents=True)
    (folder / ENTRIES[0]).symlink_to(elsewhere / "file")
    (folder / fetched("a")).symlink_to(elsewhere)
    with pytest.raises(OSError, match="symbolic link"):
        cache.open_entry(ENTRIES[0])
    got = cache.folder_of(fetched("a"), filled("new"))
    assert (got / "file").read_text() == "new"
    add(ENTRIES[0], 3)
    assert (elsewhere / "file").read_text() == "the user's"
    (folder / ENTRIES[1]).symlink_to(elsewhere)
    cache.clear()
    assert [*folder.iterdir()] == []
    assert (elsewhere / "file").read_text() == "the user's"
    folder.rmdir()
    folder.symlink_to(elsewhere)
    with pytest.raises(OSError, match="a link, which is not followed"):
        add(ENTRIES[0], 1)
    assert (cache.folder_of(fetched("b"), filled("new")) / "file").read_text() == "new"
    assert sorted(path.name for path in elsewhere.iterdir()) == ["file"]


@pytest.mark.parametrize("broken", ["read-only", "a file", "no room", "off"])
def test_no_command_fails_for_its_sake(
    folder: Path,
    broken: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    capture = write_capture(tmp_path / "there", steps()).folder
    assert main(["show", str(capture), "--ops"]) == 0
    expected = capsys.readouterr().out
    cache.clear()
    if broken == "read-only":
        folder.chmod(0o500)
    elif broken == "a file":
        folder.rmdir()
        folder.write_text("")
    elif broken == "off":
        monkeypatch.setenv(cache.BYTES_VARIABLE, "0")
    else:

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "rename", full)
        monkeypatch.setattr(Path, "replace", full)
    for _ in range(2):
        assert main(["show", str(capture), "--ops"]) == 0
        assert capsys.readouterr() == (expected, "")
        assert main(["show", f"file://{capture}", "--ops"]) == 0
        out, err = capsys.readouterr()
        assert (out.splitlines()[2:], err) == (expected.splitlines()[2:], "")
    assert broken == "a file" or [*folder.iterdir()] == []
    folder.chmod(0o700)


def test_a_fetch_that_fails_leaves_nothing_and_is_told(folder: Path) -> None:
    def fail(place: Path) -> None:
        (place / "half").write_text("x")
        raise PermissionError(13, "the server says no")

    with pytest.raises(PermissionError, match="the server says no"):
        cache.folder_of(fetched("a"), fail)
    assert [*folder.iterdir()] == []


ONE = """
import sys
from instrument import cache
for turn in range(60):
    name = f"{cache.COLUMNS}{turn % 4:032x}"
    content = bytes([turn % 4]) * 3000
    try:
        with cache.open_entry(name) as file:
            assert file.read() == content
    except FileNotFoundError:
        pass
    with cache.adding(name) as file:
        file.write(content[:1000])
        file.flush()
        file.write(content[1000:])
    fetched = f"{cache.FETCHED}{turn % 3:032x}"
    kept = cache.folder_of(fetched, lambda place: (place / "f").write_text("whole"))
    assert (kept / "f").read_text() == "whole"
    if turn % 20 == 19:
        cache._keep_in_bounds()
"""


def test_processes_at_once(folder: Path) -> None:
    environment = {**os.environ, cache.BYTES_VARIABLE: "7000"}
    both = [
        subprocess.Popen([sys.executable, "-c", ONE], env=environment, stderr=subprocess.PIPE)
        for _ in range(3)
    ]
    assert [process.communicate()[1].decode() for process in both] == [""] * 3
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]
    assert sum(entry.size for entry in cache.entries()) <= 7000


def test_the_command_tells_and_clears(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert told(capsys) == [f"The cache is {folder}: 0 entries, 0 B of at most 2.00 GiB."]
    capture = write_capture(tmp_path / "there", steps()).folder
    assert len(Capture.load(capture).events)
    Capture.load(f"file://{capture}")
    add(cache.RATES, 100)
    first, *kinds = told(capsys)
    assert first.startswith(f"The cache is {folder}: 3 entries, ")
    assert [line.split(",")[0] for line in kinds] == [
        "  columns of traces: 1 entry",
        "  captures fetched from URLs: 1 entry",
        "  measured rates of this machine: 1 entry",
    ]
    (line,) = told(capsys, "--clear")
    assert line.startswith("Removed 3 entries, ")
    assert line.endswith(f" from {folder}.")
    assert [*folder.iterdir()] == []


def test_the_command_says_what_is_wrong_with_it(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    add(ENTRIES[0], 1)
    folder.chmod(0o500)
    assert told(capsys)[-1] == f"The cache cannot be written: [Errno 13] is read-only: '{folder}'."
    folder.chmod(0o700)
    monkeypatch.setenv(cache.BYTES_VARIABLE, "2GB")
    assert told(capsys, status=2) == [
        "instrument: INSTRUMENT_CACHE_BYTES is '2GB': give a number of bytes, or 0 to keep nothing."
    ]
    add(ENTRIES[1], 1)
    monkeypatch.delenv(cache.BYTES_VARIABLE)
    assert told(capsys, str(tmp_path / "none"), status=2)[0].startswith(
        "instrument: There is nothing at "
    )
    cache.clear()
    folder.rmdir()
    folder.write_text("")
    assert "is not a folder" in told(capsys, status=2)[0]


def test_leftovers_of_older_versions(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    runs, old = tmp_path / "runs", folder.with_name("instrument")
    capture = write_capture(runs, steps()).folder
    head = json.dumps({"made_by": ["0.1.0"]}, separators=(",", ":")).encode()
    beside = capture / "trace.json.gz.columns"
    beside.write_bytes(len(head).to_bytes(8, "little") + head + b"\0" * 50)
    theirs = capture / "spectra.columns"
    theirs.write_bytes(b"1 2 3\n4 5 6\n7 8 9\n")
    (capture / "linked.columns").symlink_to(beside)
    (old / ("a" * 32)).mkdir(parents=True)
    (old / ("a" * 32) / "capture.json").write_text("{}")
    (old / "of another program").mkdir()
    assert len(Capture.load(capture).events)
    assert told(capsys)[-2:] == [
        "Left by older versions; --clear removes them:",
        f"  {old / ('a' * 32)}",
    ]
    assert told(capsys, str(runs))[-2:] == [f"  {old / ('a' * 32)}", f"  {beside}"]
    assert beside.exists()
    assert told(capsys, "--clear", str(runs))[1:] == [
        f"Removed {old / ('a' * 32)}, left by an older version.",
        f"Removed {beside}, left by an older version.",
    ]
    assert sorted(path.name for path in capture.iterdir()) == [
        "capture.json", "linked.columns", "spectra.columns", "trace.json.gz",
    ]  # fmt: skip
    assert [path.name for path in old.iterdir()] == ["of another program"]
    (old / "of another program").rmdir()
    head = b'{"layout":["1"]}'
    beside.write_bytes(len(head).to_bytes(8, "little") + head)
    assert told(capsys, "--clear", str(capture / "trace.json.gz"))[1:] == [
        f"Removed {beside}, left by an older version."
    ]
    assert not old.exists()

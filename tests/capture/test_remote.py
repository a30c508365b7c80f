"""What a server lists of itself leads no reader and no file elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest
from builders import steps, write_capture

from instrument import storage
from instrument.capture import Capture
from instrument.errors import CaptureError
from instrument.runs.run import Run

EVIL = (
    "/run/../../evil/capture.json",
    "/other/c/capture.json",
    "capture.json",
    "/run/./x/capture.json",
    "/run",
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A server whose listing of `/run` holds one capture, and names that lead elsewhere."""
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/run/c/capture.json", b"{}")
    memory.pipe_file("/other/c/capture.json", b'{"name": "other"}')
    find = type(memory).find

    def listing(self: Any, path: str, **options: Any) -> Any:
        return find(self, path, **options) | {
            name: {"type": "file", "size": 2, "name": name} for name in EVIL
        }

    monkeypatch.setattr(type(memory), "find", listing)
    yield memory
    memory.store.clear()


def test_a_listing_names_only_what_is_below(cache: Path, server: Any) -> None:
    assert storage.captures("memory://run") == ["memory://run/c"]
    assert Capture.load("memory://run/c").name == "c"
    written = [file for file in cache.parent.rglob("*") if file.is_file()]
    assert written
    assert all(cache / "torch-instrument" in file.parents for file in written)


@pytest.mark.parametrize("url", ["memory://run/..", "memory://"])
def test_a_url_without_a_name_is_refused(cache: Path, server: Any, url: str) -> None:
    with pytest.raises(CaptureError, match="names no capture: give the URL of a capture"):
        storage.fetch(url)
    assert not cache.exists()


def test_links_below_a_local_url_are_not_followed(tmp_path: Path, cache: Path) -> None:
    own = write_capture(tmp_path / "here", steps(), "own").folder
    theirs = write_capture(tmp_path / "elsewhere", steps(), "theirs").folder
    secret = tmp_path / "secret"
    secret.write_text('{"name": "secret"}')
    (tmp_path / "here" / "linked").symlink_to(theirs.parent)
    (own / "summary.json").symlink_to(secret)
    (tmp_path / "here" / "evil").mkdir()
    (tmp_path / "here" / "evil" / "capture.json").symlink_to(secret)
    assert storage.captures(f"file://{tmp_path}/here") == [f"file://{own}"]
    assert storage.contents([f"file://{own}/summary.json"]) == {}
    assert Run.load(f"file://{tmp_path}/here").windows[0].paths == [f"file://{own}"]
    with pytest.raises(CaptureError, match="There is no capture"):
        Capture.load(f"file://{tmp_path}/here/evil")
    (own / "trace.json.gz").unlink()
    (own / "trace.json.gz").symlink_to(theirs / "trace.json.gz")
    assert Capture.load(f"file://{own}").trace_path is None
    (tmp_path / "mine").symlink_to(theirs)
    assert Capture.load(f"file://{tmp_path}/mine").trace_path is not None, (
        "the user's own link is followed"
    )

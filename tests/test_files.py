"""Files are written whole or not at all, and no link leads a reader or a writer elsewhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from instrument.base import files


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "elsewhere" / "secret"
    path.parent.mkdir()
    path.write_text("hunter2")
    return path


def test_a_link_is_replaced_and_not_followed(tmp_path: Path, secret: Path) -> None:
    target = tmp_path / "table.txt"
    target.symlink_to(secret)
    files.write(target, "text")
    assert secret.read_text() == "hunter2"
    assert not target.is_symlink()
    assert target.read_text() == "text"


def test_another_name_of_the_same_file_keeps_its_content(tmp_path: Path, secret: Path) -> None:
    target = tmp_path / "table.txt"
    os.link(secret, target)
    files.write(target, b"bytes")
    assert secret.read_text() == "hunter2"
    assert target.read_bytes() == b"bytes"


def test_a_pipe_or_what_a_process_has_open_is_not_replaced(tmp_path: Path, secret: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    with secret.open("ab") as opened:
        stdout = tmp_path / "stdout"
        stdout.symlink_to(f"/proc/self/fd/{opened.fileno()}")
        for target in (pipe, link, stdout):
            with pytest.raises(OSError, match="is a pipe, a socket or a device, not a file"):
                files.write(target, "text")
    assert pipe.is_fifo()
    assert link.is_symlink()
    assert secret.read_text() == "hunter2"
    assert {each.name for each in tmp_path.iterdir()} == {"pipe", "link", "stdout", "elsewhere"}


def test_what_fails_half_way_leaves_the_file_as_it_was_and_nothing_beside(tmp_path: Path) -> None:
    target = tmp_path / "whole"
    target.write_text("before")
    with pytest.raises(RuntimeError), files.replacing(target) as raw:  # noqa: PT012
        raw.write(b"half")
        raise RuntimeError
    assert target.read_text() == "before"
    assert [each.name for each in tmp_path.iterdir()] == ["whole"]


def test_only_a_regular_file_is_read(tmp_path: Path, secret: Path) -> None:
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(secret)
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="symbolic link"):
        files.read_bytes(link)
    for other in (pipe, tmp_path):  # a pipe that nobody writes into must not hang the reader
        with pytest.raises(OSError, match=r"not a regular file|directory"):
            files.read_bytes(other)
    with pytest.raises(FileNotFoundError):
        files.read_bytes(tmp_path / "missing")
    assert files.read_bytes(secret) == b"hunter2"
    assert [files.is_regular(path) for path in (secret, link, pipe, tmp_path)] == [
        True,
        False,
        False,
        False,
    ]


def test_a_file_that_is_too_large_is_refused(secret: Path) -> None:
    assert files.read_bytes(secret, most=7) == b"hunter2"
    with pytest.raises(OSError, match="larger than 6 bytes"):
        files.read_bytes(secret, most=6)


def test_a_folder_is_not_made_behind_a_link(tmp_path: Path, secret: Path) -> None:
    base = tmp_path / "base"
    base.symlink_to(tmp_path / "real")
    (tmp_path / "real").mkdir()
    # the base is its owner's own choice
    assert files.make_folder(base, "a", "b") == base / "a" / "b"
    assert files.make_folder(base, "a", "b").is_dir()
    (base / "out").symlink_to(secret.parent)
    with pytest.raises(OSError, match="not followed"):
        files.make_folder(base, "out", "c")
    assert [each.name for each in secret.parent.iterdir()] == ["secret"]


def test_links_are_not_listed(tmp_path: Path, secret: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    for name in ("b", "inner/a"):
        (folder / name).write_text("")
    (folder / "file").symlink_to(secret)
    (folder / "behind").symlink_to(secret.parent)
    os.mkfifo(folder / "pipe")
    assert files.regular_files(folder) == [folder / "b", folder / "inner/a"]


@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to])
def test_append_follows_no_link(tmp_path: Path, secret: Path, link: Any) -> None:
    link(tmp_path / "lines", secret)
    with pytest.raises(OSError, match=r"not followed|another hard link"):
        files.open_to_append(tmp_path / "lines")
    assert secret.read_text() == "hunter2"
    for line in (b"one\n", b"two\n"):
        with files.open_to_append(tmp_path / "own") as file:
            file.write(line)
    assert (tmp_path / "own").read_bytes() == b"one\ntwo\n"
    (tmp_path / "dangling").symlink_to(tmp_path / "made")
    with pytest.raises(OSError, match="not followed"):
        files.open_to_append(tmp_path / "dangling")
    assert not (tmp_path / "made").exists()

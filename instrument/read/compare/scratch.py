"""A copy of a folder in which a script can run without writing into the folder."""

from __future__ import annotations

import filecmp
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

#: A file or a folder with more is not copied, but linked.
MOST_BYTES, MOST_FILES = 50 << 20, 2_000
_LEFT_OUT = frozenset({".git", ".venv", "__pycache__"})


def copy_folder(folder: Path, target: Path, without: Path) -> list[str]:
    """Copy a folder to `target`, without its part `without`; return the names of what is linked.

    Files and folders of more than 50 MiB or 2,000 files are linked, such as datasets: what a
    script writes into these, it writes into the user's files.
    """
    target.mkdir(parents=True)
    linked = []
    for entry in sorted(folder.iterdir()):
        if entry.name in _LEFT_OUT or entry == without or not os.access(entry, os.R_OK):
            continue
        if without.is_relative_to(entry) or not _is_small(entry):
            (target / entry.name).symlink_to(entry)
            linked.append(entry.name)
        elif entry.is_dir():
            shutil.copytree(entry, target / entry.name, symlinks=True, ignore=_special)
        elif entry.is_file():
            shutil.copy2(entry, target / entry.name)
    return linked


def edited(folder: Path, copy: Path) -> str | None:
    """The name of a Python file that is not as it was copied; None if there is none."""
    for parent, _, names in os.walk(copy):
        for name in names:
            its = Path(parent, name)
            original = folder / its.relative_to(copy)
            is_source = name.endswith(".py") and its.is_file() and original.is_file()
            if is_source and not filecmp.cmp(original, its, shallow=False):
                return str(its.relative_to(copy))
    return None


def _special(folder: str, names: list[str]) -> list[str]:
    """What cannot be copied, such as sockets."""
    paths = {name: Path(folder, name) for name in names}
    return [
        name
        for name, path in paths.items()
        if not (path.is_symlink() or path.is_file() or path.is_dir())
    ]


def _is_small(entry: Path) -> bool:
    bytes_left, files_left = MOST_BYTES, MOST_FILES
    for size in _sizes(entry):
        bytes_left, files_left = bytes_left - size, files_left - 1
        if bytes_left < 0 or files_left < 0:
            return False
    return True


def _sizes(entry: Path) -> Iterator[int]:
    if entry.is_symlink() or not entry.is_dir():
        yield entry.lstat().st_size
        return
    for parent, _, names in os.walk(entry):
        for name in names:
            yield Path(parent, name).lstat().st_size

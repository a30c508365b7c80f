"""Keeps the modules of a script apart from those of this package and of what it depends on.

With `python`, a script's `import yaml` finds a file yaml.py in the script's folder. Under
`instrument run`, it finds it too, although this package has loaded another module of that name. The
imports of this package, in the blocks of `own_modules`, do not find the script's file.
"""

from __future__ import annotations

import os
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import FrozenImporter, PathFinder
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import Any

# Names of modules that are in the script's folder, and elsewhere too.
_doubles: frozenset[str] = frozenset()
_folder = ""
_hidden: dict[str, ModuleType] = {}  # the modules of these names that imports do not find now
_before: list[str] = []  # `sys.path` outside blocks
_blocks = 0  # how many blocks of `own_modules` run now
_lock = RLock()


def doubles() -> frozenset[str]:
    """The names of modules that are in the script's folder, and elsewhere too."""
    return _doubles


def put_first(folder: str) -> None:
    """Have imports find the modules of a script's folder first, except in blocks of `own_modules`.

    The folder, or the zip file, is already the first of `sys.path`.
    """
    global _doubles, _folder
    place: Any = Path(folder)
    inside = place.iterdir() if place.is_dir() else pkgutil.iter_modules([folder])
    _folder = folder
    _doubles = frozenset(filter(_is_double, {each.name.partition(".")[0] for each in inside}))
    _swap()


@contextmanager
def own_modules() -> Iterator[None]:
    """In this block, imports find the modules of this package, not those of the script's folder."""
    if not _doubles:
        yield
        return
    _enter(1)
    try:
        yield
    finally:
        _enter(-1)


def _enter(change: int) -> None:
    global _blocks, _before
    with _lock:
        _blocks += change
        if not _doubles or _blocks != max(change, 0):  # another block runs
            return
        _swap()
        own = [each for each in _before if not _is_folder(each)] + [_folder]
        if change > 0:
            _before = [*sys.path]
            sys.path[:] = [each for each in sys.path if not _is_folder(each)] + [_folder]
        else:  # and what the block has added
            sys.path[:] = _before + [each for each in sys.path if each not in own]


def _swap() -> None:
    """Exchange the modules that imports find with the hidden ones."""
    global _hidden
    found = {name: sys.modules[name] for name in [*sys.modules] if _top(name) in _doubles}
    for name in found:
        del sys.modules[name]
    sys.modules.update(_hidden)
    _hidden = found


def _is_double(name: str) -> bool:
    if name in sys.builtin_module_names or name in ("__main__", "encodings"):  # Python's own
        return False
    if FrozenImporter.find_spec(name) is not None:
        return False
    there = PathFinder.find_spec(name, [_folder])
    if there is None or there.origin is None:  # a folder without __init__.py comes last
        return False
    if name in sys.modules:
        loaded = getattr(sys.modules[name], "__spec__", None)
        return loaded is None or loaded.origin != there.origin
    elsewhere = PathFinder.find_spec(name, [each for each in sys.path if not _is_folder(each)])
    return elsewhere is not None and elsewhere.origin is not None


def _is_folder(place: str) -> bool:
    """Whether a place of `sys.path` is the script's folder; "" is the current folder."""
    return os.path.realpath(place) == os.path.realpath(_folder)


def _top(name: str) -> str:
    return name.partition(".")[0]


def _leave_to_parent() -> None:
    """In a forked child, which only the script uses: show the script's modules."""
    global _lock
    _lock = RLock()
    while _blocks:
        _enter(-1)


os.register_at_fork(after_in_child=_leave_to_parent)

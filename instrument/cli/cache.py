"""`instrument cache`: show or clear the cache and the files that older versions left."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from instrument.cli.output import Parts
from instrument.errors import ConfigError
from instrument.units import size

HELP = "show or clear the cache that makes reading faster"

_KINDS = {
    "columns-": "columns of traces",
    "fetched-": "captures fetched from URLs",
    "machine.json": "measured rates of this machine",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments and the text of its help."""
    parser.description = (
        "Print the folder of the cache, its entries and its size, and the files that older "
        "versions left. The cache can be removed at any time: if needed, its content is computed "
        "or fetched again. XDG_CACHE_HOME sets another folder; INSTRUMENT_CACHE_BYTES limits the "
        "size (default: 2 GiB)."
    )
    add = parser.add_argument
    where = "also find the files that older versions wrote beside the traces at or below PATH"
    add("path", metavar="PATH", type=Path, nargs="?", help=where)
    add("--clear", action="store_true", help="remove the cache and the files of older versions")


def run(arguments: argparse.Namespace) -> Parts:
    """Return lines about the content of the cache, or about the removed files.

    Raises:
        ConfigError: nothing is at the path, or `INSTRUMENT_CACHE_BYTES` is not a number.
        OSError: the cache cannot be used.
    """
    from instrument import cache

    if arguments.path is not None and not arguments.path.exists():
        raise ConfigError(
            f"There is nothing at {arguments.path}: give a trace, a capture, or a folder that "
            "holds them."
        )
    old = cache.leftovers(arguments.path)
    if arguments.clear:
        gone = cache.clear()
        lines = [f"Removed {_amount(gone)} from {cache.location()}."]
        removed = cache.remove_leftovers(old)
        lines += [f"Removed {path}, left by an older version." for path in removed]
        lines += [f"Could not remove {path}." for path in old if path not in removed]
        return [lines]
    most, kept = cache.most_bytes(), cache.entries()
    lines = [f"The cache is {cache.location()}: {_amount(kept)} of at most {size(most)}."]
    for start, kind in _KINDS.items():
        if found := [entry for entry in kept if entry.path.name.startswith(start)]:
            lines.append(f"  {kind}: {_amount(found)}")
    try:
        cache.check_writable()
    except OSError as error:
        lines.append(f"The cache cannot be written: {error}.")
    if old:
        lines += ["Left by older versions; --clear removes them:", *(f"  {path}" for path in old)]
    return [lines]


def _amount(found: Iterable[object]) -> str:
    sizes = [getattr(entry, "size", 0) for entry in found]
    return f"{len(sizes)} {'entry' if len(sizes) == 1 else 'entries'}, {size(sum(sizes))}"

"""Random changes of traces and capture folders: a tree holds the content of each file, as on disk.

A change keeps the structure where it can. It replaces a value of a JSON document, or moves, repeats and mixes up the
events of a trace. Few changes are of bytes, of files and of names.
"""

from __future__ import annotations

import copy
import gzip
import json
import os
import re
import zlib
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

MANY = 2000  # events; more are not repeated
EVIL = "e\x1b]0;owned\x07\x9b31m\nforged  9\r\u2028\u202e\n::error::</script><b>=1+1"
DEEP = b"[" * 100_000
BOMB = gzip.compress(b'{"traceEvents": [' + b" " * (1 << 27))
# Values of each type of JSON; a number, a name or a path can be anything of this.
VALUES: list[Any] = [
    *(None, True, 0, -1, 1, 255, 2**31, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)),
    *(10**400, 0.5, -0.0, 5e-324, 1e15, 1e308, float("nan"), float("inf"), float("-inf")),
    *("", "0", "-1", "nan", "stream 7", EVIL, "x" * 100_000, "\ud800", "a\udc00b", "\0", "../../x"),
    *("/etc/passwd", "file:///etc/passwd", "ProfilerStep#1", "ProfilerStep#" + "9" * 30, "[" * 999),
    *([], {}, [[]], [{}], {"": None}, {EVIL: EVIL}, [[1, [2]]], [0] * 1000),
]
IDS = ("correlation", "External id", "id", "pid", "tid", "Sequence number", "Fwd thread id", "Addr")
IDS += ("Python id", "Python parent id", "Ev Idx", "stream", "device", "graph id", "graph node id")


class Special(NamedTuple):
    """A folder, a pipe or a link in place of a file."""

    kind: str
    target: str = ""


Tree = dict[str, bytes | Special]


def write(tree: Tree, folder: Path) -> None:
    for name, content in tree.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif content.kind == "folder":
            path.mkdir()
        elif content.kind == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to(content.target)


def unpacked(content: bytes | Special) -> bytes:
    """The text of a file that may be compressed and damaged."""
    if not isinstance(content, bytes) or content[:2] != b"\x1f\x8b":
        return b"" if isinstance(content, Special) else content
    try:
        return zlib.decompressobj(31).decompress(content)
    except zlib.error:
        return b""


def document_of(content: bytes | Special) -> Any:
    """The JSON of a file; None if it is not a list or an object."""
    try:
        found = json.loads(unpacked(content), strict=False)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, (dict, list)) and found else None


def packed(text: bytes, like: bytes | Special) -> bytes:
    is_compressed = isinstance(like, bytes) and like[:2] == b"\x1f\x8b"
    return gzip.compress(text, 1) if is_compressed else text


def mutated(tree: Tree, random: Random) -> tuple[Tree, list[str]]:
    """A tree with some changes, and the names of the changed files."""
    tree, changed = dict(tree), []
    for _ in range(random.choice((1, 1, 2, 3, 6))):
        kind = random.choice(("trace", "trace", "trace", "trace", "capture.json", ""))
        name = random.choice([name for name in tree if kind in name] or list(tree))
        tree[name] = tree.pop(name)  # the last one is the newest
        document = document_of(tree[name])
        if document is None or random.random() < 0.12:
            name = random.choice((_change_file, _change_file, _rename))(tree, name, random)
        else:
            events = document.get("traceEvents") if isinstance(document, dict) else document
            is_trace = isinstance(events, list) and len(events) > 0
            for _ in range(random.choice((1, 3, 10, 20))):
                if is_trace and events and random.random() < 0.9:
                    random.choice((_change_values, *EVENT_CHANGES))(events, random)
                elif document:
                    _change_values(document, random)
            text = json.dumps(document).encode()
            tree[name] = packed(_change_text(text, random), tree[name])
        changed.append(name)
    return tree, changed


# ---- Values ----


def _change_values(document: Any, random: Random) -> None:
    """Change a place of a document: a value, a key, or what is below."""
    inside, key = document, None
    while isinstance(inside, (dict, list)) and inside and (key is None or random.random() < 0.8):
        holder = inside
        key = (
            random.choice(list(holder))
            if isinstance(holder, dict)
            else random.randrange(len(holder))
        )
        inside = holder[key]
    if key is None:
        return
    value = holder.pop(key)
    kind = random.randrange(8)
    if kind == 0:
        return
    if kind == 1 and isinstance(holder, dict):
        key = random.choice((EVIL, "", "name", "\ud800", *holder))
    elif kind == 2:
        value = random.choice(([value], {"a": value}, str(value), [value] * 3))
    elif kind == 3 and type(value) in (int, float):
        value = random.choice(
            (-value, value + 1, value * 1000, value * 10**12, float(value % 2**60))
        )
    else:
        same = [each for each in VALUES if type(each) is type(value)]
        value = copy.deepcopy(random.choice(same if same and kind < 7 else VALUES))
    if isinstance(holder, dict):
        holder[key] = value
    else:
        holder.insert(key, value)


# ---- Events ----


def _part(events: list[Any], random: Random) -> slice:
    begin = random.randrange(len(events))
    return slice(begin, begin + random.choice((1, 2, 10, len(events))))


def _drop(events: list[Any], random: Random) -> None:
    del events[_part(events, random)]


def _keep(events: list[Any], random: Random) -> None:
    """Keep some events, or those with a category."""
    kept, categories = events[_part(events, random)], {_category(event) for event in events}
    if random.random() < 0.5:
        chosen = random.sample(sorted(categories), random.randint(1, len(categories)))
        kept = [event for event in events if _category(event) in chosen]
    events[:] = kept


def _repeat(events: list[Any], random: Random) -> None:
    part = _part(events, random)
    if len(events) < MANY:
        events[part.start : part.start] = copy.deepcopy(events[part])


def _shuffle(events: list[Any], random: Random) -> None:
    part = _part(events, random)
    events[part] = random.sample(events[part], len(events[part]))


def _edit(events: list[Any], random: Random) -> None:
    """Give some events of a category other times, ids or names: of another event, or extreme ones."""
    objects = [event for event in events if isinstance(event, dict)] or [{}]
    category, other = _category(random.choice(objects)), _flat(random.choice(objects))
    key = random.choice(("ts", "ts", "dur", "dur", "ph", "cat", "name", *IDS, *other))
    put = random.choice((0, -1, other.get(key), other.get(key), random.choice(VALUES)))
    by, share = random.choice((-1e15, -50, -1, 0.001, 1, 50, 1e15)), random.choice((0.02, 0.3, 1))
    is_moved = key in ("ts", "dur") and random.random() < 0.7
    for event in objects:
        if _category(event) == category and random.random() < share:
            arguments = event.get("args")
            holder = arguments if key not in event and isinstance(arguments, dict) else event
            if is_moved and type(holder.get(key)) in (int, float):
                holder[key] += by
            else:
                new = random.choice("XBEibensftMCPNOD") if key == "ph" else put
                holder[key] = copy.deepcopy(new)


def _grow(events: list[Any], random: Random) -> None:
    """Add many copies of an event or two: one after the other or nested, with other ids and names."""
    base = [event for event in events[_part(events, random)][:2] if isinstance(event, dict)]
    count = random.choice((30, 300, 300, 3000, 20_000, 60_000)) if len(events) < MANY else 0
    varied = [key for key in ("name", "cat", *IDS) if random.random() < 0.25]
    step, is_nested = random.choice((0, 0.001, 1, 100)), random.random() < 0.4
    for number in range(count if base else 0):
        event = copy.deepcopy(base[number % len(base)])
        for holder in (event, event.get("args")):
            for key in {*varied} & {*holder} if isinstance(holder, dict) else ():
                value = holder[key]
                holder[key] = value + number if type(value) is int else f"{value}{number}"
        if type(event.get("ts")) in (int, float):
            event["ts"] += number * step
            event["dur"] = 2 * step * (count - number) if is_nested else step
        events.append(event)


def _category(event: Any) -> str:
    return str(event.get("cat")) if isinstance(event, dict) else ""


def _flat(event: Any) -> dict[str, Any]:
    """The values of an event and of its arguments."""
    arguments = event.get("args")
    return {**event, **(arguments if isinstance(arguments, dict) else {})}


EVENT_CHANGES = (_drop, _keep, _repeat, _shuffle, _edit, _edit, _edit, _edit, _grow)


# ---- Texts, files and names ----


def _change_text(text: bytes, random: Random) -> bytes:
    """Most often nothing; else what no encoder of JSON writes."""
    kind, at = random.randrange(24), random.randrange(len(text) + 1)
    if kind == 0:  # the same key twice
        keys = sorted(set(re.findall(rb'"\w+":', text)))
        return text.replace(random.choice(keys), random.choice(keys), random.choice((1, -1)))
    if kind == 1:
        return text[:at] + random.choice((b"\xff", b"\0", b"\x1b", DEEP, b"}", b'"')) + text[at:]
    if kind == 2:
        return text[:at]
    return text if kind > 3 else text.decode().encode(random.choice(("utf-16", "utf-8-sig")))


def _change_file(tree: Tree, name: str, random: Random) -> str:
    content = tree[name]
    data = content if isinstance(content, bytes) else b""
    at = random.randrange(len(data) + 1)
    targets = (name, Path(name).name, "missing", "/dev/zero", "/etc/passwd", "..", "trace.json")
    change = random.randrange(6)
    if change == 0:
        tree[name] = random.choice((b"", b"{", b"null", b"[]", b"\x1f\x8b", DEEP, BOMB))
    elif change == 1:
        target = random.choice(targets)
        tree[name] = random.choice((Special("folder"), Special("pipe"), Special("link", target)))
    elif change == 2:
        tree[name] = data[:at]
    elif change == 3:  # so that packed data are damaged
        tree[name] = data[:at] + random.randbytes(random.choice((1, 4))) + data[at + 2 :]
    elif change == 4:  # a name that does not say whether the file is compressed
        renamed = name.removesuffix(".gz") if name.endswith(".gz") else f"{name}.gz"
        tree[renamed] = tree.pop(name)
        return renamed
    else:
        tree[name] = tree[random.choice(list(tree))]
    return name


def _rename(tree: Tree, name: str, random: Random) -> str:
    """Rename the folder of a file."""
    folder, _, _ = name.rpartition("/")
    above, _, own = folder.rpartition("/")
    names = (EVIL.replace("/", ""), "--json", "-", "a b", "\udcff", "x" * 200, f"{own}.queued")
    names += (
        f"{own}.partial",
        "steps_000001-000002_rank9",
        "steps_" + "9" * 30 + "-0",
        "%s{}",
        "*",
    )
    renamed = "/".join(filter(None, (above, random.choice(names))))
    for each in [each for each in tree if each.startswith(f"{folder}/")]:
        tree[renamed + each.removeprefix(folder)] = tree.pop(each)
    return renamed + name.removeprefix(folder)

"""Python stacks: the frames around operators, and folded stacks for a flame graph."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import get_close_matches
from functools import cache
from itertools import islice
from pkgutil import iter_modules
from typing import Literal, NamedTuple

import numpy as np

import instrument
from instrument.base.errors import CaptureError, ConfigError
from instrument.base.printable import printable, without_commands
from instrument.base.prose import shortened
from instrument.base.range_names import STEP_PREFIX
from instrument.read.facts.autograd import Scopes
from instrument.read.facts.call_tree import CallTree, nest, number_paths
from instrument.read.facts.grammars import range_label
from instrument.read.facts.groupby import Groups, groupby, intern
from instrument.read.facts.links import Links
from instrument.read.trace.events import PYTHON, Events, Flags, Ints, decoded, is_step
from instrument.read.trace.line_samples import LineSamples

# Addresses of objects differ between runs, so they are cut from the names of frames.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
# `_OURS` matches all Python frames of this package; a script may have another package of its name.
# `_AROUND_USERS` matches only the frames of this package that call the user's code, and
# `_AROUND_SCRIPT` those of `instrument run`.
_PACKAGE = r"(.*[/\\])?instrument[/\\]"
_AROUND_SCRIPT = re.compile(rf"{_PACKAGE}(cli[/\\](command|run)|record[/\\]script)\.py\(")
_AROUND_USERS = re.compile(
    rf"<profiled>\(\d+\): |{_AROUND_SCRIPT.pattern}|{_PACKAGE}(annotate[/\\]\w+\.py\("
    r"|record[/\\](calls|session)\.py\(|record[/\\]unedited\.py\(\d+\): noticed$)"
)
_OWN = "|".join(each.name for each in iter_modules(instrument.__path__))
_OURS = re.compile(rf"{_AROUND_USERS.pattern}|{_PACKAGE}({_OWN})([/\\]\w+)*\.py\(")
_COMMAND = re.compile(rf"{_PACKAGE}cli[/\\]command\.py\(\d+\): main$")
_EXEC = "<built-in method exec of "
_RECORDING, _ALL_STEPS, _NO_LAUNCH = "(recording)", f"{STEP_PREFIX[:-1]}*", "(no launch)"
#: The last frame of a path with more than `MOST_FRAMES` frames. By default, Python allows 1000
#: nested calls.
DEEPER = "(deeper frames)"
MOST_FRAMES, LONGEST_FRAME = 1000, 300
# If all paths together have more than this many frames for each event of the trace, paths are cut
# earlier.
_FRAMES = 64
_LONGEST_STACK = 5000


class Stack(NamedTuple):
    """A call path, with the outermost frame first, and the self time of its last frame."""

    frames: tuple[str, ...]
    value_ns: int


def stacks(
    events: Events,
    metric: Literal["cpu", "device"] = "cpu",
    *,
    range: str | None = None,
) -> list[Stack]:
    """Return the call paths of a trace, each with the time spent in its last frame.

    The frames of a path are Python frames, annotations and operators, nested by time on each
    thread; the times of equal paths on different threads are summed. Names have at most 300
    characters and no addresses of objects, and all steps are "ProfilerStep*". Frames of this
    package around the user's code are left out; the time that recording takes in the training loop
    is "(recording)". Device work without a launch is "(no launch)". A path has at most 1,000
    frames, fewer if the paths would be many times larger than the trace; the rest is "(deeper
    frames)". torch before 1.12 wrote the Python frames of each operator as text, so such traces do
    not have the time spent in Python alone.

    Args:
        events: the events of the trace.
        metric: "cpu" for CPU self time, "device" for the time of the device events that the last
            frame launched.
        range: a range's name, or its path in the range tree. Only time inside this range and in its
            backward, on any thread, is returned.

    Cost: about 1 µs per event.

    Raises:
        CaptureError: the trace holds no Python frames or no such range, or `metric` is "device" and
            the trace holds no device events.
        ConfigError: `metric` is not "cpu" or "device".
    """
    if metric not in ("cpu", "device"):
        raise ConfigError(f"Stacks have no metric {metric!r}; choose cpu or device.")
    if not events.among(PYTHON).any() and not (events.call_stack >= 0).any():
        raise CaptureError(
            "The trace was recorded without with_stack and holds no Python frames; "
            "record it with with_stack=true."
        )
    links = Links(events, python=True)
    (found,) = call_paths(links, (metric,), range=range)
    return found


def sampled_stacks(samples: LineSamples, phase: str) -> list[Stack]:
    """Return the call paths that samples of the run found in a phase (`profiler.lines`).

    Each frame has the line that it ran. The time is what the samples stand for, in the whole run. A
    thread that takes no steps is a frame around those that it ran.
    """
    names = [_shown(f"{file}({line}): {name}") for _, file, line, name in samples.frames]
    times_ns = Counter[tuple[str, ...]]()
    for _, of_phase, thread, stack, count in samples.counts:
        if of_phase == phase and samples.stacks[stack]:
            path = (names[frame] for frame in reversed(samples.stacks[stack]))
            above = (_shown(f"thread {thread}"),) if thread else ()
            times_ns[(*above, *path)] += count * samples.interval_ns
    return [Stack(*each) for each in times_ns.items()]


def call_paths(
    links: Links,
    metrics: Sequence[Literal["cpu", "device"]],
    *,
    range: str | None = None,
    frames: bool = True,
) -> Iterator[list[Stack]]:
    """Yield the call paths of a call tree for each metric; see `stacks`.

    If `frames` is True, the frames that torch before 1.12 wrote as text are part of the paths.

    Raises:
        CaptureError: the trace holds no such range, or `metrics` has "device" and the trace holds
            no device events.
    """
    call_tree = links.call_tree
    belongs = None if range is None else _belonging(links.scopes, range)
    paths, groups = _paths(links.events, call_tree, frames=frames)
    for metric in metrics:
        cpu = metric == "cpu"
        values = call_tree.own(call_tree.total_ns) if cpu else links.device_own_ns
        if values is None:
            raise CaptureError(
                "The trace holds no device activity, so it has no device stacks; choose cpu."
            )
        totals = groups.sum(values, belongs)
        found = [Stack(path, total) for path, total in zip(paths, totals.tolist()) if total > 0]
        if metric == "device" and range is None:
            device, node = links.launched
            if unlaunched := int(links.events.duration_ns[device[node < 0]].sum()):
                found.append(Stack((_NO_LAUNCH,), unlaunched))
        yield found


def _without_ours(events: Events, call_tree: CallTree) -> tuple[CallTree, Ints]:
    """Remove this package's frames around the user's code, and all nodes inside its recording code.

    The outermost node of a thread remains, except the frames of `instrument run` and those around
    them. Returns the remaining tree, and for each given node the position of the nearest remaining
    node around it, or -1.
    """
    is_frame = events.among(PYTHON)
    machinery = (is_frame & events.named(_is_machinery))[call_tree.index]
    around_users = (is_frame & events.named(_is_around_users))[call_tree.index]
    if not (machinery | around_users).any():
        return call_tree, np.arange(len(call_tree))
    before_script = _before_script(events, call_tree)
    hidden = call_tree.inside(machinery & ~before_script) | around_users | before_script
    # A node stays if no remaining node is around it, because no other node could get its time.
    hidden &= call_tree.inside(~hidden) | before_script
    return call_tree.only(~hidden), call_tree.nearest_of(np.flatnonzero(~hidden))


def _before_script(events: Events, call_tree: CallTree) -> Flags:
    """A mask of the frames of `instrument run`, of those around them, and of its call of `exec`."""

    def frames(test: Callable[[str], object]) -> Flags:
        found = events.among(PYTHON) & events.named(lambda name: bool(test(name)))
        return found[call_tree.index]

    of_run = frames(_AROUND_SCRIPT.match)
    of_exec = frames(lambda name: name.startswith(_EXEC))
    commands = np.append(0, np.cumsum(frames(_COMMAND.match)))
    is_around = commands[call_tree.until] > commands[1:]  # some frame of the command is inside
    found: Flags = is_around | of_run | (of_exec & np.append(of_run, False)[call_tree.parent])
    return found


def _belonging(scopes: Scopes, wanted: str) -> Flags:
    """A mask of the nodes that ran in a range of this name or path, or in its backward."""
    paths = scopes.paths
    chosen = np.array([wanted in pair for pair in zip(paths.names, paths.texts)], np.bool_)
    if not chosen.any():
        near = get_close_matches(wanted, paths.texts, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "capture.ranges lists its ranges."
        raise CaptureError(f"The trace holds no range {wanted!r}; {hint}")
    inside = np.append(paths.at_or_below(chosen), False)
    return np.append(inside[scopes.enclosing] | inside[scopes.attributed], False)[scopes.innermost]


def folded(found: Sequence[Stack]) -> Iterator[str]:
    """Yield stacks as lines for `flamegraph.pl`, such as "outer;inner 12" (in microseconds).

    In names, semicolons become commas, and white space becomes underscores. Stacks of less than
    half a microsecond are left out.
    """
    safe = cache(_safe)
    for stack in found:
        if value := (stack.value_ns + 500) // 1000:
            yield without_commands(f"{';'.join(map(safe, stack.frames))} {value}\n")


def _safe(frame: str) -> str:
    return printable("_".join(frame.replace(";", ",").split())) or "_"


def _paths(
    events: Events, whole: CallTree, *, frames: bool
) -> tuple[list[tuple[str, ...]], Groups]:
    """Return the distinct call paths, in the order of their first nodes, and the nodes of each."""
    call_tree, nearest = _without_ours(events, whole)
    code, names = intern(map(_plain, events.names))
    path, parents, labels = number_paths(call_tree, code[events.name[call_tree.index]])
    before, prefix = list[tuple[str, ...]]([()]), np.zeros(len(call_tree), np.int64)
    if frames and (events.call_stack >= 0).any():
        recorded = np.append(events.call_stack[call_tree.index], -1)
        codes, groups = groupby(recorded[call_tree.nearest(recorded[:-1] >= 0)])
        texts = [events.texts[k] if k >= 0 else b"" for k in codes.tolist()]
        before, prefix = [_recorded_frames(text)[::-1] for text in texts], groups.of
    keys, groups = groupby(prefix * len(parents) + path)
    order = np.argsort(groups.min(np.arange(len(path))))
    outer, inner = np.divmod(keys[order], max(len(parents), 1))
    depths: list[int] = []
    for parent in parents.tolist():
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    sizes = np.array([*map(len, before)], np.int64)[outer] + np.array(depths, np.int64)[inner]
    most = MOST_FRAMES
    while most > 1 and np.minimum(sizes, most).sum() > _FRAMES * len(events):
        most //= 2
    inside: list[tuple[str, ...]] = []
    for parent, label in zip(parents.tolist(), labels.tolist()):
        above = inside[parent] if parent >= 0 else ()
        is_cut = len(above) > most
        inside.append(above if is_cut else _first_frames((*above, names[label]), most))
    number, found = intern(
        _first_frames(before[first] + inside[rest], most)
        for first, rest in zip(outer.tolist(), inner.tolist())
    )
    of = np.append(number[groups.renumbered(order).of], -1)
    return found, Groups(of[nearest], len(found))


def _first_frames(frames: tuple[str, ...], most: int) -> tuple[str, ...]:
    return frames if len(frames) <= most else (*frames[:most], DEEPER)


def _recorded_frames(text: bytes) -> tuple[str, ...]:
    return tuple(_shown(frame) for frame in str(decoded(text)).split(";") if frame)


def _plain(name: str) -> str:
    if is_step(name):
        return _ALL_STEPS
    return _RECORDING if _is_machinery(name) else _shown(range_label(name))


def _is_around_users(name: str) -> bool:
    return _AROUND_USERS.match(name) is not None


def is_own_frame(name: str) -> bool:
    """Whether a Python frame of this name runs code of this package."""
    return _OURS.match(name) is not None


def _is_machinery(name: str) -> bool:
    return is_own_frame(name) and not _is_around_users(name)


def frames_around(events: Events, event: Ints, depth: int) -> tuple[Ints, list[str | None]]:
    """Find the innermost Python frames around each call.

    Returns for each call an index into a list of stacks, and this list. A stack is text: at most
    `depth` frames, the innermost first, joined by ";", with "…" for the outer frames of a text of
    more than 5,000 characters. It is None outside of all frames, and for a call without an event
    (-1).
    """
    python = events.among(PYTHON)
    if not python.any():
        codes, groups = groupby(np.append(events.call_stack, -1)[event] + 1)
        numbers, labels = intern(
            _stack_text(_recorded_frames(events.texts[k - 1]), depth) if k else None
            for k in codes.tolist()
        )
        return numbers[groups.of], labels
    call_tree = nest(events, python & ~events.named(is_own_frame))
    at = np.where(event >= 0, call_tree.node_at(events.thread[event], events.start_ns[event]), -1)
    nodes, groups = groupby(at + 1)
    names = [_shown(name) for name in events.names]
    numbers, labels = intern(
        _stack_text(_above(events, call_tree, node - 1, names), depth) for node in nodes.tolist()
    )
    return numbers[groups.of], labels


def _above(events: Events, call_tree: CallTree, node: int, names: list[str]) -> Iterator[str]:
    while node >= 0:
        yield names[events.name[call_tree.index[node]]]
        node = int(call_tree.parent[node])


def _stack_text(frames: Iterable[str], depth: int) -> str | None:
    found, size = [], 0
    for frame in islice(frames, depth):
        size += len(frame) + 1
        if size > _LONGEST_STACK:
            found.append("…")
            break
        found.append(frame)
    return ";".join(found) or None


def _shown(frame: str) -> str:
    return shortened(_ADDRESS.sub("", frame), LONGEST_FRAME)

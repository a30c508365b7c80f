"""The range tree: annotations nested by time on each thread, put together by path."""

from __future__ import annotations

import numpy as np

from instrument.capture.events import ANNOTATION, OPERATOR, Events, Ints, is_runtime
from instrument.capture.launches import launches
from instrument.capture.nesting import Forest, nest, number_paths
from instrument.capture.steps import finished_steps, is_step
from instrument.capture.table import Table


def ranges(events: Events) -> Table:
    """One row for each path of annotations, in tree order: a parent before its children, siblings by first start.

    Columns: `path name depth calls host_ns self_host_ns share host_ns_per_step device_ns`.

    `path` is the names of the ranges around it on the same thread, joined by "/"; `depth` is 0 for the outermost.
    `self_host_ns` is `host_ns` without the ranges directly inside. `share` is a fraction of the recorded whole: the
    finished steps where there are any, otherwise the time from the first host event to the last.
    `host_ns_per_step` is a whole number, None without finished steps. `device_ns` sums the device events launched
    within, None where the trace has none.

    A range that the end of the window cut off counts with its time until then. Work that a thread of its own does
    on a range's behalf, such as backward, is in that range only where it is annotated there.
    """
    chosen = events.among(ANNOTATION) & ~events.named(is_step)
    forest = nest(events, chosen)
    path, above, name = number_paths(forest, events.name[forest.index].astype(np.int64))
    total = _by_path(forest.total_ns, path, len(above))
    count = len(finished_steps(events))
    whole = _whole_ns(events)
    device = _device_ns(events, forest)
    order, depth = _tree_order(above, forest, path)
    columns = {
        "calls": np.bincount(path, minlength=len(above)),
        "host_ns": total,
        "self_host_ns": _by_path(forest.own(forest.total_ns), path, len(above)),
    }
    texts = _path_texts(above, [events.names[k] for k in name.tolist()])
    return Table(
        {
            "path": [texts[k] for k in order],
            "name": [events.names[name[k]] for k in order],
            "depth": [depth[k] for k in order],
            **{title: [int(values[k]) for k in order] for title, values in columns.items()},
            "share": [int(total[k]) / whole if whole else None for k in order],
            "host_ns_per_step": [int(total[k]) // count if count else None for k in order],
            "device_ns": _device_column(device, path, order),
        }
    )


def _whole_ns(events: Events) -> int:
    """The time that shares are of."""
    stepped = events.duration_ns[finished_steps(events)].sum()
    host = events.among(OPERATOR | ANNOTATION) | events.among(is_runtime)
    if stepped or not host.any():
        return int(stepped)
    return int(events.end_ns[host].max() - events.start_ns[host].min())


def _by_path(values: Ints, path: Ints, count: int) -> Ints:
    totals = np.zeros(count, np.int64)
    np.add.at(totals, path, values)
    return totals


def _device_ns(events: Events, forest: Forest) -> Ints | None:
    """For each range the time of the device events launched inside it, at whatever depth."""
    found = launches(events)
    if not len(found.device):
        return None
    launch = np.where(found.call >= 0, found.call, found.operator)
    node = np.where(launch >= 0, forest.around(events.thread[launch], events.start_ns[launch]), -1)
    own = np.zeros(len(forest), np.int64)
    np.add.at(own, node[node >= 0], events.duration_ns[found.device[node >= 0]])
    return forest.with_descendants(own)


def _device_column(device: Ints | None, path: Ints, order: list[int]) -> list[int | None]:
    if device is None:
        return [None] * len(order)
    totals = _by_path(device, path, len(order))
    return [int(totals[k]) for k in order]


def _tree_order(above: Ints, forest: Forest, path: Ints) -> tuple[list[int], list[int]]:
    """The paths with parents before children and siblings by first start, and the depth of each path."""
    first = np.full(len(above), np.iinfo(np.int64).max)
    np.minimum.at(first, path, forest.start_ns)
    children: dict[int, list[int]] = {}
    for k in np.argsort(-first, kind="stable").tolist():
        children.setdefault(int(above[k]), []).append(k)
    depth, order, waiting = [0] * len(above), [], list(children.get(-1, []))
    while waiting:
        k = waiting.pop()
        order.append(k)
        for child in children.get(k, []):
            depth[child] = depth[k] + 1
            waiting.append(child)
    return order, depth


def _path_texts(above: Ints, names: list[str]) -> list[str]:
    texts: list[str] = []
    for parent, name in zip(above.tolist(), names):
        texts.append(f"{texts[parent]}/{name}" if parent >= 0 else name)
    return texts

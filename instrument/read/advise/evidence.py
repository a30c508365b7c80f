"""What events cost: their share of the counted steps, and rows of evidence for a finding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
from polars import selectors as cs

from instrument.read.advise.finding import Evidence
from instrument.read.facts.facts import coded
from instrument.read.facts.places import callers, sources_of_names
from instrument.read.trace.events import Ints, is_runtime, split_overload
from instrument.read.views.views import Views

# Of the calls of an operator with the same shapes, nothing disturbed the one at this quantile.
_UNDISTURBED = 0.1


def device_kind(capture: Views) -> str:
    """Which kind of device does the work: cuda, hip, xpu, mtia or hpu; cpu without device work."""
    events, work = capture.events, capture.work.event
    if not len(work):
        return "cpu"
    codes: list[int] = np.unique(events.category[work]).tolist()
    categories = {*filter(is_runtime, events.categories), *(events.categories[k] for k in codes)}
    found = {name.partition("_")[0] for name in categories} & {"xpu", "mtia", "hpu"}
    if found:
        return min(found)
    # Kineto's category of HIP's calls is cuda_runtime.
    return "hip" if any(name.startswith("hip") for name in events.names) else "cuda"


def in_steps(capture: Views, events: Ints) -> Ints:
    """Those of the events that begin in a counted step."""
    return events[capture.links.counted_steps.holds(capture.events.start_ns[events]) >= 0]


def share_of(capture: Views, events: Ints) -> float:
    """The share of the steps in which at least one of the events runs."""
    table = capture.events
    return capture.links.counted_steps.covered(table.start_ns[events], table.end_ns[events])


def share_with_device(capture: Views, events: Ints) -> float:
    """The share that CPU events take, or that their device work takes, if this is larger."""
    return max(share_of(capture, events), share_of(capture, launched_by(capture, events)))


def cost_share(capture: Views, events: Ints) -> float:
    """The share that the device work of CPU events takes; without device work, their own share."""
    has_work = len(capture.work.event) > 0
    return share_of(capture, launched_by(capture, events) if has_work else events)


def costs(capture: Views, events: Ints) -> Ints:
    """The device time of each CPU event, in ns; without device work, the CPU time."""
    links = capture.links
    if not len(capture.work.event):
        return links.spent_ns[links.call_tree.nodes_of(events)]
    found: Ints = capture.facts.events("device_ns")["device_ns"].gather(events).to_numpy()
    return found


def launched_by(capture: Views, events: Ints) -> Ints:
    """The device events that CPU events and all calls inside them launched."""
    tree, (device, launcher) = capture.links.call_tree, capture.links.launched
    chosen = np.zeros(len(tree) + 1, np.bool_)
    chosen[tree.nodes_of(events)] = True  # the last entry is for events without a node
    found: Ints = device[np.append(tree.at_or_inside(chosen[:-1]), False)[launcher]]
    return found


def undisturbed_ns(capture: Views, nodes: Ints, time_ns: Ints) -> Ints:
    """The time of each operator in the steps as if no other program or thread had disturbed it.

    It follows from equal calls: those of an operator with the same input shapes. Without shapes,
    they are the calls of a range that have the same place among those of each step, or all if their
    number changes from step to step: then half of them are taken as slow for another reason.

    `nodes` are nodes of the call tree, and `time_ns` is the recorded time of each.
    """
    events, links = capture.events, capture.links
    index, start_ns = links.call_tree.index[nodes], links.call_tree.start_ns[nodes]
    has_shapes = bool((events.shapes[index] >= 0).any())
    rows = pl.DataFrame(
        {
            "name": events.name[index],
            "of": events.shapes[index] if has_shapes else links.scopes.path_of_node[nodes],
            "step": links.counted_steps.holds(start_ns),
            "start_ns": start_ns,
            "ns": time_ns,
        }
    )
    ns, same = pl.col("ns"), ("name", "of")
    if has_shapes:
        least = ns.quantile(_UNDISTURBED, "equiprobable").over(same)
    else:
        rows = rows.with_columns(place=pl.col("start_ns").rank("ordinal").over(*same, "step"))
        in_each = pl.len().over(*same, "place").min().over(same) == links.counted_steps.count
        least = pl.when(in_each).then(ns.min().over(*same, "place"))
        least = least.otherwise(ns.quantile(0.5, "equiprobable").over(same))
    found: Ints = rows.select(pl.min_horizontal(least, ns).cast(pl.Int64)).to_series().to_numpy()
    return found


def calls_by(capture: Views, calls: Ints, **times_ns: Ints) -> pl.DataFrame:
    """The calls as rows, with the name of the outermost operator around each, and its range."""
    events, scopes = capture.events, capture.links.scopes
    operator, path = callers(capture.links, calls)
    names = pl.Series([split_overload(name)[0] for name in events.names], dtype=pl.String)
    return pl.DataFrame(
        {
            "name": names.gather(np.where(operator >= 0, operator, events.name[calls])),
            "path": coded(pl.Series(scopes.paths.texts, dtype=pl.String), path),
            "event": calls,
            **times_ns,
        }
    )


def largest(rows: pl.DataFrame, by: Sequence[str], order: str = "total_ns") -> pl.DataFrame:
    """Sum the times of rows by columns, with the longest event of each; the largest come first.

    Of events that are as long, the last counts; of rows that are as large, the first comes first.
    """
    event = pl.col("event")
    found = rows.group_by(by).agg(
        pl.len().alias("calls"),
        event.sort_by("total_ns", event).last(),
        cs.ends_with("_ns").sum(),
        first=event.min(),
    )
    return found.sort(order, "first", descending=[True, False]).drop("first")


def evidence(
    capture: Views,
    events: Ints,
    time_ns: Ints | None = None,
    *,
    most: int = 5,
    detail: str = "",
) -> tuple[Evidence, ...]:
    """Make one row for each name of the events, at most `most`; every row has the same `detail`.

    `time_ns` are other times than the durations.
    """
    rows = pl.DataFrame(
        {
            "name": capture.facts.events("name")["name"].gather(events),
            "event": events,
            "total_ns": capture.events.duration_ns[events] if time_ns is None else time_ns,
        }
    )
    return as_evidence(capture, largest(rows, ["name"]).head(most), detail)


def as_evidence(capture: Views, rows: pl.DataFrame, detail: str = "") -> tuple[Evidence, ...]:
    """Make a row of evidence for each row of `largest`; `detail` is for rows without their own."""
    if "detail" not in rows.columns:
        rows = rows.with_columns(detail=pl.lit(detail))
    wanted = rows.select("name", "calls", "total_ns", "event", "detail")
    return tuple(evidence_row(capture, *row) for row in wanted.iter_rows())


def evidence_row(
    capture: Views, name: str, calls: int, total_ns: int, longest: int | None, detail: str = ""
) -> Evidence:
    """Make one row; `longest` is the position of its longest event, or None if there is none."""
    if longest is None:
        return Evidence(name, calls, total_ns, detail=detail)
    events = capture.events
    start_ns, end_ns = int(events.start_ns[longest]), int(events.end_ns[longest])
    is_kernel = bool(capture.facts.is_on_device[longest])
    return Evidence(name, calls, total_ns, start_ns, end_ns, detail, is_kernel)


def evidence_by_cost(capture: Views, events: Ints) -> tuple[Evidence, ...]:
    """Make one row of evidence for each name of CPU events; the highest cost comes first."""
    what = "device time" if len(capture.work.event) else "CPU time"
    return evidence(capture, events, costs(capture, events), detail=what)


def evidence_of_function(capture: Views, source: str, time_ns: int) -> Evidence:
    """Make a row for the time that a function of the user spends outside of operators."""
    frames, events = capture.links.frames, capture.events
    is_source = np.array([each == source for each in sources_of_names(capture.links)], np.bool_)
    calls = in_steps(capture, frames.index[is_source[events.name[frames.index]]])
    # The function may begin before the window.
    return Evidence(source, max(len(calls), 1), time_ns, detail="outside of operators")

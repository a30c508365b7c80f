"""The operator table: the columns of torch's `key_averages()`, from the trace file alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from instrument.base.errors import CaptureError, ConfigError
from instrument.read.facts import memory_attribution
from instrument.read.facts.call_tree import outermost
from instrument.read.facts.device_work import KINDS as WORK
from instrument.read.facts.facts import CPU_KINDS
from instrument.read.facts.flops import has_rule, nodes_without_flops
from instrument.read.facts.groupby import Groups, intern
from instrument.read.facts.schema import Schema, names_of, schema
from instrument.read.trace.events import Codes, decoded
from instrument.read.views.table import Table, known_sum, shares

if TYPE_CHECKING:
    from instrument.read.views.views import Views

MEMORY_ROW, UNLAUNCHED_ROW = "[memory]", "[no launch]"
# Grouping by device needs a flag for each device and call. No machine has more devices.
_MOST_DEVICES = 64
# The columns that the table sums over all calls, and those that it sums over the calls that are
# not inside another call of their row, by their names in the table of events.
_SUMS = {
    "self_cpu_ns": "own_ns", "self_device_ns": "own_device_ns", "flops": "flops",
    "self_cpu_bytes": "own_cpu_bytes", "self_device_bytes": "own_device_bytes",
}  # fmt: skip
_TOTALS = {
    "cpu_ns": "duration_ns", "device_ns": "device_ns", "cpu_bytes": "cpu_bytes",
    "device_bytes": "device_bytes",
}  # fmt: skip
_SHARES = {"share": "counted_own_ns", "device_share": "counted_own_device_ns"}
_EVENTS = (
    "id", "name", "kind", "start_ns", "call", "counted", "operator",
    *_SUMS.values(), *_TOTALS.values(), *_SHARES.values(),
)  # fmt: skip

OPERATORS: Schema = schema(
    name="the name of the operator, range or runtime call; [memory] for allocations and frees "
    "outside of calls; [no launch] for device work whose launch is not in the trace",
    calls="the number of calls",
    self_cpu_ns="CPU time of the calls without the calls inside them",
    share="`self_cpu_ns` as a fraction of the CPU time of all calls of all threads. Only time in "
    "the steps that count (all finished ones but the first) is taken; if no step is finished, all "
    "time",
    device_share="`self_device_ns` as a fraction of all device time. Only work that was launched "
    "in the steps that count is taken; if no step is finished, all work",
    cpu_ns="CPU time of the calls, including the calls inside them",
    cpu_ns_per_call="`cpu_ns` divided by `calls`",
    self_device_ns="device time of the work that the calls themselves launched; None if the trace "
    "has no device events",
    device_ns="device time of the work that the calls and the calls inside them launched; None if "
    "the trace has no device events",
    device_ns_per_call="`device_ns` divided by `calls`",
    self_cpu_bytes="memory that the calls themselves allocated on the CPU, minus memory that they "
    "freed there; None if the trace has no memory events",
    cpu_bytes="memory that the calls and the calls inside them allocated on the CPU, minus memory "
    "that they freed there; None if the trace has no memory events",
    self_device_bytes="memory that the calls themselves allocated on devices, minus memory that "
    "they freed there; None if the trace has no memory events of a device",
    device_bytes="memory that the calls and the calls inside them allocated on devices, minus "
    "memory that they freed there; None if the trace has no memory events of a device",
    flops="floating-point operations of the calls without the calls inside them, by torch's "
    "formulas; None if they are not known",
    kind="operator, range, step, mark, loader, runtime call, wait (a call in which the CPU "
    "waits for the device), memory or unlaunched",
)
OPERATORS_WITHOUT_FLOPS: Schema = schema(
    name="the operator",
    has_rule="False if FLOPs have no formula, neither for the operator nor for an operator that it "
    "called. True if a formula exists, but its arguments were not recorded or not understood",
    calls="the number of calls",
    cpu_ns="CPU time of the calls, including the calls inside them",
    device_ns="device time of the work that the calls and the calls inside them launched; None if "
    "the trace has no device events",
)


def operators(capture: Views) -> Table:
    """Return one row for each name of an operator, annotation or runtime call; see `OPERATORS`.

    The rows are ordered by first call. The columns `share` and `device_share` each sum to 1, of the
    same totals as in `ranges`. docs/explanation/trust.md says how the table differs from
    torch's own.
    Cost: about 0.1 µs per event.
    """
    return Table.of(OPERATORS, _summed(_calls(capture), ["name", "kind"]))


def operators_by(capture: Views, what: str, depth: int = 5) -> Table:
    """Return one row for each name and value of a property; see `Views.operators_by`."""
    if what not in GROUPINGS:
        *most, last = GROUPINGS
        raise ConfigError(
            f"Operators cannot be grouped by {what!r}; choose {', '.join(most)} or {last}."
        )
    calls = _calls(capture)
    # A call that torch counts with the one around it has that one's property.
    first = pl.when("call").then(pl.int_range(pl.len())).forward_fill()
    of = calls.select(first.fill_null(pl.int_range(pl.len()))).to_series()
    calls = calls.with_columns(GROUPINGS[what](capture, calls, depth).gather(of).alias(what))
    name, *others = names_of(OPERATORS)
    return Table(_summed(calls, ["name", what, "kind"]).select(name, what, *others))


def operators_without_flops(capture: Views) -> Table:
    """Return the operators whose FLOPs are not counted; see `OPERATORS_WITHOUT_FLOPS`.

    The longest device time, or else CPU time, comes first. A call is listed if no formula gives
    FLOPs for it, for a call inside it, or for a call around it; of nested calls, only the
    outermost.
    """
    links = capture.links
    events, call_tree = links.events, links.call_tree
    nodes = np.flatnonzero(nodes_without_flops(events, call_tree, links.flops))
    device = links.device_own_ns
    named = capture.facts.events("name")["name"].gather(call_tree.index[nodes])
    of, names = intern(named.to_list())
    groups = Groups(of, len(names))
    totals = None if device is None else call_tree.with_descendants(device)[nodes]
    ruled = events.named(has_rule)[call_tree.index].astype(np.int64)
    columns: dict[str, Any] = {
        "name": names,
        "has_rule": groups.sum(call_tree.with_descendants(ruled)[nodes]) > 0,
        "calls": groups.size,
        "cpu_ns": groups.sums(call_tree.total_ns[nodes]),
        "device_ns": groups.sums(totals),
    }
    return Table.of(OPERATORS_WITHOUT_FLOPS, columns).sort(
        "cpu_ns" if device is None else "device_ns"
    )


def _calls(capture: Views) -> pl.DataFrame:
    """The rows of the table of events that the table sums.

    `node` is the number of the call, depth-first: the calls inside it have the numbers up to
    `after` - 1. At the end are device work without a launch in the trace, and the allocations and
    frees outside of all calls, which have no `id`.
    """
    events, tree = capture.rows(*_EVENTS), capture.links.call_tree
    node = pl.Series(tree.nodes_of(events["id"].to_numpy()))
    events = events.with_columns(
        node=node,
        after=pl.Series(tree.until.astype(np.int64)).gather(node.clip(0)) if len(tree) else node,
    )
    is_call = pl.col("kind").is_in(CPU_KINDS) & (pl.col("node") >= 0)
    calls = events.filter(is_call).sort("node")
    unlaunched = events.filter(pl.col("kind").is_in(WORK) & pl.col("operator").is_null())
    unlaunched = unlaunched.select(
        "id",
        "start_ns",
        "device_ns",
        own_device_ns="device_ns",
        counted_own_device_ns=pl.col("device_ns") * pl.col("counted"),
    )
    others = [unlaunched.with_columns(_row(UNLAUNCHED_ROW, "unlaunched"))]
    if capture.scope is None:
        others.insert(0, _memory(capture).with_columns(_row(MEMORY_ROW, "memory")))
    found = pl.concat([calls, *(each for each in others if len(each))], how="diagonal")
    outside = pl.int_range(len(tree), len(tree) + pl.len())
    return found.with_columns(
        node=pl.when(pl.col("after").is_null()).then(outside).otherwise("node"),
        after=pl.when(pl.col("after").is_null()).then(outside + 1).otherwise("after"),
    )


def _row(name: str, kind: str) -> list[pl.Expr]:
    return [pl.lit(name).alias("name"), pl.lit(kind).alias("kind"), pl.lit(True).alias("call")]


def _memory(capture: Views) -> pl.DataFrame:
    """The allocations and frees outside of all calls; their own time is 0."""
    memory = capture.events.memory
    bare = memory_attribution.uncovered(capture.links.call_tree, memory)
    columns: dict[str, Any] = {"start_ns": memory.time_ns[bare], "thread_code": memory.thread[bare]}
    for where, size in memory_attribution.sizes(memory).items():
        if size is not None:
            columns |= {f"own_{where}_bytes": size[bare], f"{where}_bytes": size[bare]}
    has_device = len(capture.facts.work.event) > 0
    zeros = ["own_ns", "duration_ns", "counted_own_ns"]
    zeros += ["own_device_ns", "device_ns", "counted_own_device_ns"] if has_device else []
    return pl.DataFrame(columns).with_columns(pl.lit(0, pl.Int64).alias(name) for name in zeros)


def _summed(calls: pl.DataFrame, keys: list[str]) -> pl.DataFrame:
    """The cells of the table, with the rows in the order of their first calls."""
    groups = calls.select(keys).with_row_index("row").group_by(keys, maintain_order=True).agg("row")
    rows, sizes = groups["row"].explode().to_numpy(), groups["row"].list.len().to_numpy()
    group = np.empty(len(calls), np.int64)
    group[rows] = np.repeat(np.arange(len(groups)), sizes)
    node, after = (calls[name].to_numpy() for name in ("node", "after"))
    calls = calls.with_columns(group=group, outer=outermost(group, node, after))
    found = calls.group_by("group", maintain_order=True).agg(
        pl.col(*keys).first(),
        pl.sum("call").cast(pl.Int64).alias("calls"),
        pl.min("start_ns"),
        *(known_sum(pl.col(own)).alias(name) for name, own in _SUMS.items()),
        *(known_sum(pl.col(whole), pl.col("outer")).alias(name) for name, whole in _TOTALS.items()),
        *(known_sum(pl.col(part)).alias(share) for share, part in _SHARES.items()),
    )
    found = found.sort("start_ns", maintain_order=True)
    per_call = [
        pl.when(pl.col("calls") > 0).then(pl.col(ns) / pl.col("calls")).alias(f"{ns}_per_call")
        for ns in ("cpu_ns", "device_ns")
    ]
    parts = {share: shares(found[share], int(calls[part].sum())) for share, part in _SHARES.items()}
    found = found.with_columns(*per_call, **parts)
    return found.select(*dict.fromkeys([*keys, *names_of(OPERATORS)]))


def by_input_shapes(capture: Views, calls: pl.DataFrame, _: int) -> pl.Series:
    """Input shapes as torch prints them; None for all calls if the trace holds no input shapes."""
    return _inputs(capture, calls, "shapes", shape_text)


def by_input_types(capture: Views, calls: pl.DataFrame, _: int) -> pl.Series:
    """Input types as torch names them; None for all calls if the trace holds no input types."""
    return _inputs(capture, calls, "types", _type_text)


def _inputs(
    capture: Views, calls: pl.DataFrame, column: str, text: Callable[[bytes], str]
) -> pl.Series:
    codes: Codes = getattr(capture.events, column)
    if not (codes >= 0).any():
        return _none(calls)
    used = np.flatnonzero(np.bincount(codes[codes >= 0], minlength=len(capture.events.texts)))
    texts = dict(zip(used.tolist(), (text(capture.events.texts[k]) for k in used.tolist())))
    own = pl.Series(codes).gather(calls["id"])
    if not capture.events.records_inputs:  # those of a detail window, which may lack some
        return own.replace_strict(texts, default=None, return_dtype=pl.String)
    return own.replace_strict(texts, default="[]", return_dtype=pl.String).fill_null("[]")


def by_stack(capture: Views, calls: pl.DataFrame, depth: int) -> pl.Series:
    """The innermost Python frames around each call."""
    from instrument.read.views.stacks import frames_around

    codes, labels = frames_around(capture.events, calls["id"].fill_null(-1).to_numpy(), depth)
    return pl.Series(labels, dtype=pl.String).gather(codes)


def by_overload(capture: Views, calls: pl.DataFrame, _: int) -> pl.Series:
    """The operator's overload, "" for the default overload; None if the trace names no overload."""
    overloads = capture.facts.events("overload")["overload"]
    if not (overloads.fill_null("") != "").any():
        return _none(calls)
    return overloads.gather(calls["id"]).fill_null("")


def by_thread(capture: Views, calls: pl.DataFrame, _: int) -> pl.Series:
    """The thread as "process/thread"; a runtime call has the thread of the operator around it.

    Work whose launch is not in the trace has its device and stream.
    """
    where = capture.facts.events("thread", "device", "stream")
    texts = where.select(pl.coalesce("thread", pl.col("device") + "/" + pl.col("stream")))
    found = texts.to_series().gather(calls["id"])
    if "thread_code" not in calls.columns:
        return found
    threads = pl.Series([f"{process}/{thread}" for process, thread in capture.events.threads])
    return found.fill_null(threads.gather(calls["thread_code"]))


def by_step(capture: Views, calls: pl.DataFrame, _: int) -> pl.Series:
    """The number of the finished step, on any thread, in which the call began; None for none."""
    steps, links = capture.facts.events("step")["step"], capture.links
    found = steps.gather(calls["id"])
    at = pl.Series(links.finished_steps.holds(calls["start_ns"].to_numpy()))
    numbers = pl.Series(links.step_numbers, dtype=pl.Int64)
    of_memory = numbers.gather(at.set(at < 0, None)) if len(numbers) else found
    return found.zip_with(calls["id"].is_not_null(), of_memory)


def by_device(capture: Views, calls: pl.DataFrame, _: int) -> pl.Series:
    """The devices that ran work of the call, as text such as "0" or "0,1"; None for no device.

    Raises:
        CaptureError: the trace has too many devices.
    """
    links, devices = capture.links, capture.facts.events("device")["device"]
    device, node = links.launched
    on = devices.gather(device).to_numpy()
    names = sorted({*on[node >= 0].tolist()})
    if len(names) > _MOST_DEVICES:
        raise CaptureError(
            f"The trace holds work of {len(names)} devices, but operators can be grouped by at "
            f"most {_MOST_DEVICES}: group them by another property."
        )
    tree = links.call_tree
    used: list[pl.Expr] = [pl.repeat(None, len(tree) + 1, dtype=pl.String)]
    for name in names:
        own = np.bincount(node[(node >= 0) & (on == name)], minlength=len(tree))
        is_used = pl.Series(np.append(tree.with_descendants(own) > 0, False))
        used.append(pl.when(is_used).then(pl.lit(name)))
    texts = pl.select(pl.concat_str(used, separator=",", ignore_nulls=True)).to_series()
    found = texts.replace("", None).gather(np.minimum(calls["node"].to_numpy(), len(tree)))
    return devices.gather(calls["id"]).zip_with(calls["kind"] == "unlaunched", found)


def by_range(capture: Views, calls: pl.DataFrame, _: int) -> pl.Series:
    """The path of the range around the call, or around its forward operator; None for none."""
    events = capture.facts.events("path", "parent", "kind")
    around = events["path"].gather(events["parent"])
    is_range = capture.links.events_that_are_ranges
    path = around.zip_with(pl.Series(is_range), events["path"])
    return path.gather(calls["id"])


def by_layer(capture: Views, calls: pl.DataFrame, _: int) -> pl.Series:
    """The layer of the call, or of all its device work; None for none or several."""
    return capture.facts.events("layer")["layer"].gather(calls["id"])


def _none(calls: pl.DataFrame) -> pl.Series:
    return pl.Series([None], dtype=pl.String).new_from_index(0, len(calls))


GROUPINGS: dict[str, Callable[[Views, pl.DataFrame, int], pl.Series]] = {
    "input_shapes": by_input_shapes,
    "input_types": by_input_types,
    "stack": by_stack,
    "overload": by_overload,
    "thread": by_thread,
    "step": by_step,
    "device": by_device,
    "range": by_range,
    "layer": by_layer,
}


def shape_text(text: bytes) -> str:
    """Shapes as torch prints them. For a list of tensors, torch prints []."""
    shapes = decoded(text)
    if not isinstance(shapes, list):
        return str(shapes)
    lists = (
        isinstance(shape, list) and any(isinstance(n, list) for n in shape) for shape in shapes
    )
    return str([[] if is_list else shape for shape, is_list in zip(shapes, lists)])


def _type_text(text: bytes) -> str:
    """Types without quotation marks, such as "[double, Scalar]"."""
    return str(decoded(text)).replace("'", "")

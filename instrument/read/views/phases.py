"""The time by stage: prefill and decode of an inference engine, forward and backward of a pipeline.

The ranges that these programs write name the stages; see `facts.grammars`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from instrument.base.units import counted, duration, percent
from instrument.read.facts.cuda_graphs import replayed
from instrument.read.facts.device_work import COPY
from instrument.read.facts.grammars import Annotation, parse
from instrument.read.facts.groupby import intern
from instrument.read.facts.idle import device_time_of, lasting, launching_step
from instrument.read.facts.schema import Schema, schema
from instrument.read.facts.step_index import engine_steps, step_bounds
from instrument.read.trace.events import Ints
from instrument.read.views.table import Table

if TYPE_CHECKING:
    from instrument.read.views.views import Views

PHASES: Schema = schema(
    stage="prefill, decode, mixed, draft, verify, forward, backward or weight gradients; see "
    "`stage` of the table of events. None for work of no stage",
    steps="the number of steps of the stage among those that count. A step is one that an engine "
    "annotated or, in a trace without annotations, one that the replays of CUDA graphs show. None "
    "if the stage is no step",
    step_ns="the mean time of such a step: from its start, or from the end of the step before if "
    "that is later, until the next one begins and the device has ended what the step launched",
    requests="the mean number of requests in such a step; None if the ranges do not say it",
    tokens="the mean number of new tokens in such a step; None if the ranges do not say it",
    step_ns_per_token="the time of the steps divided by their tokens. In decode, a request gets "
    "one token in each step, so it waits `step_ns` for its next token",
    idle_share="the part of the steps' time in which no device works",
    launch_wait_share="the part of the steps' time in which the device waits for launches",
    padding_share="the part of the batches that only fills up the batch size of a captured CUDA "
    "graph; None if the ranges do not say it",
    kernels="the number of kernels, copies and memsets that the stage launched, in the steps that "
    "count",
    device_ns="the duration of these kernels, copies and memsets",
    device_share="`device_ns` as a fraction of the device time of all stages",
    graph_share="the part of `device_ns` that CUDA graphs replayed",
)
# Steps are found by the replays of graphs if the same sequence of graphs is replayed so many times,
# each time with a copy between host and device, as the tokens of a step need it.
_LEAST_SEQUENCES = 3
_COPY_WITH_HOST = re.compile(r"HtoD|DtoH|Host", re.IGNORECASE)


def phases(capture: Views) -> Table:
    """Return one row for each stage, the one with the most device time first; see `PHASES`.

    The table is empty if no range names a stage and no replays show steps.
    """
    work, steps = capture.work, step_times(capture)
    rows = capture.facts.events("stage", "duration_ns", "counted")[work.event]
    if not len(steps) and rows["stage"].is_null().all():
        return Table.of_dicts(PHASES, [])
    graph = pl.Series(replayed(capture.events, work.event, work.call))
    time, device_ns = pl.col("duration_ns"), pl.col("device_ns")
    launched = rows.with_columns(graph=graph).filter("counted").group_by("stage")
    found = launched.agg(
        kernels=pl.len().cast(pl.Int64),
        device_ns=time.sum(),
        graph_share=_part(time.filter("graph").sum(), time.sum()),
    ).with_columns(device_share=_part(device_ns, device_ns.sum()))
    of_steps = _by_stage(steps).drop("total_ns")
    found = found.join(of_steps, on="stage", how="full", coalesce=True, nulls_equal=True)
    return Table.of(PHASES, found.sort("device_ns", descending=True, nulls_last=True))


def step_times(capture: Views) -> pl.DataFrame:
    """Return a row for each annotated step that counts: its stage, its counts, and its times.

    Without annotations and without other steps, a row for each step that replays of graphs show.
    Computed once.
    """
    return capture.once("times of an engine's steps", lambda: _find_step_times(capture))


def engine_of(capture: Views) -> str | None:
    """Return the inference engine that annotated steps, such as vLLM; None without one."""
    events = capture.events
    said = (parse(events.names[code]) for code in events.name[engine_steps(events)[:1]].tolist())
    return next((each.program for each in said if each), None)


def stages_in_words(capture: Views) -> str:
    """Return a sentence on the stages of an engine's steps; "" without an engine."""
    engine, steps = engine_of(capture), step_times(capture)
    if engine is None or not len(steps):
        return ""
    if len(steps) == 1:
        row = steps.row(0, named=True)
        stage = f"{row['stage']} step" if row["stage"] else "step"
        return f"It holds a {stage} of {engine}{_batch(row)}."
    stages = _by_stage(steps).with_columns(share=pl.col("total_ns") / pl.col("total_ns").sum())
    parts = [
        f"{percent(row['share'])} {row['stage'] or 'of no known stage'} "
        f"({counted(row['steps'], 'step')} of {duration(row['step_ns'])}{_batch(row)})"
        for row in stages.sort("total_ns", descending=True).iter_rows(named=True)
    ]
    return f"The time of {engine}'s steps is {', '.join(parts)}."


def _batch(row: dict[str, Any]) -> str:
    """How many requests and tokens a step has, after a colon; "" if it is not known."""
    texts = [row["requests"] and counted(row["requests"], "request")]
    prefill, decode = row.get("prefill_tokens"), row.get("decode_tokens")
    if prefill and decode:
        texts += [f"{counted(prefill, 'token')} in prefill", f"{decode:,} in decode"]
    else:
        texts.append(row["tokens"] and counted(row["tokens"], "token"))
    known = ", ".join(filter(None, texts))
    return f": {known}" if known else ""


def _find_step_times(capture: Views) -> pl.DataFrame:
    events, work, links = capture.events, capture.work, capture.links
    index = engine_steps(events)
    said = [parse(events.names[code]) for code in events.name[index].tolist()]
    step = launching_step(events, work, index)
    start_ns, end_ns = lasting(*step_bounds(events, index), work, step)
    if (step == 0).any():  # the device may still have run what came before the trace
        start_ns[0] = max(start_ns[0], work.start_ns[step == 0].min())
    counts = links.counted_steps.holds(events.start_ns[index]) >= 0
    graph = replayed(events, work.event, work.call)
    in_graph = np.bincount(step[graph & (step >= 0)], minlength=len(index)) > 0
    if not len(index) and not len(links.steps):
        start_ns, end_ns = _replayed_steps(capture)
        said, counts = [None] * len(start_ns), np.ones(len(start_ns), np.bool_)
        in_graph = counts
    if not len(start_ns):
        return pl.DataFrame(schema=_STEPS)
    time = device_time_of(events, work, start_ns, end_ns)
    rows = [each or _NOTHING for each in said]
    return pl.DataFrame(
        {
            "stage": [each.stage for each in rows],
            "requests": [each.requests for each in rows],
            "tokens": [each.tokens for each in rows],
            "prefill_tokens": [each.prefill_tokens for each in rows],
            "decode_tokens": [each.decode_tokens for each in rows],
            "captured": [each.captured for each in rows],
            "step_ns": end_ns - start_ns,
            "idle_ns": time["idle_ns"],
            "launch_wait_ns": time["launch_wait_ns"],
            "is_replayed": in_graph,
        },
        schema=_STEPS,
    ).filter(pl.Series(counts))


_COUNTS = "requests tokens prefill_tokens decode_tokens captured"
_TIMES = "step_ns idle_ns launch_wait_ns"
_STEPS = {
    "stage": pl.String,
    **dict.fromkeys([*_COUNTS.split(), *_TIMES.split()], pl.Int64),
    "is_replayed": pl.Boolean,
}
_NOTHING = Annotation("", None, "")


def _by_stage(steps: pl.DataFrame) -> pl.DataFrame:
    step_ns, tokens, captured = pl.col("step_ns"), pl.col("tokens"), pl.col("captured")
    padded = pl.col("requests").filter(captured.is_not_null()).sum()
    return steps.group_by("stage").agg(
        _rounded(step_ns.mean()),
        _known("requests", _rounded(pl.col("requests").mean())),
        _known("tokens", _rounded(tokens.mean())),
        steps=pl.len().cast(pl.Int64),
        total_ns=step_ns.sum(),
        step_ns_per_token=_known("tokens", step_ns.sum() // tokens.sum()),
        idle_share=_part(pl.col("idle_ns").sum(), step_ns.sum()),
        launch_wait_share=_part(pl.col("launch_wait_ns").sum(), step_ns.sum()),
        padding_share=1 - _part(padded, captured.sum()),
    )


def _known(column: str, value: pl.Expr) -> pl.Expr:
    """The value if the column is known of all rows, and not 0 of all; else null."""
    is_known = (pl.col(column).count() == pl.len()) & (pl.col(column).sum() > 0)
    return pl.when(is_known).then(value)


def _rounded(value: pl.Expr) -> pl.Expr:
    return value.round().cast(pl.Int64)


def _part(part: pl.Expr, whole: pl.Expr) -> pl.Expr:
    return pl.when(whole > 0).then(part / whole)


def _replayed_steps(capture: Views) -> tuple[Ints, Ints]:
    """The spans from the first replay of a repeated sequence of graphs to that of the next one.

    In a window that begins within a step, they begin there, too. The last one, whose end is not
    known, is left out.
    """
    events, work = capture.events, capture.work
    chosen = replayed(events, work.event, work.call) & (events.correlation[work.event] != 0)
    event = work.event[chosen]
    nodes = pl.DataFrame(
        {
            "replay": events.correlation[event],
            "start_ns": work.start_ns[chosen],
            "kernel": events.name[event],
        }
    ).sort("start_ns")
    replays = nodes.group_by("replay", maintain_order=True).agg(
        pl.col("start_ns").first(), pl.col("kernel").cast(pl.String).str.join(",")
    )
    period = _period(intern(replays["kernel"])[0].tolist())
    bounds = replays["start_ns"].to_numpy()[:: period or 1]
    copies = np.sort(
        work.start_ns[
            (work.kind == COPY)
            & events.named(lambda name: _COPY_WITH_HOST.search(name) is not None)[work.event]
        ]
    )
    at = np.searchsorted(copies, bounds)
    if not period or len(bounds) <= _LEAST_SEQUENCES or (np.diff(at) == 0).any():
        bounds = bounds[:1]
    return bounds[:-1], bounds[1:]


def _period(values: list[int]) -> int:
    """The length of the sequence whose repetition all values are; 0 if none is repeated enough."""
    border, borders = 0, [0] * len(values)  # the longest beginning that is also the end, up to each
    for k in range(1, len(values)):
        while border and values[k] != values[border]:
            border = borders[border - 1]
        border += values[k] == values[border]
        borders[k] = border
    period = len(values) - border
    return period if _LEAST_SEQUENCES * period <= len(values) else 0

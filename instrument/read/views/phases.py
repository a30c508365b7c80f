"""The time by stage: prefill and decode of an inference engine, forward and backward of a pipeline.

The ranges that these programs write name the stages; see `facts.grammars`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

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
    steps_share="the time of these steps as a fraction of that of the steps of all stages",
    requests="the mean number of requests in such a step; None if the ranges do not say it",
    prefill_tokens="the mean number of prompt tokens in such a step; None if not known",
    decode_tokens="the mean number of tokens in such a step that are decoded or, of drafts, "
    "verified; None if not known",
    step_ns_per_token="the time of the steps divided by their tokens. In decode, a request gets "
    "one token in each step, so it waits `step_ns` for its next token",
    idle_share="the part of the steps' time in which no device works",
    launch_wait_share="the part of the steps' time in which the device waits for launches",
    graph_share="the part of the stage's device time that CUDA graphs replayed",
    device_share="`device_ns` as a fraction of the device time of all stages",
    device_ns="the duration of the kernels, copies and memsets that the stage launched, in the "
    "steps that count",
    kernels="their number",
    padding_share="the part of the batches that only fills up the batch size of a captured CUDA "
    "graph; None if the ranges do not say it",
)
# Steps are found by the replays of graphs if the same sequence of graphs is replayed so many times,
# each time with a copy between host and device, as the tokens of a step need it.
_LEAST_SEQUENCES, _LONGEST_SEQUENCE = 3, 1000
_WITH_HOST = re.compile(r"HtoD|DtoH|Host", re.IGNORECASE)


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
    found = found.join(_by_stage(steps), on="stage", how="full", coalesce=True, nulls_equal=True)
    return Table.of(PHASES, found.sort("device_ns", descending=True, nulls_last=True))


def step_times(capture: Views) -> pl.DataFrame:
    """Return a row for each annotated step that counts: what its range says, and its times.

    Without annotations and without other steps, a row for each step that replays of graphs show.
    Computed once.
    """
    return capture.once("times of an engine's steps", lambda: _find_step_times(capture))


def engine_of(capture: Views) -> str | None:
    """Return the inference engine that annotated steps, such as vLLM; None without one."""
    return next(iter(step_times(capture)["program"]), None)


def steps_in_words(capture: Views) -> str:
    """Return how many steps an engine annotated, such as "1 step of vLLM"; "" without an engine."""
    engine = engine_of(capture)
    return f"{counted(len(step_times(capture)), 'step')} of {engine}" if engine else ""


def stages_in_words(capture: Views) -> str:
    """Return a sentence on the stages of an engine's steps; "" without an engine."""
    engine, parts = engine_of(capture), []
    if engine is None:
        return ""
    stages = _by_stage(step_times(capture)).sort("steps_share", descending=True)
    for row in stages.iter_rows(named=True):
        counts = ((row[name], noun) for name, noun in _NOUNS.items())
        texts = [counted(count, noun) for count, noun in counts if count]
        batch = f": {', '.join(texts)}" if texts else ""
        steps = f"{counted(row['steps'], 'step')} of {duration(row['step_ns'])}{batch}"
        parts.append(f"{percent(row['steps_share'])} {row['stage'] or 'of no stage'} ({steps})")
    return f"The time of {engine}'s steps is {', '.join(parts)}."


_NOUNS = {
    "requests": "request", "prefill_tokens": "prefill token", "decode_tokens": "decode token"
}  # fmt: skip


def _find_step_times(capture: Views) -> pl.DataFrame:
    events, work, links = capture.events, capture.work, capture.links
    index = engine_steps(events)
    said = [parse(events.names[code]) or _NOTHING for code in events.name[index].tolist()]
    stage = capture.facts.events("stage")["stage"].gather(index)  # a decode step may make drafts
    step = launching_step(events, work, index)
    start_ns, end_ns = lasting(*step_bounds(events, index), work, step)
    if not len(links.steps) and (step == 0).any():  # the device may have run what came before
        start_ns[0] = max(start_ns[0], work.start_ns[step == 0].min())
    counts = links.counted_steps.holds(events.start_ns[index]) >= 0
    in_graph = step[replayed(events, work.event, work.call) & (step >= 0)]
    if not len(index) and not len(links.steps):
        start_ns, end_ns = _replayed_steps(capture)
        said, counts = [_NOTHING] * len(start_ns), np.ones(len(start_ns), np.bool_)
        stage = stage.extend_constant(None, len(start_ns))
    is_timed = len(start_ns) and len(work.event)
    time = device_time_of(events, work, start_ns, end_ns) if is_timed else {}
    unknown = pl.repeat(None, len(start_ns), dtype=pl.Int64)
    return (
        pl.DataFrame(said, schema=_SAID, orient="row")
        .with_columns(
            stage=stage,
            step_ns=pl.Series(end_ns - start_ns),
            idle_ns=time.get("idle_ns", unknown),
            launch_wait_ns=time.get("launch_wait_ns", unknown),
            is_replayed=pl.Series(np.isin(np.arange(len(start_ns)), in_graph)),
        )
        .filter(pl.Series(counts))
    )


_SAID = dict(zip(Annotation._fields, [pl.String] * 3 + [pl.Boolean] + [pl.Int64] * 4))
_NOTHING = Annotation(None, None, "")


def _by_stage(steps: pl.DataFrame) -> pl.DataFrame:
    """The columns of `PHASES` that are about steps."""
    time, captured = pl.col("step_ns"), pl.col("captured")
    tokens = pl.col("prefill_tokens") + pl.col("decode_tokens")
    padded = pl.col("requests").filter(captured.is_not_null())
    means = {
        name: pl.when(pl.col(name).count() == pl.len()).then(pl.col(name).mean().round())
        for name in ("step_ns", "requests", "prefill_tokens", "decode_tokens")
    }
    found = steps.group_by("stage").agg(
        steps=pl.len().cast(pl.Int64),
        steps_share=time.sum(),
        step_ns_per_token=pl.when(tokens.count() == pl.len()).then(time.sum() // tokens.sum()),
        idle_share=_part(pl.col("idle_ns").mean(), time.mean()),
        launch_wait_share=_part(pl.col("launch_wait_ns").mean(), time.mean()),
        padding_share=1 - _part(padded.sum(), captured.sum()),
        **{name: mean.cast(pl.Int64) for name, mean in means.items()},
    )
    total_ns = pl.col("steps_share").sum()
    return found.with_columns(steps_share=_part(pl.col("steps_share"), total_ns))


def _part(part: pl.Expr, whole: pl.Expr) -> pl.Expr:
    return pl.when(whole > 0).then(part / whole)


def _replayed_steps(capture: Views) -> tuple[Ints, Ints]:
    """The spans from the first replay of a repeated sequence of graphs to that of the next one.

    In a window that begins within a step, they begin there, too. The last one, whose end is not
    known, is left out.
    """
    events, work = capture.events, capture.work
    chosen = replayed(events, work.event, work.call) & (events.correlation[work.event] != 0)
    event, is_copy = work.event[chosen], events.named(lambda name: bool(_WITH_HOST.search(name)))
    nodes = {"replay": events.correlation[event], "kernel": events.name[event]}
    replays = (
        pl.DataFrame(nodes | {"start_ns": work.start_ns[chosen]})
        .sort("start_ns")
        .group_by("replay", maintain_order=True)
        .agg(pl.col("start_ns").first(), pl.col("kernel").sort().cast(pl.String).str.join(","))
    )
    graph, count = intern(replays["kernel"])[0], len(replays)
    periods = range(1, min(count // _LEAST_SEQUENCES, _LONGEST_SEQUENCE) + 1)
    period = next((each for each in periods if (graph[each:] == graph[:-each]).all()), 0)
    bounds = replays["start_ns"].to_numpy()[:: period or count + 1]
    copies = np.sort(work.start_ns[(work.kind == COPY) & is_copy[work.event]])
    if (np.diff(np.searchsorted(copies, bounds)) == 0).any():
        bounds = bounds[:1]
    return bounds[:-1], bounds[1:]

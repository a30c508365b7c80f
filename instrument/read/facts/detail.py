"""Inputs of operators: those of the like operators in the detail window after the window.

An operator of the window is like one of a step of the detail window if each is the n-th of its name
in its step, below the same names and in the same range, and if both steps have equally many of
these. It gets what all steps of the detail window agree on; the rest is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from instrument.read.trace.events import Events, called_operators, is_step

if TYPE_CHECKING:
    from instrument.read.facts.links import Links

_INPUTS = ("shapes", "concrete", "types")
# Odd numbers without a pattern: two keys are equal by chance in 1 of 10^19 cases.
_FACTOR, _OTHER_FACTOR = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)


class DetailedEvents(Events):
    """Events whose inputs, and `texts`, are what `find` returns when one of them is first read."""

    records_inputs = False

    def __init__(self, events: Events, find: Callable[[], Mapping[str, Any]]) -> None:
        for field in fields(Events):
            if field.name not in (*_INPUTS, "texts"):
                object.__setattr__(self, field.name, getattr(events, field.name))
        object.__setattr__(self, "find", find)

    def __getattr__(self, name: str) -> Any:
        """Find the inputs; Python calls this for an attribute that is not set."""
        if name not in (*_INPUTS, "texts"):
            raise AttributeError(name)
        for each, value in self.find().items():
            object.__setattr__(self, each, value)
        return getattr(self, name)


def inputs_of(links: Links, texts: tuple[bytes, ...], detail: Links | None) -> dict[str, Any]:
    """The columns `shapes`, `concrete`, `types` and `texts` of the events of `links`.

    `texts` are those that the trace of the window has itself. Without a detail window, no inputs
    are known.
    """
    columns = {name: np.full(len(links.events), -1, np.int32) for name in _INPUTS}
    if detail is None or not len(detail.steps) or not len(links.steps):
        return {**columns, "texts": texts}
    inputs = {name: getattr(detail.events, name) for name in _INPUTS}
    given = pl.DataFrame({"event": np.arange(len(detail.events)), **inputs})
    same = (pl.when(pl.col(name).n_unique() == 1).then(pl.col(name).first()) for name in _INPUTS)
    found = of_window(links, detail, given, *same)
    for name, column in columns.items():
        known = found.filter(pl.col(name) >= 0)
        column[known["event"].to_numpy()] = known[name].to_numpy() + len(texts)
    return {**columns, "texts": (*texts, *detail.events.texts)}


def of_window(links: Links, detail: Links, given: pl.DataFrame, *values: pl.Expr) -> pl.DataFrame:
    """The operators of the window like those of the detail window whose `event` is in `given`.

    `values` are made of the rows of `given` that are alike. There is one in each step of the detail
    window, or the operator is left out.
    """
    theirs = detail.numbered_operators.join(given, on="event")
    agreed = theirs.group_by("key", "number").agg(
        pl.len().alias("steps"),
        pl.col("like").n_unique().alias("likes"),
        pl.col("like").first(),
        *values,
    )
    agreed = agreed.filter(steps=len(detail.steps), likes=1)
    return links.numbered_operators.join(agreed, on=["key", "number", "like"]).sort("event")


def numbered_operators(links: Links) -> pl.DataFrame:
    """The operators in finished steps.

    `key` stands for the range and the names from the outermost call down, `number` counts those of
    the same step and key, and `like` is how many there are. Operators of one key on several threads
    are left out, because their order is by chance.
    """
    events, tree, scopes = links.events, links.call_tree, links.scopes
    name = np.array([0 if is_step(each) else hash(each) for each in events.names], np.int64)
    path = np.array([*map(hash, scopes.paths.texts), 0], np.int64)[scopes.path_of_node[:-1]]
    label = name[events.name[tree.index]].view(np.uint64) * _FACTOR ^ path.view(np.uint64)
    key = np.zeros(len(tree) + 1, np.uint64)  # the last is for no parent
    for level in tree.levels():
        mixed = (key[tree.parent[level]] ^ label[level]) * _OTHER_FACTOR
        key[level] = mixed ^ mixed >> np.uint64(29)
    node = np.flatnonzero(called_operators(events)[tree.index])
    columns = {"event": tree.index[node], "key": key[node], "thread": tree.thread[node]}
    columns["step"] = links.finished_steps.holds(tree.start_ns[node])
    of = ("step", "key")
    return (
        pl.DataFrame(columns)
        .filter(pl.col("step") >= 0, pl.col("thread").n_unique().over(of) == 1)
        .with_columns(number=pl.int_range(pl.len()).over(of), like=pl.len().over(of))
    )

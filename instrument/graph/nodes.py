"""`NodeTable`: a row for each node of a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from instrument.capture.events import Ints
from instrument.capture.table import Table
from instrument.errors import ConfigError

Grouping = Literal["module_path", "module_type", "target", "op", "source"]
GROUPINGS = get_args(Grouping)
_LABELS = ("op", "name", "target", "module_path", "module_type", "source", "inputs")
_MADE = ("output_shape", "output_dtype", "output_bytes")


class NodeTable(Table):
    """One row for each node, in graph order. Times are whole nanoseconds; what is not known is None.

    - `op`, `name`, `target`: as torch.fx has them; `target` is a module's path, or a function's or method's name.
    - `module_path`, `module_type`: the innermost module that the node runs in, and its class; "" is the model itself.
    - `source`: file and line of the call in the user's own code.
    - `inputs`: the names of the nodes that it takes, with commas between.
    - `calls`: how often it was timed; `mean_ns median_ns p95_ns` are of those, the latter two by nearest rank.
    - `share`: `median_ns` as a fraction of the sum over all nodes, which leaves out what the interpreter does between.
    - `output_shape output_dtype output_bytes`: of the tensors that it gives, views too.
    - `new_bytes`: of the memory that it made for them: 0 for views, and where it wrote into what it took.
    - `moved_bytes`: the least that it moves: each tensor and parameter that it takes read once, each that it gives
      written once; nothing for a view.
    - `flops`: by formula, of the operators that have one; None where none has. `flops_per_second`: over `median_ns`.
    - `intensity`: `flops` over `moved_bytes`.
    """

    def __init__(self, labels: Mapping[str, Sequence[Any]], times_ns: Ints, facts: Mapping[str, Sequence[Any]]) -> None:
        self._labels, self._times_ns, self._facts = labels, times_ns, facts
        work = {name: facts[name] for name in ("new_bytes", "moved_bytes", "flops")}
        super().__init__(
            {
                **{name: labels[name] for name in _LABELS},
                **_times(times_ns),
                **{name: facts[name] for name in _MADE},
                **_work(work, times_ns),
            }
        )

    def by(self, what: Grouping, *, depth: int | None = None) -> Table:
        """One row for each module, class, target, kind of node or source line, in order of their first nodes.

        `nodes` tells how many are put together, and `mean_ns median_ns p95_ns` are of their sum in each run. With
        `depth`, modules count as the one so many levels down that they are in: 1 is the model's children.

        Raises:
            ConfigError: there is no such grouping.
        """
        if what not in GROUPINGS:
            raise ConfigError(f"Nodes cannot be grouped by {what!r}; choose of {', '.join(GROUPINGS)}.")
        keys = list(self._labels[what])
        if what == "module_path" and depth is not None:
            keys = [None if key is None else ".".join(key.split(".")[:depth]) for key in keys]
        index = {key: place for place, key in enumerate(dict.fromkeys(keys))}
        members: list[list[int]] = [[] for _ in index]
        for node, key in enumerate(keys):
            members[index[key]].append(node)
        times_ns = np.stack([self._times_ns[:, nodes].sum(axis=1) for nodes in members], axis=1)
        names = ("output_bytes", "new_bytes", "moved_bytes", "flops")
        sums = {name: [_sum([self._facts[name][n] for n in nodes]) for nodes in members] for name in names}
        labels = {what: list(index), "nodes": [len(nodes) for nodes in members]}
        return Table({**labels, **_times(times_ns), "output_bytes": sums.pop("output_bytes"), **_work(sums, times_ns)})


def _times(times_ns: Ints) -> dict[str, list[Any]]:
    """How often, and how long; a column of `times_ns` for each row of the table, a row for each run."""
    runs, rows = times_ns.shape
    if not runs:
        return {"calls": [0] * rows, **dict.fromkeys(("mean_ns", "median_ns", "p95_ns", "share"), [None] * rows)}
    ranked = np.sort(times_ns, axis=0)
    median, p95 = (ranked[-(-percent * runs // 100) - 1] for percent in (50, 95))
    return {
        "calls": [runs] * rows,
        "mean_ns": np.rint(ranked.mean(axis=0)).astype(np.int64).tolist(),
        "median_ns": median.tolist(),
        "p95_ns": p95.tolist(),
        "share": (median / median.sum()).tolist() if median.any() else [None] * rows,
    }


def _work(facts: Mapping[str, Sequence[Any]], times_ns: Ints) -> dict[str, Sequence[Any]]:
    """What was done, and the rates that follow."""
    times = _times(times_ns)["median_ns"]
    flops, moved = facts["flops"], facts["moved_bytes"]
    return {
        **facts,
        "flops_per_second": [n * 10**9 // ns if n is not None and ns else None for n, ns in zip(flops, times)],
        "intensity": [n / size if n is not None and size else None for n, size in zip(flops, moved)],
    }


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None

"""Counts what torch.compile (Dynamo) compiled: graphs, graph breaks and recompilations."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from instrument.record.torch_support import known
from instrument.redact import redact

# The id of a compilation, such as "0/1: ", before the reason why a guard failed.
_COMPILATION = re.compile(r"^\S*\d+/\d+: ")

# How many reasons for graph breaks or failed guards are kept, and how many characters of each
# reason. The most frequent reasons are kept.
_MOST_REASONS = 20
_REASON_LENGTH = 200
_OTHER_REASONS = "(other reasons)"


class DynamoCounts(NamedTuple):
    """Dynamo's counters in this process.

    Attributes:
        counters: Dynamo's own counters, by group of counters and by name.
        recompilations: how often Dynamo has compiled code again; None if this is not known.
        failed_guards: how often each guard has failed; None if this is not known.
    """

    counters: dict[str, dict[str, int]]
    recompilations: int | None
    failed_guards: dict[str, int] | None = None


def dynamo_counts() -> DynamoCounts:
    """Copy Dynamo's counters; `counters` is empty if Dynamo is not loaded."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    counters = {} if utils is None else {key: dict(each) for key, each in utils.counters.items()}
    return DynamoCounts(counters, known(_recompilations), known(_failed_guards))


def _recompilations() -> int:
    """How often Dynamo has compiled code again; raises if torch does not count recompilations."""
    convert: Any = sys.modules.get("torch._dynamo.convert_frame")
    if convert is None:
        return 0
    return sum(times - 1 for times in list(convert.FRAME_COMPILE_COUNTER.values()) if times > 1)


def _failed_guards() -> dict[str, int]:
    """How often each guard has failed; raises if torch does not count failed guards.

    A key names the function and the guard, such as "train.py:3 in forward: k == 2".
    """
    utils: Any = sys.modules.get("torch._dynamo.utils")
    found = Counter[str]()
    for code, reasons in [] if utils is None else list(utils.guard_failures.items()):
        place = f"{Path(code.co_filename).name}:{code.co_firstlineno} in {code.co_name}"
        for reason in list(reasons):
            # Such as "0/1: k == 2   # source code".
            line = _COMPILATION.sub("", str(reason).partition("\n")[0])
            found[f"{place}: {line.partition('  #')[0].strip()}"] += 1
    return dict(found)


def compilations(before: DynamoCounts, after: DynamoCounts) -> dict[str, Any]:
    """Count what Dynamo compiled between two copies of its counters.

    The result has the number of graphs, the number of graph breaks for each reason, the number of
    recompilations, and how often each guard failed. A value is None in two cases: its counter is
    not known, or its counter has become smaller, because the program has cleared Dynamo's counters.
    The graph breaks are None if the number of graphs is None.
    """
    graphs = _unique_graphs(after) - _unique_graphs(before)
    recompilations = None
    if before.recompilations is not None and after.recompilations is not None:
        recompilations = after.recompilations - before.recompilations
    breaks = _since(before.counters.get("graph_break", {}), after.counters.get("graph_break", {}))
    guards = None
    if before.failed_guards is not None and after.failed_guards is not None:
        is_cleared = sum(after.failed_guards.values()) < sum(before.failed_guards.values())
        guards = None if is_cleared else _since(before.failed_guards, after.failed_guards)
    return {
        "graphs": graphs if graphs >= 0 else None,
        "graph_breaks": shortened(breaks) if graphs >= 0 else None,
        "recompilations": None if recompilations is None or recompilations < 0 else recompilations,
        "failed_guards": None if guards is None else shortened(guards),
    }


def _since(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """How much each count has grown; counts that have not grown are left out."""
    return {
        name: times - before.get(name, 0)
        for name, times in after.items()
        if times > before.get(name, 0)
    }


def _unique_graphs(counts: DynamoCounts) -> int:
    return counts.counters.get("stats", {}).get("unique_graphs", 0)


def shortened(reasons: Mapping[str, int]) -> dict[str, int]:
    """Keep the most frequent reasons, and make each reason a short line without secrets.

    A reason is the cause of a graph break, or a guard that failed. The counts of all other reasons
    are added up under one key.
    """
    counted = Counter[str]()
    for reason, times in reasons.items():
        # redacted before the cut, because `redact` would not recognize half of a token
        counted[str(redact(" ".join(str(reason).split())))[:_REASON_LENGTH]] += times
    kept = dict(counted.most_common(_MOST_REASONS))
    if others := sum(counted.values()) - sum(kept.values()):
        kept[_OTHER_REASONS] = others
    return kept

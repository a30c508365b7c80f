"""`graph-breaks`: functions that torch.compile could not compile as one graph.

One break in the window is enough: the code between two graphs runs in Python, and no kernel is
fused from operators of both. The breaks and their reasons are in `capture.json`, which counts those
of compilations in the window. No saving is simulated, because a trace does not show how long a
single graph would take.
"""

from __future__ import annotations

from collections.abc import Iterator

from instrument.base.range_names import REGION
from instrument.read.advise.check import RECORD_AGAIN, Check, NotRecorded, Problem
from instrument.read.advise.recompilation import reasons
from instrument.read.views.views import Views


def find(capture: Views) -> Iterator[Problem]:
    """Yield one problem for all graph breaks of the window."""
    dynamo = capture.about.dynamo
    breaks = None if dynamo is None else dynamo.graph_breaks
    if breaks is None and _is_compiled(capture):
        raise NotRecorded("the capture does not count graph breaks", RECORD_AGAIN)
    if breaks:
        graphs = f" and {dynamo.graphs} graphs" if dynamo and dynamo.graphs else ""
        yield Problem(
            f"torch.compile breaks the graph: {sum(breaks.values())} graph breaks{graphs} in the "
            "window",
            evidence=reasons("graph break", breaks),
        )


CHECK = Check(
    "graph-breaks",
    find,
    change="torch.compile(…, fullgraph=True) raises at the first break: move the code that "
    "breaks the graph (printing, .item(), other libraries) out of the compiled function",
    verify='TORCH_LOGS="graph_breaks" prints each break with its line',
)


def _is_compiled(capture: Views) -> bool:
    """Whether the trace shows that compiled code ran."""
    return bool(capture.events.named(lambda name: name.startswith(REGION)).any())

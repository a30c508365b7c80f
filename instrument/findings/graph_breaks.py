"""Find functions that torch.compile could not compile as one graph.

The check reads the graph breaks that torch.compile counted in the window, with their reasons, from
`capture.json`. torch counts a break when it compiles, so the check does not find the breaks of
earlier compilations.

One break is enough for a finding. A break ends a compiled graph: the code between two graphs runs
in Python, and no kernel is fused from operators of both graphs. No saving is simulated, because a
trace does not show how long a single graph would take.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from instrument.analysis.views import Views
from instrument.findings.compilations import reasons
from instrument.findings.finding import RECORD_AGAIN, Check, Finding, NotRecorded
from instrument.range_names import REGION

if TYPE_CHECKING:
    from instrument.whatif.scenario import Scenario


def find(capture: Views, whatif: Scenario) -> Iterator[Finding]:  # noqa: ARG001
    """Yield one finding if torch.compile met graph breaks in the window."""
    dynamo = capture.about.dynamo
    breaks = None if dynamo is None else dynamo.graph_breaks
    if breaks is None and _is_compiled(capture):
        raise NotRecorded("the capture does not count graph breaks", RECORD_AGAIN)
    if not breaks:
        return
    total = sum(breaks.values())
    graphs = f" and {dynamo.graphs} graphs" if dynamo and dynamo.graphs else ""
    yield Finding(
        code=CHECK.code,
        title=f"torch.compile breaks the graph: {total} graph breaks{graphs} in the window",
        change="torch.compile(…, fullgraph=True) raises at the first break: move the code that "
        "breaks the graph (printing, .item(), other libraries) out of the compiled function",
        verify='TORCH_LOGS="graph_breaks" prints each break with its line',
        evidence=reasons("graph break", breaks),
    )


def _is_compiled(capture: Views) -> bool:
    """Whether the trace shows that compiled code ran."""
    return bool(capture.events.named(lambda name: name.startswith(REGION)).any())


CHECK = Check("graph-breaks", find)

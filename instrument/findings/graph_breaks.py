"""Find functions that torch.compile could not compile as one graph.

From the graph breaks that torch.compile counted in the window (`capture.json`), with their reasons.
torch counts a break when it compiles, so a window that begins after the compilation knows of none.

There is no threshold: a break ends a compiled graph, so that what lies between two graphs runs in
Python, and nothing is fused across. No saving is simulated, because a trace does not show what one
graph would take.

Lost: breaks before the window.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from instrument.analysis.views import Views
from instrument.findings.finding import Check, Evidence, Finding, NotRecorded
from instrument.range_names import REGION

if TYPE_CHECKING:
    from instrument.whatif.scenario import Scenario

_MOST_REASONS = 5
_LONGEST_REASON = 200


def find(capture: Views, whatif: Scenario) -> Iterator[Finding]:  # noqa: ARG001
    """Yield one finding if torch.compile met graph breaks in the window."""
    environment = capture.about.environment
    dynamo = None if environment is None else environment.dynamo
    breaks = None if dynamo is None else dynamo.graph_breaks
    if breaks is None and _is_compiled(capture):
        raise NotRecorded(
            "The capture does not count graph breaks: record it with a session of this version."
        )
    if not breaks:
        return
    total = sum(breaks.values())
    reasons = sorted(breaks, key=lambda reason: -breaks[reason])
    graphs = f" and {dynamo.graphs} graphs" if dynamo and dynamo.graphs else ""
    yield Finding(
        code=CHECK.code,
        title=f"torch.compile breaks the graph: {total} graph breaks{graphs} in the window",
        change="torch.compile(…, fullgraph=True) raises at the first break: move what breaks the "
        "graph (printing, .item(), other libraries) out of the compiled function",
        verify='TORCH_LOGS="graph_breaks" prints each break with its line',
        evidence=tuple(
            Evidence(
                "graph break", breaks[reason], detail=" ".join(reason.split())[:_LONGEST_REASON]
            )
            for reason in reasons[:_MOST_REASONS]
        ),
    )


def _is_compiled(capture: Views) -> bool:
    """Whether the trace shows that compiled code ran."""
    return bool(capture.events.named(lambda name: name.startswith(REGION)).any())


CHECK = Check("graph-breaks", find)

"""Time each node of a model's `torch.fx` graph, without changes to the model's source.

Names are loaded when they are first used, so `import instrument.graph` does not load torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from instrument.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from instrument.graph.profiler import profile_graph
    from instrument.graph.result import GraphProfile, Overhead
    from instrument.graph.roofline import Machine

__all__ = [
    "GraphProfile",
    "Machine",
    "Overhead",
    "profile_graph",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "GraphProfile": "result",
        "Machine": "roofline",
        "Overhead": "result",
        "profile_graph": "profiler",
    },
)

"""Time each node of a model's `torch.fx` graph, without changes to the model's source.

Names are loaded when they are first used, so `import instrument.graph` does not load torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from instrument.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from instrument.graph.graph_profile import GraphProfile, profile_graph
    from instrument.graph.roofline import Machine

__all__ = ["GraphProfile", "Machine", "profile_graph"]

#: The columns by which `GraphProfile.by` groups nodes.
Grouping = Literal["module_path", "module_type", "target", "op", "source"]
GROUPINGS = get_args(Grouping)

__getattr__, __dir__ = lazy_names(
    __name__,
    {"GraphProfile": "graph_profile", "Machine": "roofline", "profile_graph": "graph_profile"},
)

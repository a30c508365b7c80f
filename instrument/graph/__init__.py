"""Where a model's time goes, node by node of its `torch.fx` graph, without touching its source."""

from __future__ import annotations

from instrument.graph.profile import GraphProfile, Overhead
from instrument.graph.profiler import NodeProfiler, profile_graph

__all__ = ["GraphProfile", "NodeProfiler", "Overhead", "profile_graph"]

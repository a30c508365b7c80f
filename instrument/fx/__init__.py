"""Time each node of a model's `torch.fx` graph, without changes to the model's source."""

from __future__ import annotations

from instrument.fx.profiler import NodeProfiler, profile_graph
from instrument.fx.result import GraphProfile, Overhead

__all__ = ["GraphProfile", "NodeProfiler", "Overhead", "profile_graph"]

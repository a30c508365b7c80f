"""Time each node of a model's `torch.fx` graph, without changes to the model's source.

Names are loaded when they are first used, so `import instrument.fx` does not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from instrument.fx.profiler import profile_graph
    from instrument.fx.result import GraphProfile, Overhead

__all__ = ["GraphProfile", "Overhead", "profile_graph"]

_HOMES = {"GraphProfile": "result", "Overhead": "result", "profile_graph": "profiler"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'instrument.fx' has no attribute {name!r}")
    return getattr(import_module(f"instrument.fx.{_HOMES[name]}"), name)

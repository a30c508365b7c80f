"""The C extension `_loops`, or None where it is not installed.

Its functions are loops in which each row depends on rows before it. Without the extension, each
caller gets the same result with NumPy or Python, which is slower.
"""

from __future__ import annotations

from types import ModuleType

compiled: ModuleType | None
try:
    from instrument.read.facts import _loops as compiled
except ImportError:  # built only where there is a compiler
    compiled = None

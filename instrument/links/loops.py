"""The compiled module `_loops`, or None where it is not installed.

The module is written in C and built during the installation if there is a C compiler. Its functions
are loops in which each row depends on rows before it, so NumPy cannot express them. Each caller has
the same loop in Python, which is slower.
"""

from __future__ import annotations

from types import ModuleType

compiled: ModuleType | None
try:
    from instrument.links import _loops as compiled
except ImportError:  # built only where there is a compiler
    compiled = None

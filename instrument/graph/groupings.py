"""The columns by which `NodeTable.by` groups nodes, for code that must not load torch."""

from __future__ import annotations

from typing import Literal, get_args

Grouping = Literal["module_path", "module_type", "target", "op", "source"]
GROUPINGS = get_args(Grouping)

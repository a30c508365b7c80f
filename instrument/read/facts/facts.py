"""`Facts`: the two tables about one trace, `events` and `segments`; every answer asks them.

docs/tables.md lists their columns with the rule by which each is computed. A group of columns is
computed when one of them is first used, so a question about kernels does not pay for FLOPs.
"""

from __future__ import annotations

"""Whether polars works in this process: not in a child that was forked after its threads started.

Such a child would wait forever for threads that only its parent has.
"""

from __future__ import annotations

import os

_is_used = _is_lost = False


def use_polars() -> bool:
    """Note that polars is used; return False in a process in which it would hang."""
    global _is_used
    _is_used = True
    return not _is_lost


def is_lost() -> bool:
    """Whether this process was forked after polars had been used."""
    return _is_lost


def _in_child() -> None:
    global _is_lost
    _is_lost = _is_used


os.register_at_fork(after_in_child=_in_child)

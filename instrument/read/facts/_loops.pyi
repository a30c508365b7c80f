"""Loops over columns that NumPy cannot express. Each caller has the same loop in Python."""

from typing import Any

from numpy.typing import NDArray

Column = NDArray[Any]

# The parents as int64, then the depths and the ends of the descendants as int32. `thread` is int32,
# `start` and `end` are int64.
def nest(thread: Column, start: Column, end: Column, /) -> bytes: ...

# The times of each moment in all scenarios, as int64. The arcs are int32, the weights int64, and
# the shares double.
def longest_paths(
    target: Column,
    source: Column,
    number: Column,
    own: Column,
    change: Column,
    shares: Column,
    earliest: Column,
    /,
) -> bytes: ...

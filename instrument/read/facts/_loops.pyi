"""Loops over columns that NumPy cannot express. Each caller has the same loop in Python."""

from typing import Any

from numpy.typing import NDArray

Column = NDArray[Any]

# The parents as int64, then the depths and the ends of the descendants as int32. `thread` is int32,
# `start` and `end` are int64.
def nest(thread: Column, start: Column, end: Column, /) -> bytes: ...

# The nearest chosen node at or above each node, as int64. `chosen` is bool, `parent` int64.
def nearest(chosen: Column, parent: Column, /) -> bytes: ...

# A mask of the rows that are in no other row of their group. `group` and `node` are int64, `after`
# is int32; `count` is the number of groups.
def outermost(group: Column, node: Column, after: Column, count: int, /) -> bytes: ...

# The row of each interval, at most `most`, as int64. All columns are int64.
def rows(start: Column, end: Column, parent: Column, most: int, /) -> bytes: ...

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

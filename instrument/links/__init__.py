"""What caused what in a trace.

A trace is a flat list of events. This package joins them:

- `call_tree`: which CPU event lies inside which.
- `launches`: which CPU event launched a kernel, a copy or a memset.
- `autograd`: which range's forward pass a backward node belongs to.
- `attribution`: the range and the kind of work that each nanosecond belongs to.
- `paths`: ranges of the same name inside ranges of the same names, put together.
- `step_index`, `intervals`, `flops`: steps, overlapping intervals, operations by formula.

`links.Links` holds all of it for one trace; each part is computed once, at its first use.
"""

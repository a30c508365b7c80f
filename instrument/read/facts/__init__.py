"""A trace is a flat list of events; this package finds the relations between the events.

- `call_tree`: which CPU event lies inside which.
- `launches`: which CPU event launched each kernel, copy and memset.
- `cuda_graphs`: which device events a launch of a CUDA graph replayed.
- `autograd`: the range around the forward operator of each backward node, and kinds of work.
- `paths`: the path of each range, such as `train/forward/layer`.
- `synchronisation`: which device work a call such as `cudaStreamSynchronize` waits for.
- `collective_records`: what torch recorded about the collective of each communication kernel.
- `step_index`: the steps, those that count, and the step in which a time lies.
- `intervals`: merges intervals, and measures the time that several lists of intervals cover.
- `flops`, `traffic`: the FLOPs and the bytes of operators, by formula.
- `groupby`: sums, minima and quantiles of groups of rows, for links and for the tables.

`Links` in `links.links` computes most of them for one trace, each at its first use.
"""

"""A trace is a flat list of events; this package finds the relations between the events.

- `call_tree`: which CPU event lies inside which.
- `launches`: which CPU event launched each kernel, copy and memset.
- `grammars`: what the ranges of inference engines and pipelines say of a step.
- `cuda_graphs`: which device events a launch of a CUDA graph replayed.
- `autograd`: the range around the forward operator of each backward node, and kinds of work.
- `paths`: the path of each range, such as `train/forward/layer`.
- `synchronisation`: which device work a call such as `cudaStreamSynchronize` waits for.
- `collective_records`: what torch recorded about the collective of each communication kernel.
- `step_index`: the steps, those that count, and the step in which a time lies.
- `intervals`: merges intervals, and measures the time that several lists of intervals cover.
- `detail`: the inputs of operators, from the like operators of the detail window.
- `flops`, `traffic`: the FLOPs and the bytes of operators, by formula.
- `idle`, `device_work`, `places`: when devices work and why not; their work; the line of an event.
- `groupby`: sums, minima and quantiles of groups of rows.

`links.Links` computes most of them for one trace, each at its first use. `facts.Facts` makes the
table `events` of them, and `segments` the table of this name.
"""

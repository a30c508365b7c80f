"""What a step would take if something were faster or gone, from a simulation of the recorded window.

- `model`: the moments that matter, which of them waits for which others, and what this costs.
- `builder`: finds the moments and what they wait for in a trace.
- `cpu_time`: the time of the threads as an axis on which waits have no length.
- `window`: the models of several ranks, joined by their collectives.
- `program`: the moments in order, and the pass that computes when each of them happens.
- `selection`: the CPU time and the device work that an edit changes.
- `edits`: what changes: faster ranges, waits that are gone, operators that are fused.
- `scenario`: a capture with edits, and the step that follows from them.
- `causal_profile`: what each range, operator and kernel is worth if it were faster.
- `critical_path`: what a step consists of, and how much slack each range has.
"""

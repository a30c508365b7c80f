"""Many captures: the windows and ranks of a run, their clocks, merged traces, timings files."""

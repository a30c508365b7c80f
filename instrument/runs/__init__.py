"""Read and compare the captures of a run's windows and ranks, merge traces, read timings files."""

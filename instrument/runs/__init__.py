"""Read and compare the captures of a run's windows and ranks, and merge traces."""

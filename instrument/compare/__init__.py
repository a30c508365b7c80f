"""Compare captures: what changed, what each step counts, and whether it stays within a budget."""

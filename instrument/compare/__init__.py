"""Compare captures: what each step counts, and whether it stays within a budget."""

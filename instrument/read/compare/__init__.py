"""Compare captures: what changed between them, and whether a step stays within limits."""

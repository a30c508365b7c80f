"""Find what makes a run slow, what to change, and how long a step would take after the change."""

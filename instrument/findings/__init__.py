"""What makes a run slow, what to change, and what the step would take then."""

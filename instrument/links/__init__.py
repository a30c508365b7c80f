"""What caused what in a trace: calls, launches, backward passes, ranges."""

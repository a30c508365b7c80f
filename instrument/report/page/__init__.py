"""The report page: one HTML file that holds what a capture or a run shows."""

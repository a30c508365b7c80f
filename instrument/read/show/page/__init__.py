"""The report page: one HTML file with the results of a capture or a run."""

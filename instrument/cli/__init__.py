"""The command line of `instrument`."""

"""The command `instrument`."""

"""Reading a trace file into numpy columns, and what else a capture folder holds as data."""

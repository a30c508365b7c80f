"""Read a trace file into numpy columns, and read the metadata of a capture folder."""

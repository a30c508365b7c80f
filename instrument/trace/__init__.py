"""A trace file becomes columns."""

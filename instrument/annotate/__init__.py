"""Annotations: `profiled` functions and modules, and the ranges that they open."""

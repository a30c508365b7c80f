"""Annotations mark functions, modules and blocks; each call then opens a named range."""

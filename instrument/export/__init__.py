"""Turn the raw trace of a window into a finished capture, and upload it; does not load torch."""

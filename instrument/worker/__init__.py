"""From a raw trace to a finished capture, without torch."""

"""Hydra's config groups; `docs/generate.py` writes all files but the presets from the code."""

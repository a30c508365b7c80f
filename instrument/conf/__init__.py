"""The built-in Hydra groups: presets, sinks and triggers, as YAML."""

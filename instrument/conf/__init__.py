"""The Hydra groups that ship: presets, sinks and triggers, as YAML."""

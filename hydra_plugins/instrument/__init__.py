"""Adds the config group `profiler` and the groups below it to every Hydra application."""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class InstrumentSearchPath(SearchPathPlugin):
    """Adds the config groups of `instrument` to Hydra's search path, after the application's."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append `instrument.conf` to Hydra's search path."""
        search_path.append(provider="instrument", path="pkg://instrument.conf")

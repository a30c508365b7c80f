"""Lets every Hydra application find `profiler=…` and `profiler/sinks=…` without naming us in its config."""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class InstrumentSearchPath(SearchPathPlugin):
    """Adds the config groups that `instrument` ships, after the application's own."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append our config package to Hydra's search path."""
        search_path.append(provider="instrument", path="pkg://instrument.conf")

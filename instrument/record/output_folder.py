"""The folder for captures: where it is, and whether it can be written."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from instrument.base.errors import ConfigError
from instrument.base.files import CAPTURES_VARIABLE
from instrument.record.config.schema import ProfilerConfig


def output_dir(config: ProfilerConfig) -> Path:
    """The folder for captures.

    The environment variable `INSTRUMENT_DIR`, if it is set, replaces `profiler.output_dir`. The
    default is the folder `profile` in Hydra's run folder, or in the current folder without Hydra.
    """
    given = os.environ.get(CAPTURES_VARIABLE) or config.output_dir
    if given is not None:
        try:
            return Path(given).expanduser().absolute()
        except RuntimeError as error:  # an unknown user after ~
            raise ConfigError(f"{_folder_option()} is {str(given)!r}: {error}") from None
    hydra = hydra_run()
    return (
        Path("profile").absolute() if hydra is None else Path(hydra.runtime.output_dir) / "profile"
    )


def _folder_option() -> str:
    """For error messages: the name of the variable or option that sets the folder for captures."""
    variable = CAPTURES_VARIABLE
    return (
        f"The environment variable {variable}" if variable in os.environ else "profiler.output_dir"
    )


def hydra_run() -> Any:
    """The `HydraConfig` of the running application; it holds the application's output folder.

    None if the application does not use Hydra.
    """
    module = sys.modules.get("hydra.core.hydra_config")  # loaded if Hydra runs
    return (
        module.HydraConfig.get()
        if module is not None and module.HydraConfig.initialized()
        else None
    )


def writable(folder: Path) -> Path:
    """Return the folder; create it if it is missing, and check that files can be written to it.

    Raises:
        ConfigError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(
            f"{_folder_option()} is {str(folder)!r}, which cannot be written ({reason}): choose "
            "another folder."
        ) from None

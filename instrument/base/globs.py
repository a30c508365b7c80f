"""Match names with globs: `*` stands for any text, `?` for one character, `[ab]` for a or b."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from instrument.base.errors import ConfigError

# Matching takes at most a few nanoseconds for each pair of a character of the name and a character
# of the globs. The bounds keep it fast for globs from a stranger's capture.
_MOST, _LONGEST = 20, 100
_REGEX = re.compile(r"[|^$\\]|\.[*+]|\(\?")


def fits(glob: str, *names: str) -> bool:
    """Whether a glob equals or matches at least one of the names."""
    return any(name == glob or fnmatchcase(name, glob) for name in names)


def check_globs(globs: Sequence[str], option: str) -> Sequence[str]:
    """Return the globs for names of communication kernels that an option holds.

    Raises:
        ConfigError: the value is not a list of texts, the list or a text is too long, or a text
            looks like a regular expression or matches every name.
    """
    if isinstance(globs, str) or not all(isinstance(glob, str) for glob in globs):
        raise ConfigError(
            f"{option} is {globs!r}, but it must be a list of globs, such as ['*nccl*', '*rccl*']."
        )
    if len(globs) > _MOST:
        raise ConfigError(
            f"{option} holds {len(globs)} globs, but at most {_MOST} are allowed: match several "
            "names with one glob, such as '*my_library*'."
        )
    for glob in globs:
        if len(glob) > _LONGEST:
            raise ConfigError(
                f"{option} holds {glob[:20] + '…'!r} of {len(glob)} characters, but a glob has at "
                f"most {_LONGEST}: replace parts of it with *."
            )
        if _REGEX.search(glob):
            raise ConfigError(
                f"{option} holds {glob!r}, which looks like a regular expression: give globs, "
                "which match the whole name, such as ['*nccl*', '*rccl*'] instead of nccl|rccl."
            )
        if not glob.strip("*"):
            raise ConfigError(
                f"{option} holds {glob!r}, which selects no kernels in particular: give a part of "
                "the names of communication kernels, such as '*my_all_reduce*'."
            )
    return globs

"""Check out git revisions beside the user's working tree, and remove these checkouts again."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from instrument.base.errors import ConfigError

# Git sets these variables for its hooks. In a hook, GIT_INDEX_FILE would make git write into the
# user's index.
_VARIABLES_OF_HOOKS = frozenset({"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX"})
# The repository's hooks are disabled, because they could change the user's files.
_SAFE = ["-c", f"core.hooksPath={os.devnull}"]


@contextmanager
def worktrees(revisions: Sequence[str], folder: Path) -> Iterator[list[Path]]:
    """Check out revisions into temporary worktrees, which are removed at the end of the block.

    The working tree and the index of the user do not change. For each branch, tag or commit, the
    block gets the path of `folder` in its worktree.

    Raises:
        ConfigError: `folder` is not in a git repository, a revision does not exist or does not
            contain the folder, or git fails.
    """
    commits = [commit_of(name, folder) for name in revisions]
    inside = _git(folder, "rev-parse", "--show-prefix")
    with tempfile.TemporaryDirectory(prefix="instrument-ab-") as parent:
        trees = [Path(parent, f"{k}-{commit[:12]}") for k, commit in enumerate(commits)]
        try:
            for tree, commit in zip(trees, commits):
                _git(folder, "worktree", "add", "--quiet", "--detach", str(tree), commit)
            yield [_existing(tree / inside, name) for tree, name in zip(trees, revisions)]
        finally:
            for tree in trees:
                with suppress(ConfigError):  # the worktree does not exist yet
                    # With --force given twice, git removes a locked worktree too.
                    _git(folder, "worktree", "remove", "--force", "--force", str(tree))


def python_path(tree: Path) -> str:
    """The `PYTHONPATH` with which a program imports the modules of a worktree.

    A package in editable mode would be imported from the user's working tree.
    """
    root = Path(_git(tree, "rev-parse", "--show-toplevel"))
    given = os.environ.get("PYTHONPATH")
    folders = [root, *(path for path in [root / "src"] if path.is_dir())]
    return os.pathsep.join([*map(str, folders), *([given] if given else [])])


def commit_of(name: str, folder: Path) -> str:
    """Return the hash of the commit that a revision names.

    Raises:
        ConfigError: `folder` is not in a git repository, or the revision does not exist.
    """
    _git(folder, "rev-parse", "--git-dir")
    try:
        return _git(
            folder, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}"
        )
    except ConfigError:
        raise ConfigError(
            f"{name!r} is no revision of the git repository at {folder}: give a branch, a tag or a "
            "commit; to compare two commands, use --a and --b."
        ) from None


def _existing(folder: Path, revision: str) -> Path:
    if not folder.is_dir():
        raise ConfigError(
            f"The revision {revision!r} has no folder {folder.name}: run the command from a folder "
            "that both revisions have."
        )
    return folder


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *_SAFE, *arguments],
            cwd=folder,
            env={k: v for k, v in os.environ.items() if k not in _VARIABLES_OF_HOOKS},
            capture_output=True,
            text=True,
            errors="surrogateescape",
            check=True,
        )
    except OSError as error:
        raise ConfigError(f"git cannot be started ({error.strerror}): install git.") from None
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [f"status {error.returncode}"]
        raise ConfigError(f"git {arguments[0]} fails in {folder}: {lines[-1]}.") from None
    return done.stdout.rstrip("\n")

"""Sinks of the tests that the worker imports: from here, so that it need not load torch and the test's other modules."""

from __future__ import annotations

from pathlib import Path

from instrument import Capture, Sink


class Hook(Sink):
    """A sink with a secret among its options."""

    token: str = ""

    def write(self, capture: Capture, folder: Path) -> None:
        (folder / "token.txt").write_text(self.token)


class Posts(Sink):
    """A sink whose address holds secrets."""

    to: str = ""

    def write(self, capture: Capture, folder: Path) -> None:
        (folder / "posted.txt").write_text(self.to)


class Raises(Sink):
    """Raises what no sink should."""

    what: str

    def write(self, capture: Capture, folder: Path) -> None:
        raise {"keyboard": KeyboardInterrupt("by the sink"), "exit": SystemExit(3), "mute": Mute()}[
            self.what
        ]


class Mute(Exception):  # noqa: N818
    def __str__(self) -> str:
        raise ValueError("no text")

"""What a terminal would obey, or a reader would be misled by, stands as an escape in text."""

from __future__ import annotations

import json

import pytest

from instrument.base.errors import CaptureError, ConfigError, MissingPackage
from instrument.base.printable import printable, printable_lines


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("forward é中😀 {}", "forward é中😀 {}"),
        ("\x1b[2J", r"\x1b[2J"),
        ("\x1b]0;owned\x07", r"\x1b]0;owned\x07"),
        ("\x9b31m\x9d0;t\x9c", r"\x9b31m\x9d0;t\x9c"),
        ("a\nb\r\tc\x7f\x00", r"a\nb\r\tc\x7f\x00"),
        ("abc\u202ecba\u2066\u200f", r"abc\u202ecba\u2066\u200f"),
        ("a\u2028b\u2029c", r"a\u2028b\u2029c"),
        ("half \ud83d", r"half \ud83d"),
        ("tag \U000e0041", r"tag \U000e0041"),
        ("a\u3164b\ufe0f\U000e0100", r"a\u3164b\ufe0f\U000e0100"),
    ],
)
def test_only_what_prints_is_printed(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(text).isprintable()


def test_only_the_lines_that_were_given_are_lines() -> None:
    assert printable_lines("a\nb", "\x1bb\r", "") == "a\\nb\n\\x1bb\\r\n"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("::error::x", r"\u003a:error::x"),  # GitHub
        ("  ::set-output name=a::b", r"  \u003a:set-output name=a::b"),
        ("aten::mm ::error::x", "aten::mm ::error::x"),
        ("a ##[error]x", r"a \u0023#[error]x"),  # GitHub and Azure, anywhere in a line
        ("###vso[task.setvariable variable=a]b", r"#\u0023#vso[task.setvariable variable=a]b"),
        ("##teamcity[message text='a']", r"\u0023#teamcity[message text='a']"),
        ("## A heading [1]", "## A heading [1]"),
    ],
)
def test_no_line_is_a_command_of_a_ci_system(line: str, shown: str) -> None:
    assert printable_lines("first", line) == f"first\n{shown}"
    assert printable_lines(shown) == shown
    assert json.loads(printable_lines(json.dumps({"name": line}))) == {"name": line}


@pytest.mark.parametrize("kind", [CaptureError, ConfigError])
def test_an_error_is_one_line_that_a_terminal_can_show(kind: type[Exception]) -> None:
    error = kind("The file a\x1b[2J\nb is no trace.")
    assert str(error) == r"The file a\x1b[2J\nb is no trace."
    assert (
        str(MissingPackage("X", "p\x1b", None)) == r"X needs the package p\x1b: pip install p\x1b."
    )

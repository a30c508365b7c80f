"""docs/troubleshooting.md: the messages that it explains are those of the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
# What stands for a value: "…" on the page, a replacement field or %s in the code.
VALUE = "\0"


def written(node: ast.AST) -> Iterator[str]:
    """The texts in a piece of code, with `VALUE` for each value."""
    for each in ast.walk(node):
        if isinstance(each, ast.JoinedStr):
            parts = (x.value if isinstance(x, ast.Constant) else VALUE for x in each.values)
            yield "".join(map(str, parts))
        elif isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield re.sub(r"\{[^{}]*\}", VALUE, each.value)


def test_each_message_is_one_of_the_code() -> None:
    tables = PAGE.partition("## Numbers that are missing")[0]
    cells = re.findall(r"^\| (`.*?) \| ", tables, re.MULTILINE)
    messages = [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]
    assert len(messages) > 40
    code = "\n".join(
        text
        for file in (ROOT / "instrument").rglob("*.py")
        for text in written(ast.parse(file.read_text("utf-8")))
    )
    parts = {part.strip() for message in messages for part in message.split("…")}
    unknown = [part for part in sorted(parts) if len(part) > 3 and part not in code]
    assert not unknown, "\n".join(unknown)

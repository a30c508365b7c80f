"""Put the pages as Markdown into the built site, beside the HTML, and list them in `llms.txt`.

    python docs/twins.py site

For agents, which read Markdown with fewer tokens. `make docs` runs this; see https://llmstxt.org.
"""

from __future__ import annotations

import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent


def pages_of(entries: list[Any]) -> Iterator[str]:
    """The paths of the pages in a part of the navigation, in order."""
    for entry in entries:
        for page in entry.values() if isinstance(entry, dict) else [entry]:
            if isinstance(page, list):
                yield from pages_of(page)
            else:
                yield page


def link(page: str) -> str:
    """The line of a page: its title, and the first sentence of its text."""
    text = re.sub(
        r"^<!--.*?-->\n|^```.*?^```$", "", (DOCS / page).read_text("utf-8"), flags=re.M | re.S
    )
    title, *paragraphs = re.split(r"\n\s*\n", text.strip())
    first = next((each for each in paragraphs if each[0].isalpha() or each[0] in "`["), "")
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(first.split()))
    sentence = re.split(r"(?<=[.?:]) ", plain)[0].rstrip(":")
    return f"- [{title.lstrip('# ')}]({page})" + f": {sentence}" * bool(sentence)


def llms() -> str:
    """The text of `llms.txt`."""
    project = tomllib.loads((DOCS.parent / "zensical.toml").read_text("utf-8"))["project"]
    lines = [f"# {project['site_name']}", f"> {project['site_description']}"]
    for part in project["nav"]:
        for title, entries in part.items():
            lines.append("\n".join([f"## {title}", "", *map(link, pages_of(entries))]))
    return "\n\n".join(lines) + "\n"


def main(site: Path) -> None:
    """Write into the folder of a built site."""
    for page in DOCS.rglob("*.md"):
        target = site / page.relative_to(DOCS)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(page, target)
    (site / "llms.txt").write_text(llms(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Draw `assets/terminal.svg`: what `instrument show` prints of a run of `examples/train_lm.py` on this machine.

    python docs/make_terminal_svg.py

The figures are those of the run; names are drawn bold and the larger shares in colour, which the terminal does not do.
"""

from __future__ import annotations

import re
import subprocess
import sys
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

DOCS = Path(__file__).resolve().parent
TRAIN = DOCS.parent / "examples" / "train_lm.py"
TABLE = ["--ranges", "--columns", "calls,cpu_ns_per_step,share,forward_ns,backward_ns"]
# Fonts of the reader's own: rich would have the page load one from elsewhere.
FONTS = "ui-monospace, Menlo, Consolas, monospace"


def main() -> None:
    with TemporaryDirectory() as folder:
        overrides = ["hydra.run.dir=run", "device=cpu", "training.steps=40", "profiler.wait=30"]
        _run(folder, sys.executable, str(TRAIN), *overrides)
        printed = _run(folder, sys.executable, "-m", "instrument", "show", "run/profile", *TABLE)
    heading, *rest = printed.splitlines()
    lines = [heading, *(line for line in rest if not line.startswith("/"))]
    _draw(f"$ instrument show outputs {' '.join(TABLE)}", [line.rstrip() for line in lines])


def _run(folder: str, *command: str) -> str:
    return subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout


def _draw(command: str, lines: list[str]) -> None:
    console = Console(record=True, width=max(map(len, [command, *lines])), file=StringIO())
    console.print(Text(command, "bold green"))
    for line in lines:
        console.print(_styled(line))
    no_fonts = re.sub(r"@font-face \{\{.*?\}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    own_fonts = no_fonts.replace("Fira Code, monospace", FONTS)
    console.save_svg(
        str(DOCS / "assets" / "terminal.svg"), title="instrument", code_format=own_fonts
    )


def _styled(line: str) -> Text:
    """A line of the table with its name bold and its share in colour."""
    text = Text(line)
    row = re.match(r"^( *\S.*?)  +[\d-]+ ", line)
    share = re.search(r"\b([\d.]+)%", line)
    if row and share:
        text.stylize("bold", 0, len(row[1]))
        hot = float(share[1])
        text.stylize(
            "bold red" if hot >= 20 else "yellow" if hot >= 5 else "dim", share.start(), share.end()
        )
    elif set(line) <= {"-", " "}:
        text.stylize("dim")
    return text


if __name__ == "__main__":
    main()

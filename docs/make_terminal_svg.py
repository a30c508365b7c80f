"""Draw `assets/terminal.svg`: what `instrument show` prints of a run of `examples/train_lm.py`.

    python docs/make_terminal_svg.py

The figures are those of a run on this machine. The picture is what a terminal of 100 columns shows.
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

from instrument.capture import Capture
from instrument.report.section import Section
from instrument.report.terminal import draw
from instrument.report.text import capture_parts

DOCS = Path(__file__).resolve().parent
TRAIN = DOCS.parent / "examples" / "train_lm.py"
WIDTH = 100
# Fonts of the reader's own: rich would have the page load one from elsewhere.
FONTS = "ui-monospace, Menlo, Consolas, monospace"


def main() -> None:
    """Record a run, and draw its ranges."""
    with TemporaryDirectory() as folder:
        overrides = ["hydra.run.dir=run", "device=cpu", "training.steps=40", "profiler.wait=30"]
        subprocess.run([sys.executable, str(TRAIN), *overrides], cwd=folder, check=True)
        (capture,) = Path(folder, "run", "profile").glob("steps_*")
        draw_ranges(Capture.load(capture))


def draw_ranges(capture: Capture) -> None:
    """Draw the ranges of a capture into the picture."""
    parts = capture_parts(capture, operators=False)
    ranges = [part for part in parts if isinstance(part, Section)]
    console = Console(record=True, width=WIDTH, file=StringIO(), force_terminal=True)
    console.print(Text("$ instrument show outputs --ranges", "bold green"))
    console.print(Text.from_ansi(draw(ranges, console)))
    no_fonts = re.sub(r"@font-face \{\{.*?\}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    own_fonts = no_fonts.replace("Fira Code, monospace", FONTS)
    picture = DOCS / "assets" / "terminal.svg"
    console.save_svg(str(picture), title="instrument", code_format=own_fonts)


if __name__ == "__main__":
    main()

"""Draw what `instrument show` and `instrument report` show of a run of `examples/train_lm.py`.

    python docs/make_pictures.py

The figures are those of a run on this machine. `assets/terminal.svg` is what a terminal of 100
columns shows, and `assets/report.png` is the top of the page in Chromium (`CHROMIUM`, or the
program `chromium`).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.sync_api import sync_playwright
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from instrument.analysis.section import Section
from instrument.capture import Capture
from instrument.report.terminal import draw
from instrument.report.text import capture_parts

DOCS = Path(__file__).resolve().parent
TRAIN = DOCS.parent / "examples" / "train_lm.py"
WIDTH = 100
PAGE_SIZE = {"width": 1100, "height": 900}  # in pixels
# Fonts of the reader's own: rich would have the page load one from elsewhere.
FONTS = "ui-monospace, Menlo, Consolas, monospace"


def main() -> None:
    """Record a run, and draw its ranges and the top of its page."""
    with TemporaryDirectory() as folder:
        overrides = ["hydra.run.dir=run", "device=cpu", "training.steps=40", "profiler.wait=30"]
        subprocess.run([sys.executable, str(TRAIN), *overrides], cwd=folder, check=True)
        (path,) = Path(folder, "run", "profile").glob("steps_*")
        capture = Capture.load(path)
        draw_ranges(capture)
        page = Path(folder, "report.html")
        capture.report(page)
        draw_page(page)


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


def draw_page(page: Path) -> None:
    """Draw the top of a report page into the picture."""
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab = browser.new_page(viewport=PAGE_SIZE, color_scheme="light")
        tab.goto(page.as_uri())
        tab.wait_for_selector("html[data-ready]")
        tab.screenshot(path=DOCS / "assets" / "report.png")
        browser.close()


if __name__ == "__main__":
    main()

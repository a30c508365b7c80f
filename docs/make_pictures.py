"""Make the pictures and the sample pages of the documentation from recorded runs.

    INSTRUMENT_TRACES=FOLDER python docs/make_pictures.py [demo] [watch] [traces]

writes into `assets`: screenshots of pages, light and dark, as `NAME.webp` and `NAME-dark.webp`;
what a terminal shows, as `terminal.svg` (100 columns) and `watch.svg` (80); and the pages in
`assets/samples`. Four runs are shown:

- a run of `examples/train_lm.py` on the CPU of this machine,
- four ranks of `tests/watched_training.py`, also on this machine,
- ResNet-50 on a V100, with and without workers of the data loader: `v100_resnet50_workers0` and
  `v100_resnet50_workers4` in the folder of traces,
- a tensor-parallel step on eight A100s: `a100_megatron_tp8_rank0` to `rank7` in this folder.

`demo` shows only the first run, `watch` the second, and `traces` the others, which need traces.
`assets/samples/SOURCES.txt` says where the traces come from. Chromium draws the pages: `CHROMIUM`,
or the program `chromium`.
"""

from __future__ import annotations

import base64
import fcntl
import gzip
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from contextlib import suppress
from io import StringIO
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple

from playwright.sync_api import Page, sync_playwright
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

DOCS = Path(__file__).resolve().parent
ASSETS = DOCS / "assets"
COLUMNS = 100
PAGE_WIDTH, MARGIN = 1080, 6  # CSS pixels
SCALE, QUALITY = 1.5, 75  # pixels of a picture per CSS pixel; percent
SCHEMES: tuple[tuple[str, Literal["light", "dark"]], ...] = (("", "light"), ("-dark", "dark"))
# Fonts of the reader's own: rich would have the page load one from elsewhere.
FONTS = "ui-monospace, Menlo, Consolas, monospace"
# The home folder of the person who recorded the ResNet-50 traces.
HOME = re.compile(rb"/home/\w+/anaconda3/envs/kineto")
ON_CPU, ON_DEVICE = {"Operator", "Runtime"}, {"Kernel", "Memcpy", "Memset"}


def some_steps(trace: bytes, first: int, last: int) -> bytes:
    """A trace with only these steps: their CPU events and what these launched."""
    whole = json.loads(trace)
    events = [each for each in whole["traceEvents"] if each["ph"] in "MX"]
    marks = {each["name"]: each for each in events if each["name"].startswith("ProfilerStep#")}
    begin, end = (marks[f"ProfilerStep#{step}"] for step in (first, last))
    within = [
        each
        for each in events
        if each.get("cat") in ON_CPU
        and begin["ts"] <= each["ts"]
        and each["ts"] + each["dur"] <= end["ts"] + end["dur"]
    ]
    launched = {each["args"].get("correlation") for each in within if each["cat"] == "Runtime"}
    whole["traceEvents"] = [
        *(each for each in events if each["ph"] == "M"),
        *within,
        *(
            each
            for each in events
            if each.get("cat") in ON_DEVICE and each["args"]["correlation"] in launched
        ),
    ]
    return json.dumps(whole, separators=(",", ":")).encode()


class Shot(NamedTuple):
    """A part of a page: from the top of the first element to the bottom of the last one."""

    name: str
    page: str
    first: str
    last: str


DEMO = (
    Shot("ranges", "demo", "#ranges > h2", "#ranges"),
    Shot("memory", "demo", "#memory > h2", "#memory > div:nth-of-type(3)"),
)
TRACES = (
    Shot("verdict", "resnet50", "#head", "#verdict > details.finding"),
    Shot("whatif", "resnet50", "#whatif > h2", "#whatif"),
    Shot("timeline", "resnet50", "#timeline > h2", "#timeline > .timeline"),
    Shot("flame", "resnet50", "#flame > h2", "#flame > .flame"),
    Shot("diff", "diff", "#comparison > h2", "#comparison > .tools + div"),
    Shot("ranks", "ranks", "#runs > h3:nth-of-type(2)", "#runs > h4:nth-of-type(2) + .table"),
)


def main(parts: set[str]) -> None:
    """Make the pictures and samples of some parts, or of all."""
    (ASSETS / "samples").mkdir(parents=True, exist_ok=True)
    shows = {"demo": show_demo, "watch": show_watch, "traces": show_traces}
    for part in parts or shows:
        with TemporaryDirectory() as name:
            shows[part](Path(name))


def show_demo(folder: Path) -> None:
    """Record the example, and show the run.

    Raises:
        SystemExit: other programs used the CPUs.
    """
    options = ["profile_memory=true", "wait=30", "warmup=2"]
    overrides = ["hydra.run.dir=.", "device=cpu", "training.steps=40"]
    overrides += [f"profiler.{option}" for option in options]
    for name in ("examples", "conf"):  # copies: a relative command names no folder of this machine
        shutil.copytree(DOCS.parent / name, folder / name)
    subprocess.run([sys.executable, "examples/train_lm.py", *overrides], cwd=folder, check=True)
    findings = json.loads(instrument(folder, "diagnose", "profile", "--json"))["findings"]
    if any(finding["code"] == "busy-cpus" for finding in findings):
        sys.exit("Other programs used the CPUs, which the pictures would show: run this again.")
    instrument(folder, "report", "profile", "-o", "demo.html")
    shutil.copy(folder / "demo.html", ASSETS / "samples")
    draw_terminal(folder, "terminal", "show", "profile", "--ranges")
    draw_pages(folder, DEMO)


def show_watch(folder: Path) -> None:
    """Record four ranks, of which rank 2 is slow, and show what `instrument watch` says at once."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    script = DOCS.parent / "tests" / "watched_training.py"
    subprocess.run([*torchrun, str(script), "profile", "2"], cwd=folder, check=True)
    draw_terminal(folder, "watch", "watch", "profile", "--once", columns=80)


def show_traces(folder: Path) -> None:
    """Show the traces that others recorded, which are in the folder `INSTRUMENT_TRACES`."""
    traces = Path(os.environ["INSTRUMENT_TRACES"])
    before, after = "resnet50.json.gz", "resnet50_4_workers.json.gz"
    for name, workers in ((before, 0), (after, 4)):
        text = gzip.decompress((traces / f"v100_resnet50_workers{workers}.json.gz").read_bytes())
        (folder / name).write_bytes(gzip.compress(HOME.sub(b"", text)))
        short = gzip.compress(some_steps(HOME.sub(b"", text), 5, 8), mtime=0)
        (ASSETS / "samples" / f"resnet50_workers{workers}.json.gz").write_bytes(short)
    ranks = folder / "megatron"
    ranks.mkdir()
    for rank in range(8):
        shutil.copy(traces / f"a100_megatron_tp8_rank{rank}.json.gz", ranks)
    instrument(folder, "report", before, "-o", "resnet50.html")
    instrument(folder, "report", after, "--before", before, "-o", "diff.html")
    instrument(folder, "report", "megatron", "-o", "ranks.html")
    shutil.copy(folder / "resnet50.html", ASSETS / "samples")
    draw_pages(folder, TRACES)


def instrument(folder: Path, *arguments: str, columns: int = COLUMNS) -> str:
    """What a command prints in a terminal of so many columns."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 50, columns, 0, 0))
    command = (sys.executable, "-m", "instrument", *arguments)
    with (
        subprocess.Popen(command, cwd=folder, stdout=theirs) as running,
        os.fdopen(ours, encoding="utf-8", errors="replace") as terminal,
    ):
        os.close(theirs)
        printed = StringIO()
        with suppress(OSError):  # how Linux says that the command has closed the terminal
            for line in terminal:
                printed.write(line)
    if running.returncode:
        raise subprocess.CalledProcessError(running.returncode, command)
    return printed.getvalue().replace(f"{folder}/", "")


def draw_terminal(folder: Path, picture: str, *arguments: str, columns: int = COLUMNS) -> None:
    """Draw a terminal that shows a command and what it prints."""
    console = Console(record=True, width=columns, file=StringIO(), force_terminal=True)
    console.print(Text(f"$ instrument {' '.join(arguments)}", "bold green"))
    console.print(Text.from_ansi(instrument(folder, *arguments, columns=columns)))
    no_fonts = re.sub(r"@font-face \{\{.*?\}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    own_fonts = no_fonts.replace("Fira Code, monospace", FONTS)
    console.save_svg(
        str(ASSETS / f"{picture}.svg"),
        title="instrument",
        code_format=own_fonts,
        unique_id=picture,
    )


def draw_pages(folder: Path, shots: Sequence[Shot]) -> None:
    """Draw parts of pages in `folder`, light and dark."""
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for shot, (suffix, scheme) in product(shots, SCHEMES):
            tab = browser.new_page(
                viewport={"width": PAGE_WIDTH, "height": 5000}, color_scheme=scheme
            )
            tab.goto((folder / f"{shot.page}.html").as_uri())
            tab.wait_for_selector("html[data-ready]", state="attached")
            draw_part(tab, shot, ASSETS / f"{shot.name}{suffix}.webp")
            tab.close()
        browser.close()


def draw_part(tab: Page, shot: Shot, picture: Path) -> None:
    """Write a part of an open page as WebP; Playwright itself writes no WebP."""
    first, last = (tab.locator(each).first for each in (shot.first, shot.last))
    last.scroll_into_view_if_needed()
    tab.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    tab.evaluate("scrollTo(0, 0)")
    top, bottom = first.bounding_box(), last.bounding_box()
    assert top, f"{shot.page} has no {shot.first}"
    assert bottom, f"{shot.page} has no {shot.last}"
    height = bottom["y"] + bottom["height"] - top["y"] + 2 * MARGIN
    clip = {"x": 0, "y": top["y"] - MARGIN, "width": PAGE_WIDTH, "height": height, "scale": SCALE}
    taken = tab.context.new_cdp_session(tab).send(
        "Page.captureScreenshot",
        {"format": "webp", "quality": QUALITY, "clip": clip, "captureBeyondViewport": True},
    )
    picture.write_bytes(base64.b64decode(taken["data"]))
    print(f"{picture} ({picture.stat().st_size / 1024:.0f} KiB)")


if __name__ == "__main__":
    main({*sys.argv[1:]})

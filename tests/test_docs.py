"""README and docs/, page by page: files are written, Python blocks and commands run, generated pages are current.

Each page runs from top to bottom in one process, in a folder with the files of all pages and `profile`, the captures of
`python train.py`. That process, and those of the page's own commands, are forked from one that has loaded torch; see
warm.py. No test names a page that is written by hand.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from types import MappingProxyType

import pytest
import warm
from collected import problems_in
from installed import need, records_collections
from page_script import blocks, script, unread
from real_traces import FOLDER, needs_traces

from instrument.cli.command import main

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PROFILER = ROOT / "instrument" / "conf" / "profiler"
FILES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in FILES}
BLOCKS = {page: blocks(text) for page, text in PAGES.items() if blocks(text)}
TRAINERS = re.compile(r"^from (lightning|transformers|ignite|accelerate)\b", re.MULTILINE)


def run(script: str, folder: Path, more: Mapping[str, str] = MappingProxyType({})) -> str:
    """What a script printed, its errors too; it must have ended well."""
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",  # the models are small, and other tests want the cores
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PWD": str(folder),
        # pages run pytest, which finds the plugin by itself only where this package is installed
        "PYTEST_PLUGINS": "instrument.integrations.pytest_plugin",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # to load all installed plugins takes a second
        warm.EXPORTER: "yes",
        **more,
    }
    done = warm.run([script], folder, env)
    assert done.returncode == 0, f"{script}\n{done.stdout}"
    assert not problems_in(done.stdout), done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the files of all pages and the captures of train.py."""
    folder = tmp_path_factory.mktemp("docs")
    for block in (block for page in BLOCKS.values() for block in page if block.file):
        (folder / block.file).parent.mkdir(exist_ok=True)
        (folder / block.file).write_text(block.body, encoding="utf-8")
    for trace in DOCS.glob("assets/samples/*.json.gz"):
        shutil.copy(trace, folder)
    run("train.py", folder)
    (profile,) = folder.glob("outputs/*/*/profile")
    shutil.copytree(profile, folder / "profile")
    return folder


def cannot_run(body: str) -> bool:
    """Whether a trainer is not installed, or this torch lacks an option."""
    if "record_python_gc_info" in body and not records_collections():
        return True
    return any(importlib.util.find_spec(name) is None for name in TRAINERS.findall(body))


@pytest.mark.parametrize("page", BLOCKS)
def test_each_block_runs(page: str, recorded: Path, tmp_path: Path) -> None:
    run_page(page, recorded, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "page", [page for page, found in BLOCKS.items() if any(b.note == "nightly" for b in found)]
)
def test_each_block_runs_that_takes_minutes(page: str, recorded: Path, tmp_path: Path) -> None:
    run_page(page, recorded, tmp_path, at_night=True)


def run_page(page: str, recorded: Path, tmp_path: Path, *, at_night: bool = False) -> None:
    # the query is run on eight real ranks by tests/sinks/test_parquet_sink.py
    assert {block.language for block in BLOCKS[page]} <= {
        "python", "bash", "yaml", "text", "sql", "toml",
    }  # fmt: skip
    folder, source = tmp_path / "folder", script(BLOCKS[page], cannot_run, at_night=at_night)
    shutil.copytree(recorded, folder)
    (file := tmp_path / f"page_{Path(page).stem}.py").write_text(source, encoding="utf-8")
    printed = run(str(file), folder, warm.with_trainers() if TRAINERS.search(source) else {})
    assert "print(" not in source or printed.strip()
    assert ".ranges)" not in source or "name" in printed


SHOWN = [
    (block.printed_by, block.body) for page in BLOCKS.values() for block in page if block.printed_by
]


@needs_traces
@pytest.mark.parametrize(("command", "shown"), SHOWN, ids=[command for command, _ in SHOWN])
def test_what_a_page_shows_of_a_trace_is_printed(
    command: str, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(FOLDER)
    words = [[*map(str, sorted(Path().glob(word)))] or [word] for word in shlex.split(command)[1:]]
    assert main([*chain(*words)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for paragraph in re.split(r"\n\n|^ *…$", shown, flags=re.MULTILINE):
        assert " ".join(paragraph.split()) in printed


def test_tables_of_pages_have_the_columns_of_today(recorded: Path) -> None:
    headings = r"^(?:Ranges|Operators)\b.*\n(?:.*\n)?(name .*)"
    (table,) = recorded.glob("profile/*/table.txt")
    printed = re.findall(headings, table.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(printed) == 2
    shown = [
        row
        for page in BLOCKS.values()
        for block in page
        if block.language == "text" and not block.printed_by
        for row in re.findall(headings, block.body, re.MULTILINE)
    ]
    assert shown
    # The log has fewer columns than the file.
    assert set(" ".join(shown).split()) <= set(" ".join(printed).split())


def test_every_text_of_a_tutorial_is_printed() -> None:
    for page, found in BLOCKS.items():
        if page.startswith("docs/tutorials/"):
            texts = [block for block in found if block.language == "text"]
            assert [block for block in texts if not block.printed_by and not block.note] == []


def test_no_block_and_no_comment_is_passed_over() -> None:
    for page, text in PAGES.items():
        assert not unread(text), page


def test_generated_files_are_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DOCS)  # of the modules that draw
    need("griffe")  # of the extra docs
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec
    assert spec.loader
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    files = generate.files()
    pages = (DOCS / name for name in ("options.md", "columns.md", "cli.md", "json.md"))
    shipped = (PROFILER / generate.BASE).with_suffix(".yaml"), *PROFILER.glob("*/*.yaml")
    assert {*files} >= {*pages, *shipped}
    stale = [str(file) for file, text in files.items() if file.read_text("utf-8") != text()]
    assert not stale, "run python docs/generate.py"


def test_config_files_have_lines_of_100_characters() -> None:
    files = {file.name: file.read_text("utf-8") for file in PROFILER.rglob("*.yaml")}
    lines = [(name, line) for name, text in files.items() for line in text.splitlines()]
    assert not [each for each in lines if len(each[1]) > 100]


def test_every_option_is_told() -> None:
    """None is without a text, or in no group."""
    page = PAGES["docs/options.md"]
    assert "## Others" not in page
    assert not re.findall(
        r"^\| `\w+` \|.*\|  \|$", page.partition("## Which steps")[2], re.MULTILINE
    )
    sections = re.split(r"^### ", page, flags=re.MULTILINE)[1:]
    titles = [section.splitlines()[0] for section in sections]
    assert len(titles) > 40
    assert all(len(section.split("\n\n")) > 2 for section in sections)


def test_words_and_numbers_are_written_in_one_way() -> None:
    """`synchronize` is torch's name; our word is "to synchronise", and a share is "5 %"."""
    files = [*FILES, *ROOT.glob("instrument/**/*.py")]
    torchs = r"\S*[Ss]ynchronize\b[`()]|\w[Ss]ynchronize|[.\"_]synchronize|synchronize\|"
    for file in files:
        text = re.sub(torchs, "", file.read_text("utf-8"))
        assert not re.findall(r"(?i)\bsynchroniz\w*", text), file
    for page, text in PAGES.items():
        prose = re.sub(r"```(?!text).*?```|`[^`\n]+`|<!-- setup.*?-->", "", text, flags=re.DOTALL)
        assert not re.findall(r".*\d%.*", re.sub(r"'[^'\n]*>\+?\d+%'", "", prose)), page


def test_every_page_can_be_found() -> None:
    """Zensical says nothing of a page in its navigation that does not exist, nor of one that is in none."""
    listed = re.findall(
        r'"([\w/-]+\.md)"', (ROOT / "zensical.toml").read_text("utf-8"), re.MULTILINE
    )
    assert sorted(listed) == sorted(
        path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")
    )


def test_every_page_has_a_twin_for_agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DOCS)
    importlib.import_module("twins").main(tmp_path)
    listed = re.findall(
        r"^- \[.+?\]\(([\w/-]+\.md)\): .", (tmp_path / "llms.txt").read_text(), re.M
    )
    assert sorted(listed) == sorted(
        path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")
    )
    for page in listed:
        assert (tmp_path / page).read_text("utf-8") == PAGES[f"docs/{page}"]


def test_links_of_the_readme_lead_somewhere() -> None:
    """Those of the pages in docs/ are looked at by `zensical build --strict`."""
    for page in ("README.md", "CONTRIBUTING.md"):
        links = re.findall(r"\]\(([^)#:]+)(?:#([\w-]+))?\)", (ROOT / page).read_text("utf-8"))
        assert links
        for path, anchor in links:
            assert (ROOT / path).is_file(), path
            if anchor:
                titles = re.findall(r"^#+ (.*)$", (ROOT / path).read_text("utf-8"), re.MULTILINE)
                assert anchor in {
                    re.sub(r"\W+", "-", title.lower()).strip("-") for title in titles
                }, f"{path}#{anchor}"

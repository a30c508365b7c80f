"""Lay a table out as lines: choose its columns and their widths, and shorten its cells.

The plain text of a table, its drawing on a terminal, and what an interpreter prints come from here.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from instrument.base.printable import printable, printable_lines
from instrument.base.prose import PROSE_WIDTH, cells_of, shortened
from instrument.base.units import counted
from instrument.read.facts.schema import unit_of
from instrument.read.views.section import TEXT_WIDTH, Part, Section, lines_of
from instrument.read.views.table_text import SENTENCES, cell_text, heading, is_text

#: Texts, each with the style in which a terminal shows it.
Pieces: TypeAlias = list[tuple[str, str]]

# The maximum width of sentences below a row, in characters.
_SENTENCE_WIDTH = 74
# If a table is too wide, these columns are left out first on a terminal, then those of
# `Section.missable`, then others from the right. Plain text only leaves out the missable ones.
_LEAST_MISSED = (
    "cpu_bytes", "device_bytes", "occupancy_covered", "block", "grid", "blocks_per_sm",
    "clipped_overlap_ns", "clipped_copy_ns", "clipped_communication_ns", "clipped_idle_ns",
    "clipped_exposed_copy_ns", "clipped_exposed_communication_ns", "clipped_compute_ns",
    "overlap_ns", "copy_ns", "unknown_wait_ns", "gap_wait_ns", "min_ns", "occupancy",
    "cpu_ns_per_step", "cpu_ns_per_call", "forward_ns", "recompute_ns", "self_cpu_bytes",
    "self_device_bytes", "flops", "communication_ns", "exposed_copy_ns", "backward_ns",
    "self_total_ns", "total_ns", "start_ns", "end_ns", "graph", "graph_node", "streams",
    "max_replay_ns", "device_number", "peak_share", "precision",
)  # fmt: skip
# Widths of columns of text: the least of a column other than the names (a date and a time fit), and
# the most; on a terminal it is half of the width, if that is more. Unused space widens columns of
# text up to the third width, then the bar of a share, and then columns of text again.
_NARROWEST, _WIDEST, _READABLE = 19, 60, 36
_GAP, _INDENT = "  ", "    "
# The minimum and the maximum width of the bar of a share.
_SHORTEST_BAR, _LONGEST_BAR = 4, 8
_EIGHTHS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")
# The signs of a tree's lines: a blank, a line that continues, a branch, the last branch.
_GUIDES, _ASCII_GUIDES = ("  ", "│ ", "├ ", "└ "), ("  ", "| ", "+ ", "` ")
_STRONG, _FAINT, _BAR_STYLE = "bold", "dim", "cyan"
# The styles of large shares of a cost, each with the smallest share that has it.
_WARM = ((0.2, "bold red"), (0.05, "yellow"))


@dataclass(frozen=True)
class Medium:
    """Where a table is shown.

    Attributes:
        width: the number of characters in a line; None means no limit.
        drops: whether any column may be left out to keep the width.
        draws: whether tree lines and bars are drawn, as on a terminal.
        ascii_only: whether lines and bars have only ASCII characters.
    """

    width: int | None
    drops: bool = False
    draws: bool = False
    ascii_only: bool = False


@dataclass
class _Column:
    name: str
    header: str
    values: Sequence[Any]
    texts: list[str]
    is_text: bool
    least: int
    most: int
    guides: list[str]
    warm_rows: int
    width: int = 0
    bar: int = 0


class Line(NamedTuple):
    """A line of a section; a terminal wraps a line that is no row of the table."""

    pieces: Pieces
    is_row: bool = True


def plain(parts: Iterable[Part], *, drops: bool = False) -> str:
    """Return parts as plain text, with an empty line between them.

    `drops` is whether columns that do not fit are left out, as on a terminal.
    """
    return "\n\n".join(
        text(part, Medium(part.text_width, drops=drops))
        if isinstance(part, Section)
        else printable_lines(*lines_of(part))
        for part in parts
    )


def text(section: Section, medium: Medium) -> str:
    """Return a section as text without styles."""
    joined = [
        ("".join(text for text, _ in line.pieces), line.is_row) for line in lines(section, medium)
    ]
    if medium.width is not None and medium.drops:
        wrap = partial(textwrap.wrap, width=max(medium.width, PROSE_WIDTH), break_on_hyphens=False)
        return printable_lines(
            *(each for text, is_row in joined for each in ([text] if is_row else wrap(text)))
        )
    return printable_lines(*(text for text, _ in joined))


def lines(section: Section, medium: Medium) -> Iterator[Line]:
    """Yield the lines of a section.

    A row has at most the width of the medium. To keep it, names are shortened in the middle, and if
    this is not enough, columns are left out; a line below the table lists them. Columns that the
    reader chose are not left out: where the medium drops columns, they are divided into several
    tables below each other.
    """
    if section.title:
        title = printable(section.title)
        ends = [at for mark in ",;(" if (at := title.find(mark)) > 0]
        name = title[: min(ends, default=len(title))].rstrip()
        yield Line([(name, _STRONG), (title[len(name) :], _FAINT)], is_row=False)
    columns = [_column(section, name, medium) for name in section.columns]
    kept, blocks = columns, [columns]
    if medium.width is not None and not section.chosen:
        kept = _narrowed(columns, medium, section)
        blocks = [kept]
    elif medium.width is not None and medium.drops:
        blocks = _blocks(columns, medium)
    for number, block in enumerate(blocks):
        if number:
            yield Line([])
        _set_widths(block, medium)
        yield from map(Line, _rows(block, section, medium))
    left_out = [each.header or heading(each.name) for each in columns if each not in kept]
    if left_out and section.all_columns:
        them = "it" if len(left_out) == 1 else "them"
        how = f"{section.all_columns}{' or a wider terminal' if medium.drops else ''} shows {them}"
        some = counted(len(left_out), "column")
        note = f"{some} left out: {', '.join(left_out)}; {how}."
        yield Line([(note, _FAINT)], is_row=False)


def _rows(columns: Sequence[_Column], section: Section, medium: Medium) -> Iterator[Pieces]:
    if section.has_header:
        yield _joined([_padded([(each.header, _STRONG)], each) for each in columns])
        rule = "─" if medium.draws and not medium.ascii_only else "-"
        yield [(_GAP.join(rule * (each.width + each.bar) for each in columns), _FAINT)]
    for row in range(len(section.table)):
        yield _joined([_cell(each, row, medium) for each in columns])
        for line in section.below[row] if section.below else ():
            for below in _below(line, section, medium.width or TEXT_WIDTH):
                yield [(_INDENT + below, _FAINT)]


def _column(section: Section, name: str, medium: Medium) -> _Column:
    table = section.table.since_begin()
    values, header = table.column(name), heading(name) if section.has_header else ""
    texts = [cell_text(name, value, section.texts) for value in values]
    guides: list[str] = []
    if medium.draws and section.is_tree and name == "name":
        depths = [depth or 0 for depth in table.column("depth")]
        signs = _ASCII_GUIDES if medium.ascii_only else _GUIDES
        guides = _guides(depths, (medium.width or TEXT_WIDTH) // 8, signs)
        texts = [text[2 * depth :] for text, depth in zip(texts, depths)]
    natural = max((cells_of(text) for text in texts), default=0)
    if guides:
        natural = max(cells_of(guide + text) for guide, text in zip(guides, texts))
    least = most = natural = max(natural, cells_of(header))
    if is_text(values) and (medium.draws or name not in SENTENCES):
        is_wide = name == _names_of(section.columns) or not medium.drops
        narrowest = section.narrowest if is_wide else _NARROWEST
        least = min(natural, max(cells_of(header), narrowest))
        most = min(natural, max(_WIDEST, (medium.width or 0) // 2 if medium.draws else 0))
    of_cost = section.of_cost and unit_of(name) == "share"
    warm_rows = len(values) - section.rest if of_cost else 0
    return _Column(name, header, values, texts, is_text(values), least, most, guides, warm_rows)


def _names_of(columns: Sequence[str]) -> str:
    """Return the name of the column that identifies the rows."""
    return "name" if "name" in columns else columns[0]


def _guides(depths: Sequence[int], levels: int, signs: Sequence[str]) -> list[str]:
    """Return the tree lines before each name; only those of the innermost `levels` levels.

    `depths` are the depths of the names in the order of the rows: parents come before children.
    """
    blank, line, branch, last = signs
    guides: list[str] = []
    open_levels: set[int] = set()  # levels at which a row further down continues the line
    for depth in reversed(depths):
        first = max(1, depth - levels + 1)
        outer = "".join(line if level in open_levels else blank for level in range(first, depth))
        own = "" if not depth else branch if depth in open_levels else last
        guides.append(("… " if first > 1 else "") + outer + own)
        open_levels = {level for level in open_levels if level < depth} | {depth}
    return guides[::-1]


def _needed(columns: Sequence[_Column], medium: Medium) -> int:
    """Return the width of a line in which all columns and bars have their minimum width."""
    gaps = len(_GAP) * (len(columns) - 1)
    return sum(column.least for column in columns) + gaps + _least_bar(columns, medium)


def _least_bar(columns: Sequence[_Column], medium: Medium) -> int:
    """Return the minimum width of a share's bar and the blank before it; 0 if there is no bar."""
    return 1 + _SHORTEST_BAR if medium.draws and any(each.warm_rows for each in columns) else 0


def _narrowed(columns: list[_Column], medium: Medium, section: Section) -> list[_Column]:
    """Return the columns that fit in one line; the names and the key always stay."""
    names = [column.name for column in columns]
    order = [*section.missable]
    if medium.drops:
        of_cpu = ["share"] if "device_share" in names and section.of_cost else []
        order = [*dict.fromkeys([*_LEAST_MISSED, *order, *of_cpu, *reversed(names)])]
    kept = list(columns)
    for name in order:
        if _needed(kept, medium) <= (medium.width or 0):
            break
        if name not in (_names_of(names), section.key):
            kept = [column for column in kept if column.name != name]
    return kept


def _blocks(columns: list[_Column], medium: Medium) -> list[list[_Column]]:
    """Divide all columns into blocks that fit the width; each block repeats the column of names."""
    named = _names_of([column.name for column in columns])
    names = [column for column in columns if column.name == named]
    blocks = [[*names]]
    for column in columns:
        if column.name != named:
            if len(blocks[-1]) > 1 and _needed([*blocks[-1], column], medium) > (medium.width or 0):
                blocks.append([*names])
            blocks[-1].append(column)
    return blocks


def _set_widths(columns: list[_Column], medium: Medium) -> None:
    """Choose the width of each column, and of the bar of the last column of shares."""
    width = 10**9 if medium.width is None else medium.width
    left = width - _needed(columns, medium)
    for column in columns:
        column.width, column.bar = column.least, 0
    left = _widen(columns, left, _READABLE)
    if left < 0 and medium.drops:  # a terminal so narrow that nothing fits
        columns[0].width = max(columns[0].width + left, 1)
    shares = [column for column in columns if column.name.endswith("share")]
    left += _least_bar(columns, medium)
    if medium.draws and shares and left > _SHORTEST_BAR:
        shares[-1].bar = 1 + min(left - 1, _LONGEST_BAR)
        left -= shares[-1].bar
    _widen(columns, left, width)


def _widen(columns: list[_Column], left: int, most: int) -> int:
    """Widen the columns in order, each up to `most`; return the unused width that remains."""
    for column in columns:
        more = max(min(column.most, most) - column.width, 0)
        more = min(more, max(left, 0))
        column.width, left = column.width + more, left - more
    return left


def _below(line: str, section: Section, width: int) -> list[str]:
    room = max(width - len(_INDENT), 1)
    if section.sentences:
        return textwrap.wrap(printable(line), min(room, _SENTENCE_WIDTH))
    return [shortened(printable(line), room)]


def _joined(cells: Sequence[Pieces]) -> Pieces:
    """Return the cells of a row with gaps between them, and without blanks at the end."""
    line = [piece for cell in cells for piece in ((_GAP, ""), *cell)][1:]
    while line and not line[-1][0].rstrip():
        line.pop()
    return [*line[:-1], (line[-1][0].rstrip(), line[-1][1])] if line else []


def _cell(column: _Column, row: int, medium: Medium) -> Pieces:
    value, guide = column.values[row], column.guides[row] if column.guides else ""
    text = shortened(column.texts[row], max(column.width - cells_of(guide), 1))
    warm = ""
    if row < column.warm_rows and isinstance(value, int | float):
        warm = next((style for least, style in _WARM if value >= least), "")
    is_nothing = value is None or (value == 0 and not column.is_text)
    pieces = _padded([(guide, _FAINT), (text, _FAINT if is_nothing else warm)], column)
    if column.bar:
        pieces[-1] = (f" {_bar(value, column.bar - 1, medium.ascii_only)}", warm or _BAR_STYLE)
    return pieces


def _padded(pieces: Pieces, column: _Column) -> Pieces:
    """Pad a cell to its column's width; a last piece leaves room for the bar."""
    pad = (" " * (column.width - sum(cells_of(text) for text, _ in pieces)), "")
    return [*([*pieces, pad] if column.is_text else [pad, *pieces]), (" " * column.bar, "")]


def _bar(share: object, width: int, ascii_only: bool) -> str:
    part = min(max(share, 0.0), 1.0) if isinstance(share, int | float) else 0.0
    if ascii_only:
        return ("#" * round(part * width)).ljust(width)
    full, eighths = divmod(round(part * width * 8), 8)
    return ("█" * full + _EIGHTHS[eighths]).ljust(width)

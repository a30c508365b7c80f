"""Lay a table out as lines: choose the columns that fit, their widths, and shorten long names.

The plain text of a table, its drawing on a terminal, and what an interpreter prints come from here.
`rich` draws the lines; its own tables cut the end of a name, where names differ, and take eight
times as long.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
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
# If a table is too wide, the columns of `Section.missable` are left out first, then these, then
# others from the right.
_LEAST_MISSED = (
    "occupancy_covered", "block", "grid", "blocks_per_sm", "recorded_calls", "known_calls",
    "waiting_stream", "max_delay_ns", "max_replay_ns", "streams", "graph", "graph_node",
    "device_number", "bound_ns", "moved_bytes", "peak_share", "precision", "runs_on",
    "recorded_ranks", "ordinal", "exposed_ns", "min_ns", "max_skew_ns", "largest_message_calls",
    "element_type", "algorithm_bytes_per_second", "process_group", "waiting_ns", "last_share",
    "mean_ns", "ranks", "group_size", "description", "largest_message_bytes", "cpu_bytes",
    "device_bytes", "clipped_overlap_ns", "clipped_copy_ns", "clipped_communication_ns",
    "clipped_idle_ns", "clipped_exposed_copy_ns", "clipped_exposed_communication_ns",
    "clipped_compute_ns", "overlap_ns", "copy_ns", "unknown_wait_ns", "gap_wait_ns", "occupancy",
    "cpu_ns_per_step", "cpu_ns_per_call", "forward_ns", "recompute_ns", "self_cpu_bytes",
    "self_device_bytes", "flops", "communication_ns", "exposed_copy_ns", "backward_ns",
    "self_total_ns", "total_ns", "start_ns", "end_ns",
)  # fmt: skip
# Widths of columns of text: the least of a column other than the names (a date and a time fit), and
# the most.
_NARROWEST, _WIDEST = 19, 60
_GAP, _INDENT = "  ", "    "
_BAR = 8
_EIGHTHS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")
# The signs of a tree's lines: a blank, a line that continues, a branch, the last branch.
_BLANK, _LINE, _BRANCH, _LAST = "  ", "│ ", "├ ", "└ "
_STRONG, _FAINT, _BAR_STYLE = "bold", "dim", "cyan"
# The styles of large shares of a cost, each with the smallest share that has it.
_WARM = ((0.2, "bold red"), (0.05, "yellow"))


@dataclass
class _Column:
    name: str
    header: str
    values: Sequence[Any]
    texts: list[str]
    guides: list[str]
    is_text: bool
    least: int
    most: int
    width: int = 0
    bar: int = 0


class Line(NamedTuple):
    """A line of a section; a terminal wraps a line that is no row of the table."""

    pieces: Pieces
    is_row: bool = True


def plain(parts: Iterable[Part]) -> str:
    """Return parts as plain text, with an empty line between them."""
    return "\n\n".join(
        text(part, part.text_width)
        if isinstance(part, Section)
        else printable_lines(*lines_of(part))
        for part in parts
    )


def text(section: Section, width: int | None) -> str:
    """Return a section as text without styles, in lines of `width` characters if it is given."""
    found: list[str] = []
    for pieces, is_row in lines(section, width):
        line = "".join(text for text, _ in pieces)
        is_whole = is_row or width is None
        most = max(width or 0, PROSE_WIDTH)
        found += [line] if is_whole else textwrap.wrap(line, most, break_on_hyphens=False)
    return printable_lines(*found)


def lines(section: Section, width: int | None, draws: bool = False) -> Iterator[Line]:
    """Yield the lines of a section; with `draws`, with the lines of a tree and bars of shares.

    To keep the width, names are shortened in the middle, and if this is not enough, columns are
    left out; a line below the table lists them. Columns that the reader chose are divided into
    several tables below each other instead.
    """
    if section.title:
        title = printable(section.title)
        ends = [at for mark in ",;(" if (at := title.find(mark)) > 0]
        name = title[: min(ends, default=len(title))].rstrip()
        yield Line([(name, _STRONG), (title[len(name) :], _FAINT)], is_row=False)
    columns = [_column(section, name, width, draws) for name in section.columns]
    kept = columns if section.chosen or width is None else _fitting(columns, width, section)
    for number, block in enumerate(_blocks(kept, width) if section.chosen and kept else [kept]):
        if number:
            yield Line([])
        _set_widths(block, width, draws)
        yield from map(Line, _rows(block, section, width or TEXT_WIDTH, "─" if draws else "-"))
    left_out = [each.header or heading(each.name) for each in columns if each not in kept]
    if left_out and section.all_columns:
        them = "it" if len(left_out) == 1 else "them"
        note = f"{counted(len(left_out), 'column')} left out: {', '.join(left_out)}; "
        yield Line([(f"{note}{section.all_columns} shows {them}.", _FAINT)], is_row=False)


def _set_widths(columns: list[_Column], width: int | None, draws: bool) -> None:
    """Choose the width of each column, and of the bar of the last column of shares."""
    left = 10**9 if width is None else width - _needed(columns)
    for column in columns:
        column.width = column.least + min(column.most - column.least, max(left, 0))
        left -= column.width - column.least
    if left < 0:  # a terminal so narrow that nothing fits
        columns[0].width = max(columns[0].width + left, 1)
    shares = [column for column in columns if column.name.endswith("share")]
    if draws and shares and left > _BAR:
        shares[-1].bar = _BAR + 1


def _rows(columns: Sequence[_Column], section: Section, width: int, rule: str) -> Iterator[Pieces]:
    if section.has_header:
        yield _joined([_padded([(each.header, _STRONG)], each) for each in columns])
        yield [(_GAP.join(rule * (each.width + each.bar) for each in columns), _FAINT)]
    warm_rows = len(section.table) - section.rest if section.of_cost else 0
    for row in range(len(section.table)):
        yield _joined([_cell(each, row, row < warm_rows) for each in columns])
        for line in section.below[row] if section.below else ():
            for below in _below(line, section, width):
                yield [(_INDENT + below, _FAINT)]


def _column(section: Section, name: str, width: int | None, draws: bool) -> _Column:
    table = section.table.since_begin()
    values, header = table.column(name), heading(name) if section.has_header else ""
    texts = [cell_text(name, value, section.texts) for value in values]
    guides = [""] * len(texts)
    if draws and section.is_tree and name == "name":
        depths = [depth or 0 for depth in table.column("depth")]
        guides = _guides(depths, (width or TEXT_WIDTH) // 8)
        texts = [text[2 * depth :] for text, depth in zip(texts, depths)]
    natural = max((cells_of(guide + text) for guide, text in zip(guides, texts)), default=0)
    least = most = max(natural, cells_of(header))
    if is_text(values) and name not in SENTENCES:
        narrowest = section.narrowest if name == _names_of(section.columns) else _NARROWEST
        least, most = min(most, max(cells_of(header), narrowest)), min(most, _WIDEST)
    return _Column(name, header, values, texts, guides, is_text(values), min(least, most), most)


def _names_of(columns: Sequence[str]) -> str:
    """Return the name of the column that identifies the rows."""
    return "name" if "name" in columns else columns[0]


def _guides(depths: Sequence[int], levels: int) -> list[str]:
    """Return the tree lines before each name; only those of the innermost `levels` levels.

    `depths` are the depths of the names in the order of the rows: parents come before children.
    """
    guides: list[str] = []
    open_levels: set[int] = set()  # levels at which a row further down continues the line
    for depth in reversed(depths):
        first = max(1, depth - levels + 1)
        outer = "".join(_LINE if level in open_levels else _BLANK for level in range(first, depth))
        own = "" if not depth else _BRANCH if depth in open_levels else _LAST
        guides.append(("… " if first > 1 else "") + outer + own)
        open_levels = {level for level in open_levels if level < depth} | {depth}
    return guides[::-1]


def _needed(columns: Sequence[_Column]) -> int:
    return sum(column.least for column in columns) + len(_GAP) * (len(columns) - 1)


def _fitting(columns: list[_Column], width: int, section: Section) -> list[_Column]:
    """Return the columns that fit in one line; the names and the key always stay."""
    names = [column.name for column in columns]
    of_cpu = ["share"] if "device_share" in names and section.of_cost else []
    order = [*section.missable, *_LEAST_MISSED, *of_cpu, *reversed(names)]
    kept = list(columns)
    for name in order:
        if _needed(kept) <= width:
            break
        if name not in (_names_of(names), section.key):
            kept = [column for column in kept if column.name != name]
    return kept


def _blocks(columns: list[_Column], width: int | None) -> list[list[_Column]]:
    """Divide all columns into blocks that fit the width; each block repeats the column of names."""
    named = _names_of([column.name for column in columns])
    names = [column for column in columns if column.name == named]
    blocks = [[*names]]
    for column in columns:
        if column.name != named:
            if len(blocks[-1]) > 1 and width and _needed([*blocks[-1], column]) > width:
                blocks.append([*names])
            blocks[-1].append(column)
    return blocks


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


def _cell(column: _Column, row: int, is_warm: bool) -> Pieces:
    value, guide = column.values[row], column.guides[row]
    text = shortened(column.texts[row], max(column.width - cells_of(guide), 1))
    warm = ""
    if is_warm and isinstance(value, int | float) and unit_of(column.name) == "share":
        warm = next((style for least, style in _WARM if value >= least), "")
    is_nothing = value is None or (value == 0 and not column.is_text)
    pieces = _padded([(guide, _FAINT), (text, _FAINT if is_nothing else warm)], column)
    if column.bar:
        share = min(max(value, 0.0), 1.0) if isinstance(value, int | float) else 0.0
        full, eighths = divmod(round(share * _BAR * 8), 8)
        pieces[-1] = (f" {'█' * full + _EIGHTHS[eighths]}".ljust(_BAR + 1), warm or _BAR_STYLE)
    return pieces


def _padded(pieces: Pieces, column: _Column) -> Pieces:
    """Pad a cell to its column's width; a last piece leaves room for the bar."""
    pad = (" " * (column.width - sum(cells_of(text) for text, _ in pieces)), "")
    return [*([*pieces, pad] if column.is_text else [pad, *pieces]), (" " * column.bar, "")]

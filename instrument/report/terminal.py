"""Draw text and tables on a terminal: fitted to its width, with tree lines, bars and colours.

Names in a trace may come from anybody, so they must not control the terminal. `printable` escapes
control characters, and `rich.text.Text` does not interpret rich's markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from instrument.analysis.schema import unit_of
from instrument.analysis.section import SENTENCE_WIDTH, Part, Section, lines_of
from instrument.analysis.table_text import cell_text, heading, is_text
from instrument.printable import printable, without_commands
from instrument.units import counted

# If a terminal is narrow, columns are left out in this order: first the columns of this list, then
# the columns in `Section.missable`, then other columns from the right.
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
# Widths of columns of text, in characters:
# - `_NARROWEST_NAME` is the minimum width of the column of names.
# - `_NARROWEST` is the minimum width of other text: a date and a time fit.
# - `_WIDEST` is the maximum width, or half of the terminal if that is more.
_NARROWEST_NAME, _NARROWEST, _WIDEST = 28, 19, 60
# Unused width first widens columns of text up to this width, then the bar of a share, and then
# columns of text further.
_READABLE = 36
# Shortened text keeps this many of its last characters, because names of kernels differ there.
_TAIL = 15
_GAP = "  "
# Before the lines below a row.
_INDENT = "    "
# The minimum and the maximum width of the bar of a share.
_SHORTEST_BAR, _LONGEST_BAR = 4, 8
_EIGHTHS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")
# The signs of a tree's lines: a blank, a line that continues, a branch, the last branch.
_GUIDES, _ASCII_GUIDES = ("  ", "│ ", "├ ", "└ "), ("  ", "| ", "+ ", "` ")
_STRONG, _FAINT, _BAR_STYLE = "bold", "dim", "cyan"
# The colours of large shares, each with the smallest share that has this colour.
_WARM = ((0.2, "bold red"), (0.05, "yellow"))


def draw(parts: Iterable[Part], console: Console | None = None) -> str:
    """Return the parts of a report as text for a terminal, with control sequences.

    A row of a table always fits into a line of the terminal. To make it fit, names are shortened in
    the middle, and if this is not enough, columns are left out. A line below the table lists these
    columns. Columns that the reader chose are not left out: if needed, they are divided into
    several tables below each other. Colours depend on NO_COLOR and on the terminal. If `console` is
    None, the terminal on stdout is used.
    """
    console = console or Console()
    with console.capture() as drawn:
        for number, part in enumerate(parts):
            if number:
                console.print()
            if isinstance(part, Section):
                _draw_section(console, part)
            else:
                first, *others = map(printable, lines_of(part))
                _print_words(console, first, "" if number else _STRONG)
                for line in others:
                    _print_words(console, line)
    return without_commands(drawn.get())


def _print_words(console: Console, line: str, style: str = "") -> None:
    """Print a line, wrapped between words.

    If a word, such as a path, is wider than the terminal, the line is not wrapped, so that the word
    can be copied.
    """
    too_long = any(cell_len(word) > console.width for word in line.split(" "))
    console.print(Text(line, style), soft_wrap=too_long)


@dataclass
class _Column:
    """A column to draw: its cells as text, its minimum and maximum width, and its chosen width."""

    name: str
    header: str
    cells: list[str]
    values: Sequence[object]
    is_text: bool
    least: int
    most: int
    guides: list[str] = field(default_factory=list)
    bar: int = 0
    of_cost: bool = False
    width: int = 0


def _draw_section(console: Console, section: Section) -> None:
    if section.title:
        title = printable(section.title)
        name = title[
            : min((at for mark in ",;(" if (at := title.find(mark)) > 0), default=len(title))
        ].rstrip()
        console.print(Text.assemble((name, _STRONG), (title[len(name) :], _FAINT)))
    columns = _columns(section, console.width, ascii_only=console.options.ascii_only)
    left_out: list[str] = []
    if section.chosen:
        blocks = _blocks(columns, console.width)
    else:
        blocks, left_out = _narrowed(columns, console.width, section)
    for number, block in enumerate(blocks):
        _set_widths(block, console.width)
        for line in ([Text()] if number else []) + [*_lines(block, section, console)]:
            console.print(line, no_wrap=True, overflow="ellipsis")
    if left_out:
        them = "it" if len(left_out) == 1 else "them"
        how = f"{section.all_columns} or a wider terminal shows {them}"
        some = counted(len(left_out), "column")
        console.print(Text(f"{some} left out: {', '.join(left_out)}; {how}.", _FAINT))


def _columns(section: Section, width: int, *, ascii_only: bool) -> list[_Column]:
    table = section.table.since_begin()
    found: list[_Column] = []
    for name in section.columns:
        narrowest = _NARROWEST_NAME if name == _names_of(section.columns) else _NARROWEST
        values, header = table.column(name), heading(name)
        cells = [
            printable(value)
            if isinstance(value, str)
            else cell_text(name, value, texts=section.texts)
            for value in values
        ]
        guides: list[str] = []
        if section.is_tree and name == "name":
            depths = [depth or 0 for depth in table.column("depth")]
            guides = _guides(depths, width // 8, _ASCII_GUIDES if ascii_only else _GUIDES)
            cells = [cell[2 * depth :] for cell, depth in zip(cells, depths)]
        natural = max(map(cell_len, [header, *(guides or cells)]), default=0)
        if guides:
            natural = max(natural, *(cell_len(guide + cell) for guide, cell in zip(guides, cells)))
        text, least = is_text(values), natural
        if text:
            least = min(natural, max(cell_len(header), narrowest))
        most = min(natural, max(_WIDEST, width // 2)) if text else natural
        cost = section.of_cost and unit_of(name) == "share"
        column = _Column(name, header, cells, values, text, least, most, guides, of_cost=cost)
        found.append(column)
    return found


def _names_of(columns: Sequence[str]) -> str:
    """Return the name of the column that identifies the rows."""
    return "name" if "name" in columns else columns[0]


def _guides(depths: Sequence[int], levels: int, signs: Sequence[str]) -> list[str]:
    """Return the tree lines to draw before each name of a tree.

    `depths` are the depths of the names in the order of the rows: a parent comes before its
    children. Lines are drawn only for the innermost `levels` levels of a name.
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


def _needed(columns: Sequence[_Column]) -> int:
    """Return the width of a line in which all columns and bars have their minimum width."""
    gaps = len(_GAP) * (len(columns) - 1)
    return sum(column.least for column in columns) + gaps + _least_bar(columns)


def _least_bar(columns: Sequence[_Column]) -> int:
    """Return the minimum width of a share's bar and the blank before it; 0 if there is no bar."""
    return 1 + _SHORTEST_BAR if any(column.of_cost for column in columns) else 0


def _narrowed(
    columns: list[_Column], width: int, section: Section
) -> tuple[list[list[_Column]], list[str]]:
    """Choose the columns that fit in one line; leave out the least important columns.

    The column of names and the column `section.key` are never left out.

    Returns:
        The chosen columns, as the only item of a list, and the names of the columns that are left
        out.
    """
    names = [column.name for column in columns]
    of_cpu = ["share"] if "device_share" in names and section.of_cost else []
    first = [*dict.fromkeys([*_LEAST_MISSED, *section.missable, *of_cpu])]
    order = [name for name in first if name in names] + [
        name for name in reversed(names) if name not in first
    ]
    kept = {column.name: column for column in columns}
    for name in order:
        if _needed([*kept.values()]) <= width:
            break
        if name not in (_names_of(names), section.key):
            del kept[name]
    return [[*kept.values()]], [name for name in names if name not in kept]


def _blocks(columns: list[_Column], width: int) -> list[list[_Column]]:
    """Divide all columns into blocks that fit the width; each block repeats the column of names."""
    named = _names_of([column.name for column in columns])
    names = [column for column in columns if column.name == named]
    blocks = [[*names]]
    for column in columns:
        if column.name != named:
            if len(blocks[-1]) > 1 and _needed([*blocks[-1], column]) > width:
                blocks.append([*names])
            blocks[-1].append(column)
    return blocks


def _set_widths(columns: list[_Column], width: int) -> None:
    """Choose the width of each column, so that the columns use the width of the terminal.

    The unused width goes to columns of text until they are `_READABLE` wide, then to the bar of the
    last column of shares, and then to columns of text again.
    """
    left = width - _needed(columns)
    for column in columns:
        column.width = column.least
    left = _widen(columns, left, _READABLE)
    if left < 0:  # a terminal so narrow that nothing fits
        columns[0].width = max(columns[0].width + left, 1)
    shares = [column for column in columns if column.name.endswith("share")]
    left += _least_bar(columns)
    if shares and left > _SHORTEST_BAR:
        shares[-1].bar = min(left - 1, _LONGEST_BAR)
        left -= 1 + shares[-1].bar
    _widen(columns, left, width)


def _widen(columns: list[_Column], left: int, most: int) -> int:
    """Widen the columns in order, each up to `most`; return the unused width that remains."""
    for column in columns:
        more = max(min(column.most, most) - column.width, 0)
        more = min(more, max(left, 0))
        column.width, left = column.width + more, left - more
    return left


def _lines(columns: list[_Column], section: Section, console: Console) -> Iterator[Text]:
    ascii_only = console.options.ascii_only
    widths = [column.width + (1 + column.bar if column.bar else 0) for column in columns]
    yield _joined([_padded(Text(column.header, _STRONG), column) for column in columns])
    yield Text(_GAP.join(("-" if ascii_only else "─") * width for width in widths), _FAINT)
    for row in range(len(section.table)):
        yield _joined([_cell(column, row, ascii_only=ascii_only) for column in columns])
        for line in section.below[row] if section.below else ():
            yield from _below(printable(line), section, console)


def _below(line: str, section: Section, console: Console) -> Iterator[Text]:
    width = max(console.width - len(_INDENT), 1)
    if section.sentences:
        words = Text(line).wrap(console, min(width, SENTENCE_WIDTH), overflow="fold")
        fitted = [each.plain.rstrip() for each in words]
    else:
        fitted = [_shortened(line, width)]
    yield from (Text(_INDENT + each, _FAINT) for each in fitted)


def _joined(cells: Sequence[Text]) -> Text:
    line = Text(_GAP).join(cells)
    line.rstrip()
    return line


def _cell(column: _Column, row: int, *, ascii_only: bool) -> Text:
    value, guide = column.values[row], column.guides[row] if column.guides else ""
    text = _shortened(column.cells[row], max(column.width - cell_len(guide), 1))
    is_nothing = value is None or (value == 0 and not column.is_text)
    warm = _warm(value) if column.of_cost else ""
    style = _FAINT if is_nothing else warm
    cell = _padded(Text.assemble((guide, _FAINT), (text, style)), column)
    if column.bar:
        bar = _bar(value, column.bar, ascii_only=ascii_only)
        cell.append(f" {bar}", warm or _BAR_STYLE)
    return cell


def _warm(share: object) -> str:
    """Return the style in which a share is drawn; "" for a small share."""
    if not isinstance(share, int | float):
        return ""
    return next((style for least, style in _WARM if share >= least), "")


def _padded(cell: Text, column: _Column) -> Text:
    pad = " " * (column.width - cell.cell_len)
    padded = Text.assemble(cell, pad) if column.is_text else Text.assemble(pad, cell)
    if column.bar and cell.plain == column.header:
        padded.append(" " * (1 + column.bar))
    return padded


def _bar(share: object, width: int, *, ascii_only: bool) -> str:
    part = min(max(share, 0.0), 1.0) if isinstance(share, int | float) else 0.0
    if ascii_only:
        return ("#" * round(part * width)).ljust(width)
    full, eighths = divmod(round(part * width * 8), 8)
    return ("█" * full + _EIGHTHS[eighths]).ljust(width)


def _shortened(text: str, width: int) -> str:
    """Shorten text to `width` cells by cutting its middle."""
    if cell_len(text) <= width:
        return text
    tail = ""
    for character in reversed(text[-_TAIL:]):
        if cell_len(character + tail) > (width - 1) // 2:
            break
        tail = character + tail
    return f"{set_cell_size(text, width - 1 - cell_len(tail))}…{tail}"

"""Write generated pages, drawings, and what lists options for Hydra and mypy.

    python docs/generate.py

A test compares these files with the code. The options of a class are its fields; the text of an
option is the docstring below the field, whose first sentence is the comment in the config file.
Commands come from the parser. The presets are written by hand.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import griffe
from draw_concepts import DARK, LIGHT, concepts
from draw_ideas import blocks, schedule, states
from pydantic import BaseModel

from instrument.base.presets import preset, presets, shipped
from instrument.cli import command
from instrument.read.advise import diagnosis
from instrument.read.compare import changes, diff, limits
from instrument.read.facts.facts import EVENTS
from instrument.read.facts.segments import SEGMENTS
from instrument.read.ranks.run import SCHEMAS
from instrument.read.show import ab, ranks, tries, whatif
from instrument.read.show.capture_list import CAPTURES
from instrument.read.simulate.causal_profile import CAUSAL_PROFILE
from instrument.read.simulate.critical_path import CRITICAL_PATH
from instrument.read.views import witness
from instrument.read.views.coverage_rows import ROWS
from instrument.read.views.timings_file import TIMINGS
from instrument.read.views.views import VIEWS
from instrument.record.changes import CHANGES
from instrument.record.config.schema import (
    MetricsConfig,
    ModulesConfig,
    ProfilerConfig,
    TimingsConfig,
)

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
PROFILER = ROOT / "instrument" / "conf" / "profiler"
WRITTEN_BY = "Written by docs/generate.py: change the code, then run it again."
NOTE = f"<!-- {WRITTEN_BY} -->\n"
WIDTH = 100
COMMENTS_FROM = 25  # the column of the comments in config files
BASE = "_instrument_base"
ABOUT_BASE = (
    "Every option of `ProfilerConfig` with its default. Each preset includes this file, so "
    "`profiler.NAME=VALUE` works for all presets. This file is not called base.yaml, because an "
    "application may have its own profiler/base.yaml, and Hydra would then use that file instead."
)
DEFAULTS = """\
defaults:
  - triggers: []         # so that profiler/triggers=[signal,file] works
  - on_capture: []       # so that profiler/on_capture=[wandb] works
  - _self_
"""
GROUPS = {
    "Which steps": (
        "enabled wait warmup active repeat skip_first at_steps every_n_steps "
        "total_steps phases max_window_s max_window_memory max_stall_ms"
    ),
    "What is recorded": (
        "activities record_shapes profile_memory detail with_stack with_flops with_modules "
        "profile_all_threads communication peak_flops memory_categories "
        "memory_snapshot execution_trace experimental_config emit modules timings lines metrics "
        "metadata"
    ),
    "Where it goes": (
        "output_dir ranks export export_timeout_s keep disk_budget upload_to "
        "upload_options preemption_grace_s sinks on_capture triggers"
    ),
}
# For each part of a field's type, what a caller may pass.
PASSED = {
    r"Annotated\[(\w+), .*?\)\]": r"\1",
    r"\bCount\b": "int",
    r"\bAmount\b": "float",
    r"\bBytes\b": "int | str",
    r"\blist\[": "Sequence[",
    r"\bdict\[": "Mapping[",
    r"\b(\w+Config)\b": r"\1 | Mapping[str, Any]",
}
PASSED_AS = {
    "activities": "Sequence[Any] | None",
    "sinks": "Mapping[str, Any] | Sequence[str]",
    "on_capture": "Callable[[Path, dict[str, float]], object] | Mapping[str, Any] | Sequence[str]",
    "triggers": "Mapping[str, Any] | Sequence[str]",
}
COMPARED = ("before", "after", "change", "low", "high")  # prefixes of columns of `diff()`
MEAN_STEP = "in a mean step before the change: "
KEYWORDS_HEAD = f'''\
"""`ProfilerOptions`: the keyword options of `Session`, for type checkers and completion.

{WRITTEN_BY}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from instrument.record.config.schema import MetricsConfig, ModulesConfig, TimingsConfig


class ProfilerOptions(TypedDict, total=False):
    """The options of `ProfilerConfig`, with the types that a caller may pass."""

'''
Row = tuple[str, str, str, str]  # name, type, default, text


def options_page() -> str:
    """The page of all options: of a session, and of each preset, sink and trigger."""
    rows = {row[0]: row for row in _rows(ProfilerConfig)}
    groups = {title: names.split() for title, names in GROUPS.items()}
    if others := rows.keys() - {name for names in groups.values() for name in names}:
        groups["Others"] = sorted(others)
    parts = [
        f"{NOTE}\n# Options",
        _prose(
            "Every option is a field of `ProfilerConfig`. Options that torch has too have torch's "
            "names. Write an option as `Session(active=3)` in Python, and as `profiler.active=3` "
            "with Hydra; `null` is `None` in Python. A misspelt or contradictory option raises "
            "`ConfigError`, in one sentence, before the first step."
        ),
        "## Presets",
        'A preset is a set of options under one name: `Session("trace")`, or `profiler=trace`.',
        _table(("preset", "for", "options", "sinks"), _preset_rows()),
    ]
    for title, names in groups.items():
        parts.append(f"## {title}")
        parts += [_option(rows[name]) for name in names if name in rows]
    nested = {"modules": ModulesConfig, "timings": TimingsConfig, "metrics": MetricsConfig}
    for field, model in nested.items():
        parts += [f"## Options of `{field}`", _option_table(_rows(model))]
    for group in ("sinks", "on_capture", "triggers"):
        parts.append(f"## Options of {group}")
        for name, target in shipped(group).items():
            kind = _class(target)
            parts += [f"### `{name}`", _summary(kind), _option_table(_rows(kind))]
    return "\n\n".join(parts) + "\n"


def base_file() -> str:
    """The config file that every preset includes: all options of a session."""
    return _comment(WRITTEN_BY, ABOUT_BASE) + DEFAULTS + _option_lines(ProfilerConfig)


def keywords_module() -> str:
    """The module with the options of a session as keywords, for type checkers and completion.

    The types are those that a caller may pass: "4GB" for bytes, a mapping for nested options, and
    a list of names for sinks and triggers.
    """
    fields = ProfilerConfig.model_fields
    lines = []
    for name, member in _read(ProfilerConfig).members.items():
        if name in fields:
            kind = str(member.annotation).replace("'", '"')
            for pattern, given in PASSED.items():
                kind = re.sub(pattern, given, kind)
            lines.append(f"    {name}: {PASSED_AS.get(name, kind)}\n")
    return KEYWORDS_HEAD + "".join(lines)


def sink_or_trigger_file(name: str, target: str) -> str:
    """The config file of a built-in sink or trigger, whose class is `target`."""
    kind = _class(target)
    needed = getattr(kind.model_construct(), "needs", ())
    needs = [f"Needs {option}." for option in needed]
    head = _comment(WRITTEN_BY, _in_yaml(_first_line(kind)), *needs)
    return f"{head}{name}:\n  _target_: {target}\n{_option_lines(kind, '  ')}"


def cli_page() -> str:
    """The page of all commands; the text above the note is written by hand."""
    by_hand = (DOCS / "cli.md").read_text(encoding="utf-8").partition(NOTE)[0]
    parser = command._parser()
    commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    parts = [
        f"{by_hand}{NOTE}\n## All commands",
        _prose("`instrument COMMAND --help` prints the same text."),
        _table(
            ("command", "meaning"),
            [(f"[`{a.dest}`](#{a.dest})", _cell(a.help or "")) for a in commands._choices_actions],
        ),
    ]
    for name, each in commands.choices.items():
        arguments = [
            action for action in each._actions if not isinstance(action, argparse._HelpAction)
        ]
        rows = [(f"`{_usage(action)}`", _cell(_help(action))) for action in arguments]
        text = _prose(each.description or "")
        parts += [f"### {name}", text, _table(("argument", "meaning"), rows)]
    return "\n\n".join(parts) + "\n"


def tables_page() -> str:
    """The page of the tables of facts: the part written by hand, then the columns of both."""
    by_hand = (DOCS / "tables.md").read_text(encoding="utf-8").partition(NOTE)[0].rstrip()
    parts = [f"{by_hand}\n\n{NOTE}"]
    for name, columns in (("events", EVENTS), ("segments", SEGMENTS)):
        rows = [(f"`{column.name}`", _cell(column.doc)) for column in columns]
        parts += [f"## `{name}`", _table(("column", "meaning"), rows)]
    return "\n\n".join(parts) + "\n"


def try_page() -> str:
    """The page of `instrument try`: the part written by hand, then the changes."""
    by_hand = (DOCS / "try.md").read_text(encoding="utf-8").partition(NOTE)[0].rstrip()
    rows = [
        (f"`{each.name}{'=…' if each.values else ''}`", _cell(each.does), each.numbers,
         f"`{_cell(each.by_hand)}`")
        for each in CHANGES.values()
    ]  # fmt: skip
    header = ("change", "meaning", "may change in the results", "in the script")
    parts = [by_hand, NOTE, "## The changes", _table(header, rows)]
    return "\n\n".join(parts) + "\n"


def columns_page() -> str:
    """The page of the columns of all views of a capture."""
    parts = [
        f"{NOTE}\n# Columns",
        _prose(
            "Every view of a capture is a `Table`. The views that compare the ranks of a window "
            "are tables too. The end of a column's name is its unit: `_ns` nanoseconds, `_bytes` "
            "bytes, `flops` floating-point operations, `share` a fraction of a whole. An unknown "
            "cell is `None`, never 0. `instrument show --sort` and `--columns` take these names, "
            "and `--json` and `--csv` print them. The columns that the `parquet` sink writes, and "
            "`instrument sql` and `--where` read, are in [The two tables](tables.md)."
        ),
        _prose(
            "In the tables of `diff()`, columns that compare one quantity are one row: "
            "`before_` and `after_` are its values in a mean step, `change_` is their difference, "
            "`low_` and `high_` are the ends of its 90 % interval; None without three "
            "captures on each side."
        ),
    ]
    tables = {f"`capture.{name}`": view.schema for name, view in VIEWS.items()}
    tables |= {
        "`capture.whatif.profile()`": CAUSAL_PROFILE,
        "`capture.whatif.critical_path`": CRITICAL_PATH,
    }
    tables |= {f"`window.{name}` of ranks": columns for name, columns in SCHEMAS.items()}
    tables |= {"`instrument ls`": CAPTURES}
    tables |= {
        **{
            f"`diff().{'step.' if name == 'parts' else ''}{name}`": changes.SCHEMAS[name]
            for name in ("parts", "ranges", "operators", "kernels", "shapes", "counters")
        },
    }
    tables |= {"`session.timings.table()`": TIMINGS}
    helps = {f"`capture.{name}`": view.help for name, view in VIEWS.items()}
    for title, columns in tables.items():
        parts += [f"## {title}", *([_prose(helps[title])] if title in helps else [])]
        whole = next((each for each, all_ in tables.items() if {*columns} < {*all_}), None)
        if whole:
            left_out = [each.name for each in tables[whole] if each not in columns]
            parts.append(_prose(f"The columns of {whole} without {_listed(left_out)}."))
        else:
            parts.append(_table(("column", "meaning"), _column_rows(columns)))
    return "\n\n".join([*parts, *_coverage()]) + "\n"


def _column_rows(columns: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """A row for each column, and one for all columns that compare the same quantity."""
    docs = {column.name: column.doc for column in columns}
    quantities = {name.removeprefix("change_") for name in docs if name.startswith("change_")}
    for name, doc in docs.items():
        prefix, _, quantity = name.partition("_")
        if quantity not in quantities or prefix not in COMPARED:
            yield f"`{name}`", _cell(doc)
        elif prefix == COMPARED[0]:
            names = [each for each in (f"{it}_{quantity}" for it in COMPARED) if each in docs]
            yield f"`{'`, `'.join(names)}`", _cell(doc.removeprefix(MEAN_STEP))


def json_page() -> str:
    """The page of the keys of all JSON that commands print."""
    tables = {
        "diagnose": diagnosis.JSON_KEYS,
        "A finding": diagnosis.FINDING_KEYS,
        "A row of evidence": diagnosis.EVIDENCE_KEYS,
        "whatif": whatif.JSON_KEYS,
        "diff": diff.JSON_KEYS
        | {"conditions": "with `--fail-on`, the verdicts; if a side is a baseline, the only key"},
        "A verdict of `--fail-on`": limits.JSON_KEYS,
        "check": witness.JSON_KEYS,
        "A claim": witness.CLAIM_KEYS,
        "ab": ab.JSON_KEYS,
        "try": tries.JSON_KEYS,
        "A change of try": tries.CHANGE_KEYS,
        "ranks": ranks.JSON_KEYS
        | {
            name: f"the rows of [`window.{name}`](columns.md#window{name}-of-ranks)"
            for name in SCHEMAS
        },
    }
    parts = [
        f"{NOTE}\n# JSON",
        _prose(
            "`instrument COMMAND --json` prints one object. Times are integer nanoseconds, and "
            "`null` means unknown. The number `version` is the same for all commands. It grows "
            "when a key changes its meaning or is removed; new keys may be added at any time."
        ),
        _prose(
            "`instrument show` prints the `name` of the capture and, for each view, a list of rows "
            "with all [columns](columns.md); if data is missing, `incomplete` holds the rows of "
            "`capture.coverage` that say so. `instrument ls` prints the list `captures`, with the "
            "columns of [`instrument ls`](columns.md#instrument-ls)."
        ),
    ]
    for title, keys in tables.items():
        rows = [(f"`{key}`", _cell(text)) for key, text in keys.items()]
        parts += [f"## {title}", _table(("key", "meaning"), rows)]
    return "\n\n".join(parts) + "\n"


def _coverage() -> list[str]:
    """The rows of the coverage, and for each row the views that depend on it."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, view in VIEWS.items():
        if view.coverage:
            groups.setdefault(view.coverage, []).append(name)
    letters = dict(zip(ascii_uppercase, groups))
    legend = [f"- {letter}: {_listed(groups[rows])}" for letter, rows in letters.items()]
    depend = (
        (name, " ".join(letter for letter, rows in letters.items() if name in rows))
        for name in ROWS
    )
    rows = ((name, _cell(doc)) for name, doc in ROWS.items())
    return [
        "## Rows of `capture.coverage` { #rows }",
        _table(("row", "the share is"), rows),
        "## Coverage that views depend on { #coverage-of-views }",
        _prose(
            "If a row of `capture.coverage` is below 100 %, numbers of the views that depend on it "
            "may be too low or missing. These are groups of views:"
        ),
        "\n".join(legend),
        _table(("row", "groups of views"), depend),
    ]


def _listed(names: Iterable[str]) -> str:
    *most, last = (f"`{name}`" for name in names)
    return f"{', '.join(most)} and {last}" if most else last


def _preset_rows() -> Iterator[tuple[str, ...]]:
    """For each preset: its first comment, the options that differ from the defaults, its sinks."""
    schema = ProfilerConfig.model_json_schema()["properties"]
    for name in presets():
        given = preset(name)
        sinks = ", ".join(f"[`{sink}`](#{sink})" for sink in given.pop("sinks", {}))
        changed = {
            key: value for key, value in given.items() if not _is_default(value, schema[key])
        }
        text = (PROFILER / f"{name}.yaml").read_text(encoding="utf-8")
        yield (
            f"`{name}`",
            _cell(text.splitlines()[0].removeprefix("# ")),
            ", ".join(f"`{key}={_yaml(value)}`" for key, value in changed.items()),
            sinks,
        )


def _is_default(value: Any, schema: Mapping[str, Any]) -> bool:
    if "default" in schema:
        return bool(value == schema["default"])
    return not value or schema.get("$ref", "").endswith("ModulesConfig")


def _rows(model: type[BaseModel]) -> Iterator[Row]:
    schema, texts = model.model_json_schema()["properties"], _docstrings(model)
    for name, field in schema.items():
        default = model.model_fields[name].get_default(call_default_factory=True)
        shown = "" if isinstance(default, BaseModel) else _yaml(default)
        yield name, _kind(field), shown, texts.get(name, "")


def _docstrings(model: type[BaseModel]) -> dict[str, str]:
    """The docstring below each field of a class and of its base classes, as one line."""
    return {
        name: " ".join(member.docstring.value.split())
        for base in reversed(model.__mro__)
        if base.__module__.startswith("instrument.")
        for name, member in _read(base).members.items()
        if member.docstring
    }


def _option_lines(model: type[BaseModel], indent: str = "") -> str:
    """A line of YAML for each option: its name, its default, and the first sentence about it."""
    lines = ""
    for name, _, default, text in _rows(model):
        comment = _in_yaml(re.split(r"(?<=\.)\s", text)[0].removesuffix("."))
        option = f"{indent}{name}: {default}".rstrip()
        line = f"{option.ljust(COMMENTS_FROM - 2)}  # {comment}"
        lines += (
            f"{line}\n" if len(line) <= WIDTH else f"{_comment(comment, indent=indent)}{option}\n"
        )
        if not default:  # the option is a mapping with options of its own
            lines += _option_lines(model.model_fields[name].annotation, f"{indent}  ")
    return lines


def _comment(*paragraphs: str, indent: str = "") -> str:
    filled = (line for text in paragraphs for line in _fill(text, WIDTH - len(indent) - 2))
    return "".join(f"{indent}# {line}\n" for line in filled)


def _in_yaml(text: str) -> str:
    """A text in YAML's words: null for None, true for True, and no backticks."""
    words = {"None": "null", "True": "true", "False": "false"}
    return re.sub(r"\b(None|True|False)\b", lambda match: words[match[0]], text.replace("`", ""))


def _kind(schema: Mapping[str, Any]) -> str:
    """A type in words."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_kind, schema["anyOf"])))  # a path is a text too
    if "enum" in schema or "const" in schema:
        return " or ".join(f"`{each}`" for each in schema.get("enum", [schema.get("const")]))
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2].removesuffix("Config").lower()
        return f"[options](#options-of-{name})"
    if "pattern" in schema:  # only pydantic's ByteSize has a pattern
        return 'text such as `"4GB"`'
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    words = {
        "integer": "int",
        "number": "float",
        "string": "text",
        "boolean": "bool",
        "object": "mapping",
    }
    kind = words.get(schema.get("type", ""), schema.get("type", "anything"))
    minimum = schema.get("minimum", schema.get("ge"))
    if minimum is not None:
        return f"{kind} ≥ {minimum:g}"
    above = schema.get("exclusiveMinimum", schema.get("gt"))
    return kind if above is None else f"{kind} > {above:g}"


def _option(row: Row) -> str:
    name, kind, default, text = row
    default = f", default `{default}`" if default else ""
    return f"### `{name}`\n\n{kind}{default}\n\n{_prose(text)}"


def _option_table(rows: Any) -> str:
    cells = ((f"`{name}`", kind, f"`{default}`", _cell(text)) for name, kind, default, text in rows)
    return _table(("option", "type", "default", "meaning"), cells)


def _table(head: tuple[str, ...], rows: Any) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _read(kind: type) -> griffe.Object | griffe.Alias:
    """A class parsed from its source, with the docstrings of its fields."""
    file = Path(sys.modules[kind.__module__].__file__ or "")
    return griffe.visit(kind.__module__, file, file.read_text(encoding="utf-8"))[kind.__name__]


def _class(target: str) -> type[BaseModel]:
    module, _, name = target.rpartition(".")
    return getattr(import_module(module), name)


def _first_line(kind: type) -> str:
    return (kind.__doc__ or "").split("\n\n")[0]


def _summary(kind: type) -> str:
    package = kind.__module__.rpartition(".")[0]
    home = package if hasattr(import_module(package), kind.__name__) else kind.__module__
    link = f"[`{kind.__name__}`](api.md#{home}.{kind.__name__})"
    return f"{_prose(_first_line(kind))} See {link}."


def _usage(action: argparse.Action) -> str:
    """How an argument is written, such as `--sort KEY`."""
    choices = "{" + ", ".join(map(str, action.choices)) + "}" if action.choices else ""
    value = action.metavar or choices
    names = ", ".join(action.option_strings) or str(value)
    if action.nargs == 0 or not action.option_strings:
        return names
    value = value or action.dest.upper()
    return f"{names} [{value}]" if action.nargs == "?" else f"{names} {value}"


def _help(action: argparse.Action) -> str:
    return (action.help or "") % vars(action)


def _yaml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_yaml, value))}]"
    return value if isinstance(value, str) else json.dumps(value)


def _prose(text: str) -> str:
    """Paragraphs that begin with a capital and end with a full stop, in lines of 100 characters."""
    text = text.strip()
    text = text if text.startswith("`") else text[:1].upper() + text[1:]
    text = text if text.endswith((".", ":")) else f"{text}."
    return "\n\n".join("\n".join(_fill(each)) for each in text.split("\n\n"))


def _fill(text: str, width: int = WIDTH) -> list[str]:
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def files() -> dict[Path, Callable[[], str]]:
    """Each file that is written, and the function that returns its text."""
    pages = {
        "options.md": options_page,
        "columns.md": columns_page,
        "tables.md": tables_page,
        "try.md": try_page,
        "cli.md": cli_page,
        "json.md": json_page,
    }
    found: dict[Path, Callable[[], str]] = {DOCS / name: page for name, page in pages.items()}
    found[PROFILER / f"{BASE}.yaml"] = base_file
    found[ROOT / "instrument" / "record" / "config" / "keywords.py"] = keywords_module
    for draw in (concepts, schedule, blocks, states):
        for suffix, colours in (("", LIGHT), ("-dark", DARK)):
            found[DOCS / "assets" / f"{draw.__name__}{suffix}.svg"] = partial(draw, colours)
    for group in ("sinks", "on_capture", "triggers"):
        for name, target in shipped(group).items():
            text = partial(sink_or_trigger_file, name, target)
            found[PROFILER / group / f"{name}.yaml"] = text
    return found


if __name__ == "__main__":
    for file, text in files().items():
        file.write_text(text(), encoding="utf-8")
        print(file)

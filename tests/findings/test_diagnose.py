"""The diagnosis of one capture or of a run, and its text, JSON and Markdown."""

from __future__ import annotations

import ast
import html
import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from builders import (
    Event,
    annotation,
    capture,
    in_steps,
    is_harmless,
    launched,
    span,
    step,
    write_capture,
    write_trace,
)
from golden import Golden
from markdown_it import MarkdownIt
from page_parts import words

from instrument import Capture, diff
from instrument.base import storage
from instrument.base.errors import CaptureError, ConfigError, TraceError
from instrument.base.printable import printable
from instrument.cli.command import main
from instrument.read.advise.check import Check, NotRecorded, Problem, RanksCheck
from instrument.read.advise.diagnose import CHECKS, diagnose
from instrument.read.advise.diagnosis import (
    EVIDENCE_KEYS,
    FINDING_KEYS,
    JSON_KEYS,
    Diagnosis,
    as_json,
    as_markdown,
    as_text,
)
from instrument.read.advise.finding import Evidence, Finding
from instrument.read.advise.settings import DEFAULT, read_settings
from instrument.read.advise.verdict import first_lines, verdict
from instrument.read.compare.side import load
from instrument.read.ranks import rank_summary
from instrument.read.ranks import run as run_module
from instrument.read.views import layout

HOSTILE = "a\x1b[2Jb\nc`|<img src=x>[l](https://evil.example) @somebody #12 *x* www.evil.example"


def steps(mean_us: int = 1000) -> list[Event]:
    """Three steps, half of each in the range `forward`."""
    half = mean_us // 2
    return in_steps(3, mean_us, annotation("forward", 0, half), span("aten::mm", 0, half))


def recorded(folder: Path, window: int = 3, rank: int = 0, mean_us: int = 1000) -> Capture:
    name = f"steps_{window}_rank{rank}"
    about = {"first_step": window, "last_step": window + 2, "steps": 3}
    return write_capture(folder, steps(mean_us), name, window=about, rank=rank, world_size=2)


def scaled(by: float) -> Callable[[Any], Any]:
    return lambda whatif: whatif.scale(range="forward", by=by)


def scaled_operator(name: str) -> Callable[[Any], Any]:
    return lambda whatif: whatif.scale(operator=name, by=0.5)


def problem(**changed: Any) -> Problem:
    """A problem whose saving is half of the range `forward`."""
    given = {
        "what": "Half of the step is slow",
        "change": "faster()",
        "verify": "instrument show CAPTURE",
        "edit": scaled(0.5),
        "place": ("forward", None),
        "evidence": (Evidence("aten::mm", 3, 1_500_000, 0, 500_000, "large"),),
    }
    return Problem(**{**given, **changed})


def check(*changes: dict[str, Any], code: str = "made-up") -> Check:
    def find(capture: Any) -> Iterator[Problem]:
        for changed in changes:
            yield problem(**changed)

    return Check(code, find)


def diagnosed(captures: Iterable[Capture], checks: Iterable[Check]) -> Diagnosis:
    """What some checks say of captures, without a comparison of the ranks."""
    return diagnose(captures, checks, ())


class Unsimulated:
    """Stands for a scenario whose simulation fails only when its result is asked for."""

    @property
    def saving_ns(self) -> float:
        return 1 / 0


def failing(error: Exception) -> Check:
    def find(capture: Any) -> Iterator[Problem]:
        raise error
        yield

    return Check("cannot", find)


def test_a_check_can_be_one_row_with_a_condition(tmp_path: Path) -> None:
    sorts = Check(
        "sorts",
        "name = 'aten::sort' and counted",
        title="{calls} calls a {step} sort for {share} of it",
        least_share=0.1,
        factor=0,
    )
    events = [step(0, 0, 100), step(1, 100, 1000), step(2, 1100, 1000)]
    events += [span("aten::sort", at, 60) for at in (0, 200, 300, 1200, 1300)]
    found = diagnosed([capture(tmp_path, events)], [sorts])
    (finding,) = found.findings
    assert finding.title == "2 calls a step sort for 12 % of it"
    assert finding.saving is not None
    assert finding.saving.saving_ns == 120_000
    assert [(row.name, row.calls) for row in finding.evidence] == [("aten::sort", 4)]
    wrong = diagnosed([capture(tmp_path, events)], [sorts._replace(find="names = 'aten::sort'")])
    assert "did you mean name?" in wrong.not_checked[0]


def by_capture(of: Callable[[Any], list[dict[str, Any]]], **more: Any) -> Check:
    """The problems that a function gives for each capture."""
    return Check("made-up", lambda capture: (problem(**each) for each in of(capture)), **more)


def windows(folder: Path, *first_steps: int) -> list[Capture]:
    return [recorded(folder, window) for window in first_steps]


def unsaved(what: str, place: str = "forward", **changed: Any) -> dict[str, Any]:
    return {"what": what, "edit": None, "place": (place, None), **changed}


def saving(what: str, by: float = 0.5, place: str = "forward", **changed: Any) -> dict[str, Any]:
    return {"what": what, "edit": scaled(by), "place": (place, None), **changed}


def refuse(whatif: Any) -> Any:
    raise CaptureError("The range launches nothing.")


def no_generator(capture: Any) -> Iterator[Problem]:
    raise ConfigError("No range matches 'decoder'.")


def of_ranks(capture: Capture) -> list[dict[str, Any]]:
    """Another part of the range in each capture, and on rank 1 another problem."""
    of = capture.about.window.first_step, capture.about.rank
    left = {(3, 0): 0.5, (3, 1): 0.2, (6, 0): 0.4}[of]
    also = [saving("Also slow", place="other")] if capture.about.rank == 1 else []
    return [saving(f"Slow in {capture.name}: 60 %", left, share=1 - left), *also]


def in_window(number: int, *inside: dict[str, Any], always: Sequence[dict[str, Any]] = ()) -> Check:
    """Some problems of one window, and others of each."""
    return by_capture(
        lambda capture: [*(inside if capture.about.window.first_step == number else ()), *always]
    )


def no_shapes(code: str, reason: str = "no shapes") -> Check:
    return failing(NotRecorded(reason, "record shapes"))._replace(code=code)


GROWS = unsaved("grows", "b", ends_run=True), unsaved("grew once", "c", ends_run=True)
CASES: dict[str, Callable[[Path], Diagnosis]] = {
    "sorted by saving or share": lambda folder: diagnosed(
        [recorded(folder)],
        [
            check(
                *(unsaved("unknown", "a"), unsaved("share", "d", share=0.3)),
                *(saving("small", place="b"), saving("large", 0.1, "c")),
            ),
            check(code="other"),
        ],
    ),
    "half of a share counts if the saving is unknown": lambda folder: diagnosed(
        [recorded(folder)],
        [
            check(
                *(unsaved("share of 50 %", "a", share=0.5), saving("saves 25 %", place="b")),
                unsaved("share of 51 %", "c", share=0.51),
            )
        ],
    ),
    "what ends the run comes first, and caveats last": lambda folder: diagnosed(
        windows(folder, 3, 6, 9),
        [
            check(unsaved("busy", share=0.9), code="doubt")._replace(is_caveat=True),
            in_window(6, GROWS[1], always=[saving("slow", 0.1, "a"), GROWS[0]]),
        ],
    ),
    "what could not be checked": lambda folder: diagnosed(
        windows(folder, 3, 6), [no_shapes("cannot"), failing(CaptureError("No trace."))]
    ),
    "an error of a check is said, and the others go on": lambda folder: diagnosed(
        [recorded(folder)],
        [
            failing(TypeError("'int' object is not iterable")),
            Check("none", no_generator),
            check({"what": "lost", "edit": lambda _: Unsimulated()}, code="unsimulated"),
            check({}),
        ],
    ),
    "a simulation that fails is said, and is no finding": lambda folder: diagnosed(
        [recorded(folder)],
        [
            check({"edit": refuse, "what": "lost"}, {"what": "kept"}, code="half"),
            check({"edit": scaled_operator("decoder")}, code="nothing-to-edit"),
            check(saving("too little", 0.99), code="too-little"),
            check(unsaved("unknown by design"), code="unknown"),
        ],
    ),
    "an error without a text": lambda folder: diagnosed([recorded(folder)], [failing(ZeroDivisionError())]),
    "an error with a long text": lambda folder: diagnosed([recorded(folder)], [failing(KeyError("x" * 500))]),
    "equal findings of windows and ranks are one": lambda folder: diagnosed(
        [recorded(folder, 3, 0, 1000), recorded(folder, 3, 1, 3000), recorded(folder, 6, 0, 2000)],
        [by_capture(of_ranks)],
    ),
    # Of two shares, the smaller.
    "without savings the median share counts": lambda folder: diagnosed(
        [recorded(folder, 3, 3), recorded(folder, 6, 6)],
        [by_capture(lambda each: [unsaved(each.name, share=0.3 if each.about.rank == 3 else 0.1)])],
    ),
    "two findings of a capture in one range stay two": lambda folder: diagnosed(
        [recorded(folder), recorded(folder, rank=1)], [check({"what": "one"}, {"what": "two"})]
    ),
    "the same steps on the same rank are another window": lambda folder: diagnosed(
        [recorded(folder / "a"), recorded(folder / "b")], [check({})]
    ),
    "different problems of a check stay apart": lambda folder: diagnosed(
        windows(folder, 3, 6),
        [
            in_window(
                3,
                saving("5.0 % are casts", share=0.05, variant="casts"),
                always=[saving("30 % are copies", share=0.3, variant="copies")],
            )
        ],
    ),
    "a problem of few windows comes after those of most": lambda folder: diagnosed(
        windows(folder, 3, 6, 9),
        [in_window(6, unsaved("No CPU", share=0.9), always=[unsaved("Slow", "loop", share=0.1)])],
    ),
    "notes on some of the captures": lambda folder: diagnosed(
        [recorded(folder), Capture.load(write_trace(folder, [annotation("forward", 0, 10)]))], [check({})]
    ),
    "two checks with the same remedy": lambda folder: diagnosed(
        windows(folder, 3, 6), [no_shapes("one"), no_shapes("two")]
    ),
    "the same remedy for different reasons": lambda folder: diagnosed(
        windows(folder, 3, 6), [no_shapes("one"), no_shapes("two"), no_shapes("three", "no types")]
    ),
    "an error names its check": lambda folder: diagnosed(
        windows(folder, 3, 6), [failing(KeyError("rank"))._replace(code=code) for code in ("one", "two")]
    ),
}  # fmt: skip


def told(found: Diagnosis) -> Iterator[str]:
    """What a diagnosis holds beside its evidence, a line each."""
    yield f"{', '.join(found.captures)}: a step of {found.step_ns} ns"
    for each in found.findings:
        saves = None if each.saving is None else (each.saving.saving_ns, each.saving.baseline_ns)
        caveat = ", a caveat" if each.is_caveat else ""
        yield f"{each.title}: share {each.share}, saves {saves}, in {each.capture}{caveat}"
    for name in ("passed", "not_checked", "notes"):
        yield from (f"{name}: {each}" for each in getattr(found, name))


def test_diagnoses_by_hand(tmp_path: Path, golden: Golden) -> None:
    lines = []
    for number, (name, make) in enumerate(CASES.items()):
        lines += [f"---- {name}", *told(make(tmp_path / str(number)))]
    golden("diagnoses.txt", "\n".join(lines))


@pytest.mark.parametrize("error", [TraceError("Cut off."), MemoryError()], ids=repr)
def test_a_trace_that_cannot_be_read_ends_the_diagnosis(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(type(error)):
        diagnosed([recorded(tmp_path)], [failing(error)])


def test_a_check_that_ran_on_some_captures_only_says_on_how_many_it_did_not(tmp_path) -> None:
    answers = iter([True, False])

    def find(capture: Any) -> Iterator[Problem]:
        if next(answers):
            raise NotRecorded("no stacks", "record stacks")
        yield from ()

    found = diagnosed([recorded(tmp_path, 3), recorded(tmp_path, 6)], [Check("half", find)])
    assert found.not_checked == ("To check half, record stacks (no stacks). (1 of 2 captures)",)
    assert found.passed == ()


def test_the_ranks_of_traces_are_read_from_their_names(tmp_path: Path) -> None:
    captures = []
    for rank in range(2):
        path = write_trace(tmp_path, steps())
        captures.append(Capture.load(path.rename(tmp_path / f"trace_rank{rank}.json")))
    (found,) = diagnosed(captures, [check({})]).findings
    assert found.title == "Half of the step is slow (on all 2 ranks)"


def test_without_a_simulation_savings_are_unknown(tmp_path, monkeypatch) -> None:
    """No edit is made, and the finding has no saving."""

    def refuse(capture: Any) -> Any:
        raise CaptureError("It cannot be simulated.")

    monkeypatch.setattr("instrument.read.advise.diagnose.scenario", refuse)
    capture = Capture.load(write_trace(tmp_path, [step(0, 0, 100)]))
    found = diagnosed([capture], [check({"edit": lambda whatif: 1 / 0})])
    assert found.step_ns is None
    assert found.notes == ("No saving is known: It cannot be simulated.",)
    assert "saves   not known" in as_text(found)


def test_a_simulation_that_fails_costs_the_savings_alone(tmp_path, monkeypatch) -> None:
    def fail(capture: Any) -> Any:
        raise IndexError("index 7 is out of bounds")

    monkeypatch.setattr("instrument.read.advise.diagnose.scenario", fail)
    found = recorded(tmp_path).diagnose()
    assert found.notes == (
        "No saving is known: The simulation failed on this capture (IndexError: index 7 is out of "
        "bounds): please report it.",
    )
    assert found.step_ns is None
    assert "IndexError" in as_text(found)
    assert "IndexError" in as_markdown(found)


def test_nothing_to_diagnose(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="no trace to diagnose"):
        diagnose([])


def test_codes_functions_and_rows_have_the_same_names() -> None:
    assert len({each.code for each in CHECKS}) == len(CHECKS)
    for each in CHECKS:
        name = each.code.replace("-", "_")
        assert each.find.__name__ == name
        assert getattr(import_module(each.find.__module__), name.upper()) == each


def test_no_check_imports_another() -> None:
    modules = {each.find.__module__ for each in CHECKS}
    for module in modules:
        tree = ast.parse(Path(import_module(module).__file__ or "").read_text())
        imported = {each.module for each in ast.walk(tree) if isinstance(each, ast.ImportFrom)}
        assert not imported & modules, module


def test_text_markdown_and_json(tmp_path: Path, golden: Golden) -> None:
    found = diagnosed(
        [recorded(tmp_path)], [check({"place": ("forward", "train.py:3")}), check(code="other")]
    )
    golden("diagnosis.txt", as_text(found))
    golden("diagnosis.md", as_markdown(found))
    golden("diagnosis_first.txt", layout.plain(first_lines(found)))
    golden("diagnosis.json", as_json(found))
    assert (str(found), found._repr_markdown_()) == (as_text(found), as_markdown(found))
    assert repr(found) == "<Diagnosis: 1 finding, first: Half of the step is slow>"
    assert repr(replace(found, findings=())) == "<Diagnosis: 0 findings>"


def test_json_has_the_documented_keys(tmp_path: Path) -> None:
    content = json.loads(as_json(diagnosed([recorded(tmp_path)], [check({})])))
    (only,) = content["findings"]
    assert [*content] == ["version", *JSON_KEYS]
    assert [*only] == [*FINDING_KEYS]
    assert [*only["evidence"][0]] == [*EVIDENCE_KEYS]


def hostile(capture: Any) -> Iterator[Problem]:
    yield problem(
        what=f"{HOSTILE} is slow",
        place=(HOSTILE, HOSTILE),
        evidence=(Evidence(HOSTILE, 3, 1_500_000, detail=HOSTILE),),
        change=HOSTILE,
    )


@pytest.mark.parametrize("write", [as_text, as_markdown, lambda d: layout.plain(first_lines(d))])
def test_names_of_a_stranger_cannot_harm_a_terminal(tmp_path, write) -> None:
    text = write(diagnosed([recorded(tmp_path)], [Check("made-up", hostile)]))
    assert is_harmless(text.replace("\u200b", ""))
    assert "\\x1b" in text


NAMES = [
    "a\x1b[2J\n# b | <img src=x>",
    "$x^2$ costs $5",
    "$`x^2`$",
    "a$",
    "$$\\frac{1}{2}$$",
    ":+1: a:b:c :smile:",
    "@somebody @some-org/team user@evil.example mailto:a@evil.example",
    "#12 own/er#12 GH-12 gh-12",
    "http://evil.example https://evil.example ftp://evil.example",
    "<https://evil.example>",
    "www.evil.example WWW.evil.example _www.evil.example",
    "a5c3785ed8d6a35868bc169f07e40e889087fd2e a5c3785",
    "[l](//evil.example) ![i](//evil.example) [^1] [l][1]",
    "*x* **x** _x_ __x__ ~~x~~ <b>x</b> &lt; &#64;x \\* \\",
    "`a` ``b`` ```",
    "a\u200b@somebody \u202e",
]
# What GitHub replaces in the texts of a page, outside of code.
REPLACED = re.compile(
    r"@\w|#\d|GH-\d|(https?|ftp)://|www\.\w|:[\w+-]+:|\b[0-9a-f]{7,40}\b", re.IGNORECASE
)


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_names_of_a_stranger_are_shown_as_they_are(tmp_path: Path, name: str) -> None:
    found = diagnosed([recorded(tmp_path)], [check({"what": name, "place": (name, None)})])
    text = as_markdown(replace(found, not_checked=(name,)))
    page = MarkdownIt().enable(["strikethrough", "table"]).render(text)
    verdict, title = re.findall(r"<strong>(.*)</strong>", page)
    (unknown,) = re.findall(r"<p>Not checked: (.*)</p>", page)
    (in_code,) = re.findall(r"<code>range (.*)</code>", page)
    for part in (title, unknown, in_code):
        assert set(re.findall(r"<[^>]+>", part)) <= {"<span>", "</span>"}, part
        assert plain(part) == printable(name)
    assert "$" not in verdict.replace("<span>$</span>", "")
    for part in (title, unknown):
        assert "$" not in part.replace("<span>$</span>", "")
        assert not REPLACED.search(html.unescape(part))
    assert "`" in name or not re.search(r"\$`|`\$", text), "a formula begins or ends"


def plain(part: str) -> str:
    """The text that a reader of a piece of HTML sees."""
    return html.unescape(re.sub(r"<[^>]+>", "", part)).replace("\u200b", "")


def test_markdown_stays_below_two_thousand_tokens(tmp_path: Path) -> None:
    long = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor>" * 9
    evidence = tuple(Evidence(f"{long}{k}", 10**6, 10**9, detail=long) for k in range(9))
    many = [
        {
            "what": f"{k} {long}",
            "place": (f"{k}/{long}", None),
            "evidence": evidence,
            "change": long,
        }
        for k in range(30)
    ]
    found = diagnosed([recorded(tmp_path)], [check(*many)])
    text = as_markdown(found)
    assert len(text.encode()) <= 5_000
    assert "1. **" in text
    assert "`instrument diagnose --json` lists all" in text
    short = as_markdown(diagnosed([recorded(tmp_path / "b")], [check({})]))
    assert "lists all" not in short
    assert "`aten::mm`: 3 calls, 1.500 ms, `large`" in short


def test_markdown_lists_the_sentences_that_fit() -> None:
    long, bulky = "a_" * 140 + ".", "\x00" * 290
    sentences = (f"First {long}", bulky, f"Second {long}", "Short.", f"Third {long}")
    last = as_markdown(Diagnosis(("a",), (), (), not_checked=sentences)).split("\n\n")[-1]
    assert last.startswith(r"Not checked: First a\_a\_")
    assert last.endswith("Short. … and 2 more.")
    assert "Second" in last
    assert len(last.encode()) < 950
    none_fits = as_markdown(Diagnosis(("a",), (), (), not_checked=(bulky,)))
    assert none_fits.endswith("\n\nNot checked: … and 1 more.")


def test_markdown_says_how_sure_the_savings_are(tmp_path: Path) -> None:
    found = diagnosed([recorded(tmp_path)], [check({})])
    noted = replace(found, notes=("No saving is known: [l](x).",))
    assert as_markdown(noted).endswith(r"Accuracy of the savings: No saving is known: \[l\](x).")
    many = replace(noted, findings=found.findings * 50, notes=("Long note. " * 20,) * 20)
    assert len(as_markdown(many).encode()) <= 5_000
    assert "1. **" in as_markdown(many)


def test_text_fits_into_eighty_columns(tmp_path: Path) -> None:
    long = {
        "what": "A long title that says much of what is slow and why it is so slow " * 3,
        "place": ("model/" + "/".join(f"layer{k}" for k in range(40)), None),
        "evidence": (Evidence("x" * 300, 10**6, 10**12, detail="y " * 99),),
    }
    text = as_text(diagnosed([recorded(tmp_path)], [check(long, {"place": ("other", None)})]))
    assert max(map(len, text.split("\n"))) <= 80


def test_a_sentence_that_verifies_is_wrapped_and_a_command_is_one_line(tmp_path: Path) -> None:
    sentence, command = "Record again. " * 9, "instrument show " + "CAPTURE" * 14
    changes = [{"verify": sentence}, {"what": "other", "verify": command}]
    lines = as_text(diagnosed([recorded(tmp_path)], [check(*changes)])).splitlines()
    assert f"   verify  {command}" in lines
    assert max(len(line) for line in lines if command not in line) <= 80


def test_the_step_after_a_change_is_the_step_now_minus_the_saving(tmp_path: Path) -> None:
    lengths, slow_us = (1000, 900, 1000, 1500), (0, 0, 300, 1500)
    begins = [sum(lengths[:k]) for k in range(4)]
    events = [step(k, begin, lengths[k]) for k, begin in enumerate(begins)]
    events += [annotation("forward", begins[k], slow_us[k]) for k in (2, 3)]
    found = diagnosed([write_capture(tmp_path, events)], [check({"evidence": ()})])
    assert "A step takes 1.133 ms." in as_text(found)
    saves = "300.0 µs of a step (26 %): a step would take 833.3 µs"
    for text in (" ".join(as_text(found).split()), plain(as_markdown(found))):
        assert saves in text
    content = json.loads(as_json(found))
    (row,) = content["findings"]
    assert content["step_ns"] - row["saving_ns"] == row["step_ns"] == 833_333


def test_evidence_in_another_capture_has_no_time_in_this_one(tmp_path: Path) -> None:
    first, second = recorded(tmp_path / "a"), recorded(tmp_path / "b", rank=1)
    (found,) = diagnosed([first, second], [check({})]).findings
    assert found.capture == first.name != second.name
    assert found.spans_in(first.name) == [(0, 500_000)]
    assert found.spans_in(second.name) == [None]


def test_captures_of_one_name_have_no_spans(tmp_path: Path) -> None:
    captures = []
    for folder in ("a", "b"):
        captures.append(Capture.load(write_trace(tmp_path / folder, steps())))
    (found,) = diagnosed(captures, [check({})]).findings
    assert found.spans_in(captures[0].name) == [None]


def test_one_capture_need_not_be_in_a_list(tmp_path: Path) -> None:
    capture = recorded(tmp_path)
    assert str(diagnose(capture, [check({})])) == str(diagnose([capture], [check({})]))


def test_what_has_passed_is_a_line_of_codes() -> None:
    found = Diagnosis(("a",), (), passed=("loader-wait", "blocking-copies"), not_checked=())
    line = "Passed, or costs too little to matter: loader-wait, blocking-copies"
    assert as_text(found).split("\n\n")[2:] == [line]
    assert as_markdown(found).split("\n\n")[3:] == [line]
    assert json.loads(as_json(found))["passed"] == ["loader-wait", "blocking-copies"]
    wrapped = as_text(replace(found, passed=found.passed * 9)).split("\n")[4:]
    assert max(map(len, wrapped)) <= 80
    assert {line[:3].count(" ") for line in wrapped[1:]} == {2}


def test_the_command_of_a_finding_can_be_pasted(tmp_path, capsys) -> None:
    """It names the capture with the largest finding, and no line break cuts it."""
    folder = tmp_path / f"my run's $HOME {'x' * 80}"

    def find(capture: Capture) -> Iterator[Problem]:
        yield problem(verify="--ops  # it's gone")

    captures = [recorded(folder, 3, 0), recorded(folder, 3, 1, 2000), recorded(folder, 6, 0)]
    text = as_text(diagnosed(captures, [Check("made-up", find)]))
    (line,) = (line for line in text.split("\n") if line.startswith("   verify  "))
    command = shlex.split(line.removeprefix("   verify  "), comments=True)
    assert command == ["instrument", "show", str(captures[1].folder), "--ops"]
    assert main(command[1:]) == 0
    assert "aten::mm" in capsys.readouterr().out


def test_the_command_reads_all_captures_of_a_folder(tmp_path, capsys) -> None:
    recorded(tmp_path, 3)
    recorded(tmp_path, 6)
    (tmp_path / "steps_6_rank0" / "trace.json.gz").write_bytes(b"no trace")
    assert main(["diagnose", str(tmp_path), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["captures"] == ["steps_3_rank0"]
    assert err.startswith("Left out: ")
    assert err.count("\n") == 1
    assert main(["diagnose", str(tmp_path)]) == 0
    assert " synchronising-calls," in capsys.readouterr().out
    assert main(["diagnose", str(tmp_path), "--markdown"]) == 0
    assert capsys.readouterr().out.startswith("## Diagnosis of `steps_3_rank0`")


NOT_SEEN = (
    "Without device work, these problems do not occur or cannot be seen: synchronising-calls, "
    "one-time-costs, launch-bound, device-idle, blocking-copies, slow-links, tensor-cores, allocator-churn."
)


def test_checks_that_need_device_work_do_not_pass_without_it(tmp_path: Path) -> None:
    found = diagnosed([recorded(tmp_path)], CHECKS)
    assert found.not_checked[0] == NOT_SEEN
    assert not {code for code in found.passed if code in NOT_SEEN}
    assert "loader-wait" in found.passed
    text = " ".join(as_text(found).split())
    assert f"Not checked: - {NOT_SEEN}" in text
    assert text.index("Passed, or") < text.index(NOT_SEEN)
    assert f"Not checked: {NOT_SEEN}" in plain(as_markdown(found))


def test_checks_that_need_device_work_pass_with_it(tmp_path: Path) -> None:
    worked = write_capture(tmp_path, [*steps(), *launched("sgemm", 10, 20, 30, 1)])
    found = diagnosed([worked], CHECKS)
    assert "launch-bound" in found.passed
    assert not [each for each in found.not_checked if each.startswith("Without device work")]


def test_the_saving_names_the_phase_of_its_step_if_phases_differ(tmp_path: Path) -> None:
    captures = [
        write_capture(tmp_path, steps(mean_us), phase, window={"phase": phase, "first_step": 0})
        for phase, mean_us in (("train", 1000), ("validation", 40))
    ]

    def find(capture: Any) -> Iterator[Problem]:
        if capture is captures[1]:
            yield problem()

    found = diagnosed(captures, [Check("made-up", find), check({"place": ("other", None)})])
    assert found.step_ns == 1_000_000
    assert [each.title for each in found.findings] == [
        f"Half of the {phase} step is slow (in 1 of 1 {phase} window)"
        for phase in ("train", "validation", "validation")
    ]
    assert verdict(found).startswith("A train step takes 1.000 ms (median of the captures). ")
    saves = "10.00 µs of a validation step of 40.00 µs (25 %): a step would take 30.00 µs"
    others = "250.0 µs of a train step of 1.000 ms (25 %): a step would take 750.0 µs"
    text = " ".join(as_text(found).split())
    for expected in (saves, others):
        assert f"saves {expected}" in text
        assert f"Saves {expected}" in plain(as_markdown(found))
    alone = diagnosed(captures[1:], [check({})])
    assert "10.00 µs of a step (25 %)" in as_text(alone)


def test_the_saving_names_its_step_if_the_heading_has_another(tmp_path: Path) -> None:
    captures = [recorded(tmp_path, 3, 0, 1000), recorded(tmp_path, 3, 1, 2000)]

    def find(capture: Any) -> Iterator[Problem]:
        if capture is captures[1]:
            yield problem()

    found = diagnosed(captures, [Check("made-up", find)])
    text = " ".join(as_text(found).split())
    assert (
        "A step takes 1.000 ms (median of the captures, which differ: 1.000 ms to 2.000 ms)."
        in text
    )
    of = f"2.000 ms in {captures[1].name}"
    saves = f"500.0 µs of a step of {of} (25 %): a step would take 1.500 ms"
    assert f"would take 1.500 ms instead of {of} (25 % less)." in verdict(found)
    assert f"saves {saves}" in text
    assert f"Saves {saves}" in plain(as_markdown(found)).replace("\\", "")


def test_bounds_that_look_equal_are_not_printed(tmp_path: Path) -> None:
    def edited(whatif: Any) -> Any:
        saving = scaled(0.5)(whatif)
        saving.__dict__["_savings"] = [250_000, 250_000 + more_ns]
        return saving

    def find(capture: Any) -> Iterator[Problem]:
        yield problem(edit=edited)

    for more_ns, bounds in ((0, ""), (0.4, ""), (200, ", between 250.0 µs and 250.2 µs")):
        text = as_text(diagnosed([recorded(tmp_path / str(more_ns))], [Check("made-up", find)]))
        assert f" of a step (25 %){bounds}: a step would" in " ".join(text.split())


def two_runs(folder: Path) -> dict[str, Capture]:
    """A run on two ranks, then a faster run; the ranks of a run have different ids."""
    found = {}
    for run, hour, events in (("a", 3, steps()), ("b", 4, in_steps(3, 500))):
        for rank in (0, 1):
            name = f"steps_3_rank{rank}{'-2' if run == 'b' else ''}"
            about = {"run": f"{run}{rank}", "pid": 10 * hour + rank}
            about["started_at"] = f"2026-01-02T0{hour}:00:0{rank}+00:00"
            given = {"rank": rank, "world_size": 2, **about}
            found[name] = write_capture(folder, events, name, **given)
    return found


LEFT_OUT = (
    "Only the newest run counts; 2 captures of older runs are left out: steps_3_rank0, "
    "steps_3_rank1."
)


def test_only_the_newest_run_is_diagnosed(tmp_path: Path) -> None:
    captures = two_runs(tmp_path)
    found = diagnosed(captures.values(), CHECKS)
    assert found.captures == ("steps_3_rank0-2", "steps_3_rank1-2")
    assert found.step_ns == 500_000
    assert found.not_checked[0] == LEFT_OUT
    assert diagnosed([captures["steps_3_rank0"]], CHECKS).captures == ("steps_3_rank0",)


def test_left_out_captures_of_one_name_are_named_by_their_paths(tmp_path, capsys) -> None:
    for run, name in (("a", "c1"), ("b", "c2"), ("c", "c2")):
        about = {"run": run, "pid": ord(run)}
        about["started_at"] = f"2026-01-02T0{ord(run) - 96}:00:00+00:00"
        write_capture(tmp_path / run, steps(), name, **about)
    left_out = (
        "Only the newest run counts; 2 captures of older runs are left out: "
        f"c1, {tmp_path / 'b' / 'c2'}."
    )
    captures = [Capture.load(folder.parent) for folder in tmp_path.glob("*/*/capture.json")]
    captures.sort(key=lambda capture: str(capture.folder))
    assert diagnosed(captures, []).not_checked[0] == left_out
    assert main(["diagnose", str(tmp_path)]) == 0
    assert capsys.readouterr().err == f"{left_out}\n"
    side = load(tmp_path)
    assert side.notes == [f"{tmp_path}: {left_out}"]
    assert str(tmp_path / "b" / "c2") in side.private, "a redacted page must hide it"


def test_two_sessions_of_one_process_are_one_run(tmp_path: Path) -> None:
    captures = [
        write_capture(
            tmp_path,
            steps(),
            f"c{k}",
            run=f"r{k}",
            pid=7,
            started_at=f"2026-01-0{k}T00:00:00+00:00",
        )
        for k in (1, 2)
    ]
    assert diagnosed(captures, []).captures == ("c1", "c2")


def test_the_ranks_of_an_older_run_with_more_ranks_are_left_out(tmp_path: Path) -> None:
    captures = list(two_runs(tmp_path).values())[:2]
    about = {"run": "n", "pid": 9, "started_at": "2026-01-02T09:00:00+00:00", "world_size": 1}
    captures.append(write_capture(tmp_path, steps(), "newest", rank=0, **about))
    assert diagnosed(captures, []).captures == ("newest",)


def test_captures_without_the_id_of_their_run_are_diagnosed_together(tmp_path: Path) -> None:
    dated = [{"started_at": f"2026-01-0{day}T00:00:00+00:00"} for day in (1, 2)]
    captures = [write_capture(tmp_path, steps(), f"c{k}", **each) for k, each in enumerate(dated)]
    captures.append(write_capture(tmp_path, steps(), "c2", run="r", pid=None, started_at=None))
    captures.append(write_capture(tmp_path, steps(), "c3", run="s", pid=None))
    assert diagnosed(captures, []).captures == ("c0", "c1", "c2", "c3")


@pytest.mark.parametrize("command", ["diagnose", "report"])
def test_the_command_names_the_captures_of_older_runs(tmp_path, capsys, command) -> None:
    two_runs(tmp_path)
    assert main([command, str(tmp_path), "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == f"{LEFT_OUT}\n"
    content = json.loads(out)
    if command == "report":
        assert content["captures"] == 2
        (box, *_) = content["sections"]["verdict"]["parts"][0]["items"]
        assert box["value"] == "500.0 µs"
    else:
        assert content["step_ns"] == 500_000
    older = [str(tmp_path / name) for name in ("steps_3_rank0", "steps_3_rank0-2")]
    assert main([command, *older, "--json"]) == 0
    assert capsys.readouterr().err == ""


def test_a_comparison_takes_the_newest_run_of_a_folder(tmp_path, capsys) -> None:
    newest = two_runs(tmp_path / "both")["steps_3_rank0-2"]
    found = diff(tmp_path / "both", newest)
    assert found.before == ("steps_3_rank0-2", "steps_3_rank1-2")
    assert found.step.change_ns == 0
    assert f"{tmp_path / 'both'}: {LEFT_OUT}" in [each.sentence for each in found.unlike]
    command = ["report", str(newest.folder), "--before", str(tmp_path / "both"), "--json"]
    assert main(command) == 0
    section = json.loads(capsys.readouterr().out)["sections"]["comparison"]
    assert section["sentence"].count("500.0 µs") == 2
    assert LEFT_OUT in words(section)
    both = str(tmp_path / "both")
    assert main(["diff", both, both, "--fail-on", "operators>+0", "--json"]) == 0
    out, err = capsys.readouterr()
    assert (out.count(LEFT_OUT), err) == (2, "")


def test_no_trace_of_an_older_run_is_downloaded(tmp_path, monkeypatch) -> None:
    memory = fsspec.filesystem("memory")
    two_runs(tmp_path / "runs")
    memory.put(str(tmp_path / "runs"), "/", recursive=True)
    fetched: list[str] = []
    fetch = storage.fetch
    monkeypatch.setattr(storage, "fetch", lambda url: (fetched.append(url), fetch(url))[1])
    try:
        found = diff("memory://runs", "memory://runs")
    finally:
        memory.store.clear()
    assert found.before == ("steps_3_rank0-2", "steps_3_rank1-2")
    assert {url.rpartition("/")[2] for url in fetched} == {*found.before}


def test_the_command_fails_if_no_capture_can_be_read(tmp_path, capsys) -> None:
    recorded(tmp_path, 3)
    (tmp_path / "steps_3_rank0" / "trace.json.gz").write_bytes(b"no trace")
    assert main(["diagnose", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("instrument: ")
    assert main(["diagnose", str(tmp_path / "nothing")]) == 2


# Comparing ranks


def late(ranks: Any) -> Iterator[Finding]:
    """A finding in every window, about its highest rank."""
    rank = ranks.summaries[-1].rank
    yield Finding("late", f"Rank {rank} is late", "wait less", "instrument ranks FOLDER")


LATE = RanksCheck("late", late)


def test_ranks_are_compared_by_windows(tmp_path: Path) -> None:
    captures = [recorded(tmp_path, 3, 0), recorded(tmp_path, 6, 0), recorded(tmp_path, 6, 1)]
    found = diagnose(captures, [], [LATE])
    assert [each.title for each in found.findings] == ["Rank 1 is late (in 1 of 2 windows)"]
    assert not found.passed
    assert not found.not_checked


@pytest.mark.parametrize("late_in", [{3, 6}, {6}])
def test_communication_follows_the_late_ranks_of_most_windows(tmp_path, late_in) -> None:
    """The late ranks cost less than the communication that waits for them, and more than nothing."""

    def find(ranks: Any) -> Iterator[Finding]:
        if ranks.summaries[0].first_step in late_in:
            yield Finding("stragglers", "Rank 1 is late", "balance", "verify", share=0.2)

    shares = {"exposed-communication": 0.9, "other": 0.3, "small": 0.1}
    checks = [
        check({"what": "x is exposed communication", "share": share, "edit": None}, code=code)
        for code, share in shares.items()
    ]
    captures = [recorded(tmp_path, window, rank) for window in (3, 6, 9) for rank in (0, 1)]
    found = diagnose(captures, checks, [RanksCheck("stragglers", find)]).findings
    first, *others = (each.code for each in found)
    if len(late_in) == 2:
        assert [first, *others] == ["other", "stragglers", "exposed-communication", "small"]
    else:
        assert [first, *others] == ["exposed-communication", "other", "small", "stragglers"]


def test_a_comparison_without_findings_has_passed(tmp_path: Path) -> None:
    quiet = RanksCheck("late", lambda ranks: iter(()))
    found = diagnose([recorded(tmp_path), recorded(tmp_path, rank=1)], [], [quiet])
    assert (found.findings, found.passed) == ((), ("late",))


@pytest.mark.parametrize("broken", [{0, 1}, {1}], ids=["all", "one"])
def test_ranks_whose_summary_fails_are_not_compared(tmp_path, monkeypatch, broken) -> None:
    summarize = rank_summary.summarize

    def fail(capture: Any) -> Any:
        if capture.about.rank in broken:
            raise OverflowError("too large")
        return summarize(capture)

    monkeypatch.setattr(rank_summary, "summarize", fail)
    captures = [recorded(tmp_path, rank=rank) for rank in (0, 1)]
    found = diagnose(captures, [check({})], [LATE])
    assert [each.code for each in found.findings] == ["made-up"]
    count = "" if len(broken) == 2 else " (1 of 2 captures)"
    assert found.not_checked[0] == (
        "The summary of a rank failed on this capture (OverflowError: too large): please report "
        f"it.{count}"
    )
    assert len(found.not_checked) == 3 - len(broken)


def test_a_comparison_that_fails_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(found: Any) -> Any:
        raise KeyError("rank")

    monkeypatch.setattr(run_module, "Run", fail)
    found = diagnose([recorded(tmp_path), recorded(tmp_path, rank=1)], [], [LATE])
    (sentence,) = found.not_checked
    assert sentence.startswith("The comparison of the ranks failed on this capture (KeyError: ")


def test_one_of_several_ranks_cannot_be_compared(tmp_path: Path) -> None:
    found = diagnose([recorded(tmp_path)], [], [LATE])
    assert (found.findings, found.passed) == ((), ())
    (sentence,) = found.not_checked
    assert sentence.startswith("The ranks were not compared")


def test_a_job_of_one_rank_has_nothing_to_compare(tmp_path: Path) -> None:
    found = diagnose([write_capture(tmp_path, steps())], [], [LATE])
    assert (found.findings, found.passed, found.not_checked) == ((), (), ())


# What is ignored, and what the first findings save together


def two_halves(capture: Any) -> Iterator[Problem]:
    for name in ("aten::mm", "aten::add"):
        events = np.flatnonzero(capture.events.named(name.__eq__))
        yield Problem(name, events, variant=name)


HALVED = Check("made-up", two_halves, factor=0.5)


def halves(folder: Path, first: str = "aten::mm", second: str = "aten::add") -> Capture:
    return write_capture(folder, in_steps(3, 1000, span(first, 0, 500), span(second, 500, 400)))


def test_what_the_first_findings_save_together_is_simulated(tmp_path: Path) -> None:
    found = diagnosed([halves(tmp_path)], [HALVED])
    assert [each.saving and each.saving.saving_ns for each in found.findings] == [250_000, 200_000]
    assert found.together is not None
    assert found.together.numbers == (1, 2)
    assert found.together.saving.saving_ns == 450_000
    line = "Findings 1 and 2 together save 450.0 µs (45 %): a step would take 550.0 µs."
    assert line in as_text(found)
    assert line in as_markdown(found).replace("\\", "")
    assert json.loads(as_json(found))["together"] == {
        "numbers": [1, 2], "saving_ns": 450_000, "low_ns": 450_000, "high_ns": 450_000, "step_ns": 550_000,
    }  # fmt: skip


def test_findings_on_the_same_events_are_not_counted_twice(tmp_path: Path) -> None:
    again = Check("again", two_halves, factor=0.5)
    found = diagnosed([halves(tmp_path)], [HALVED, again])
    assert [each.code for each in found.findings] == ["made-up", "again", "made-up", "again"]
    assert found.together is not None
    assert found.together.numbers == (1, 3)
    assert found.together.saving.saving_ns == 450_000


def test_windows_are_simulated_together_as_most_of_them_are(tmp_path: Path) -> None:
    found = diagnosed([halves(tmp_path / name) for name in "ab"], [HALVED])
    assert found.together is not None
    assert found.together.saving.saving_ns == 450_000


def test_one_finding_saves_nothing_together(tmp_path: Path) -> None:
    found = diagnosed([halves(tmp_path)], [HALVED._replace(least_saving=0.22)])
    assert len(found.findings) == 1
    assert found.together is None
    assert "together" not in as_text(found)


def test_an_ignored_finding_is_only_counted(tmp_path: Path) -> None:
    other = Check("other", two_halves, factor=0.5)
    found = diagnose([halves(tmp_path)], [HALVED, other], (), ignore=["other"])
    assert {each.code for each in found.findings} == {"made-up"}
    assert found.ignored == ("other", "other")
    assert found.together is not None
    assert found.together.numbers == (1, 2)
    assert "2 findings ignored: other" in as_text(found)
    assert json.loads(as_json(found))["ignored"] == ["other", "other"]


def test_a_threshold_replaces_that_of_the_check(tmp_path: Path) -> None:
    half, capture = HALVED._replace(least_share=0.3), halves(tmp_path)

    def names(share: float) -> list[str]:
        found = diagnose(capture, [half], (), thresholds={"made-up": share})
        return [each.title for each in found.findings]

    assert names(0.3) == ["aten::mm", "aten::add"]
    assert names(0.45) == ["aten::mm"]
    assert names(0.05) == ["aten::mm", "aten::add"]
    assert names(0.6) == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"ignore": ["first-ste"]}, "'first-ste'; did you mean 'first-step'?"),
        ({"ignore": "first-ste"}, "'first-ste'; did you mean 'first-step'?"),
        ({"thresholds": {"laucnh-bound": 0.1}}, "did you mean 'launch-bound'?"),
        ({"thresholds": {"graph-breaks": 0.1}}, "graph-breaks have no threshold 0.1: remove it"),
        ({"thresholds": {"launch-bound": 10}}, "is 10: give a share of the step from 0.01 to 1"),
        ({"thresholds": {"launch-bound": True}}, "is True: give a share"),
        ({"thresholds": {"launch-bound": 0.001}}, "a share of the step from 0.01 to 1"),
    ],
)
def test_settings_that_are_not_possible_are_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        diagnose([], **given)


def write_settings(folder: Path, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(text)


def test_settings_are_those_of_the_nearest_project_that_has_some(tmp_path: Path) -> None:
    write_settings(
        tmp_path / "a",
        '[tool.instrument.diagnose]\nignore = ["slow-links"]\n'
        "[tool.instrument.diagnose.thresholds]\nlaunch-bound = 0.1\n",
    )
    write_settings(tmp_path / "a/b", "[tool.other]\nx = 1\n")
    (tmp_path / "a/b/c").mkdir()
    found = read_settings(["first-step"], tmp_path / "a/b/c")
    assert found.ignore == ("slow-links", "first-step")
    assert found.thresholds == {"launch-bound": 0.1}
    write_settings(tmp_path / "a/b", "[tool.instrument]\n")
    assert read_settings(folder=tmp_path / "a/b/c") == DEFAULT


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[tool", "cannot be read"),
        ("[tool.instrument.diagnose]\nignored = []", "did you mean 'ignore'?"),
        ('[tool.instrument.diagnose]\nignore = "first-step"', "write a list of codes"),
        ("[tool.instrument.diagnose]\nignore = [1]", "write a list of codes"),
        ("[tool.instrument.diagnose]\nthresholds = 0.1", "write a table of shares"),
        ("[tool.instrument]\ndiagnose = 1", "write a table"),
        ("[tool]\ninstrument = 1", "write a table"),
    ],
)
def test_a_wrong_pyproject_is_named(tmp_path: Path, text: str, said: str) -> None:
    write_settings(tmp_path, text)
    with pytest.raises(ConfigError, match=re.escape(said)) as raised:
        read_settings(folder=tmp_path)
    assert str(tmp_path / "pyproject.toml") in str(raised.value)


def test_commands_leave_out_what_the_project_ignores(tmp_path, monkeypatch, capsys) -> None:
    place = str(
        write_capture(
            tmp_path,
            in_steps(
                3,
                1000,
                annotation("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 600),
            ),
        ).place
    )
    monkeypatch.chdir(tmp_path)
    outputs = [["diagnose", place], ["show", place], ["report", "--json", place]]
    for command in outputs:
        assert main(command) == 0
        text = capsys.readouterr().out
        assert "waits for data" in text
        assert "ignored" not in text.replace('"ignored"', "")
        assert main([*command, "--ignore", "loader-wait"]) == 0
        assert "1 finding ignored: loader-wait" in capsys.readouterr().out
    write_settings(tmp_path, '[tool.instrument.diagnose]\nignore = ["loader-wait"]')
    for command in outputs:
        assert main(command) == 0
        assert "1 finding ignored: loader-wait" in capsys.readouterr().out

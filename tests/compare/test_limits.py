"""Conditions: how they are read, and how counters and times are judged."""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from itertools import combinations
from pathlib import Path

import pytest
from builders import annotation, capture, in_steps, is_harmless, launched, span, step, write_capture
from commands import Command
from golden import Golden

from instrument import Capture
from instrument.base.errors import ConfigError
from instrument.read.compare.counters import COUNTERS, Count, Counters, counters
from instrument.read.compare.limits import Window, exit_status, judge, parse, window_of
from instrument.read.compare.side import load
from instrument.read.compare.statistics import is_higher
from instrument.read.compare.sums import sums_of


def counted(*, varying: tuple[int, int] | None = None, **values: int) -> Counters:
    """Counters of one step, with those of the range `model/attention`."""
    counts: dict[str, Count | None] = dict.fromkeys(COUNTERS)
    counts |= {name: Count(value, value, value) for name, value in values.items()}
    if varying is not None:
        counts["operators"] = Count(sum(varying), *varying)
    known = {name: count for name, count in counts.items() if count is not None}
    return Counters(1, counts, {"model": known, "model/attention": known})


def result(text: str, before: Counters, after: Counters) -> str:
    return judge(parse(text), [Window(before)], [Window(after)]).result


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("syncs>0", (None, "syncs", ">", 0, "value")),
        (" operators >= 412 ", (None, "operators", ">=", 412, "value")),
        ("peak>2GB", (None, "peak_bytes", ">", 2 * 10**9, "value")),
        ("peak_bytes>1.5GiB", (None, "peak_bytes", ">", 3 * 2**29, "value")),
        ("flops>1.5G", (None, "flops", ">", 1_500_000_000, "value")),
        ("operators>+5%", (None, "operators", ">", Fraction(1, 20), "percent")),
        ("operators>+10", (None, "operators", ">", 10, "difference")),
        ("collectives.all_reduce>1", (None, "collectives.all_reduce", ">", 1, "value")),
        ("range:layers.0.attn.operators>0", ("layers.0.attn", "operators", ">", 0, "value")),
        ("range:a.collectives.all_reduce>0", ("a", "collectives.all_reduce", ">", 0, "value")),
        ("range:attention.total>2.5%", ("attention", "total", ">", Fraction(1, 40), "percent")),
        ("step<5%", (None, "step", "<", Fraction(1, 20), "percent")),
    ],
)
def test_a_condition_is_read(text: str, expected: tuple[object, ...]) -> None:
    assert parse(text)[1:] == (*expected, False)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("syncs", "is no condition"),
        ("syncs=0", "is no condition"),
        ("operators>__import__('os')", "is no condition"),
        ("sync>0", "names no counter; did you mean 'syncs'"),
        ("total>5%", "names no range: write 'range:NAME.total>5%'"),
        ("collectives.allreduce>1", "did you mean 'collectives.all_reduce'?"),
        ("range:a.collectives.allreduce>1", "did you mean 'collectives.all_reduce'?"),
        ("peak>2Gb", "give a number with one of the units"),
        ("operators>2GB", "give a number with one of the units"),
        ("operators>1.2.3", "give a number"),
        ("operators>1.2.3%", "give a number"),
        ("step>5ms", "judges a time: give its change in percent"),
    ],
)
def test_a_wrong_condition_is_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=r"^[^\n]+$") as caught:
        parse(text)
    assert sentence in str(caught.value)


def test_a_counter_is_judged_by_its_value_or_its_change() -> None:
    before, after = counted(operators=100, syncs=0), counted(operators=105, syncs=1)
    assert result("syncs>0", before, after) == "fail"
    assert result("syncs>1", before, after) == "pass"
    assert result("operators>104", before, after) == "fail"
    assert result("operators>=105", before, after) == "fail"
    assert result("operators>105", before, after) == "pass"
    assert result("operators>+4", before, after) == "fail"
    assert result("operators>+5", before, after) == "pass"
    assert result("operators>4.9%", before, after) == "fail"
    assert result("operators>+5%", before, after) == "pass"
    assert result("syncs>5%", before, after) == "fail"  # from none to one
    assert result("operators<106", before, after) == "fail"


def test_a_limit_is_an_expression_over_the_tables(tmp_path: Path) -> None:
    def window(name: str, items: int) -> list[Window]:
        path = run(tmp_path, name, items, windows=1)
        return load([path], limits=conditions).judged

    query = "(select count(*) from events where name = 'aten::item' and counted)"
    conditions = [parse(f"{query}{limit}") for limit in (" > 3", ">+1", ">+2", "<= 50 %", "<2K")]
    conditions.append(parse("(select max(device_ns) from events)>0"))
    before, after = window("before", 1), window("after", 2)
    verdicts = [judge(each, before, after) for each in conditions]
    assert [each.result for each in verdicts] == [
        *("fail", "fail", "pass", "pass", "fail", "undecided")
    ]
    assert str(verdicts[0]) == f"fail: {query} > 3 (before 2, after 4)"
    assert str(verdicts[-1]).endswith("the query has no answer")
    baseline = [Window(before[0].counters)]
    verdict = judge(conditions[1], baseline, after)
    assert str(verdict).endswith(
        "the query has no answer before the change: a baseline has only counters"
    )
    verdict = judge(conditions[0], [], [*before, *after])
    assert "the answer varies between the windows, from 2 to 4" in str(verdict)
    path = run(tmp_path, "other", 1, windows=1)
    for wrong, sentence in (
        ("select name from events", "is no single number"),
        ("select 'text'", "is no single number"),
        ("select * from read_csv('x')", "functions that read files"),
        ("count(*)", "is not a query"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            load([path], limits=[parse(f"({wrong})>0")])


def test_ranges_that_fit_are_summed_without_those_inside_others() -> None:
    after = counted(operators=7)
    assert result("range:model.operators>6", counted(operators=7), after) == "fail"
    assert result("range:model/attention.operators>6", counted(operators=7), after) == "fail"
    assert result("range:*.operators>7", counted(operators=7), after) == "pass"
    with pytest.raises(ConfigError, match="names no range of either side; did you mean 'model'"):
        result("range:modle.operators>7", counted(operators=7), after)


def test_a_range_that_is_gone_counts_nothing() -> None:
    gone = Counters(1, counted(operators=1).counts)
    assert result("range:model.operators>0", counted(operators=7), gone) == "pass"
    assert result("range:model.operators>+0", gone, counted(operators=7)) == "fail"


def test_what_varies_or_is_unknown_is_undecided_and_says_why() -> None:
    steady = counted(operators=5)
    verdict = judge(parse("operators>9"), [Window(steady)], [Window(counted(varying=(4, 6)))])
    assert verdict.result == "undecided"
    assert "varies between the steps, from 4 to 6" in str(verdict)
    assert result("operators>9", counted(varying=(4, 6)), steady) == "pass"
    assert result("operators>+9", counted(varying=(4, 6)), steady) == "undecided"
    verdict = judge(parse("flops>9"), [Window(steady)], [Window(steady)])
    assert str(verdict).endswith("flops was not recorded: record with with_flops=True")


def test_windows_that_differ_vary() -> None:
    after = [Window(counted(operators=5)), Window(counted(operators=6))]
    assert judge(parse("operators>9"), after, after).result == "undecided"


def times(*steps: int) -> list[Window]:
    return [Window(counted(operators=1), step_ns=step_ns) for step_ns in steps]


def test_a_time_needs_several_windows_on_each_side() -> None:
    verdict = judge(parse("step>5%"), times(100, 101), times(200, 201, 202))
    assert (verdict.result, verdict.before, verdict.after) == ("undecided", 100, 201)
    assert "record at least 3 windows on each side" in verdict.reason
    baseline = [Window(counted(operators=1))]
    verdict = judge(parse("step>5%"), baseline, times(1, 2, 3))
    assert str(verdict).endswith("a baseline holds no times: give captures of both sides")


def test_a_time_fails_passes_or_stays_undecided() -> None:
    before = times(100, 101, 102)
    assert judge(parse("step>5%"), before, times(110, 111, 112)).result == "fail"
    assert judge(parse("step>5%"), before, times(100, 101, 102)).result == "pass"
    assert judge(parse("step>5%"), before, times(103, 108, 112)).result == "undecided"
    # equal values are no evidence of a change
    assert judge(parse("step>0%"), before, before).result == "undecided"


@pytest.mark.parametrize(("low", "high"), [(3, 3), (4, 3), (5, 4)])
def test_the_test_of_ranks_counts_all_orders(low: int, high: int) -> None:
    every = [
        ([k for k in range(low + high) if k not in chosen], [*chosen])
        for chosen in combinations(range(low + high), high)
    ]
    pairs = [sum(a < b for a in one for b in other) for one, other in every]
    for (one, other), own in zip(every, pairs):
        share = Fraction(sum(each >= own for each in pairs), len(every))
        assert is_higher(other, one) == (share <= Fraction(5, 100))


def of_capture(recorded: Capture) -> Window:
    counted = counters(recorded)
    return window_of(recorded, counted, [], sums_of(recorded, counted))


def test_times_of_ranges_come_from_captures(tmp_path: Path) -> None:
    def window(name: str, lasts_us: float) -> list[Window]:
        inside = annotation("model", 0, lasts_us), span("aten::mm", 0, lasts_us)
        recorded = capture(tmp_path / name, in_steps(3, 1000, *inside))
        return [of_capture(recorded)] * 3

    before, after = window("before", 100), window("after", 200)
    verdict = judge(parse("range:model.total>50%"), before, after)
    assert (verdict.result, verdict.before, verdict.after) == ("fail", 100_000, 200_000)
    assert judge(parse("range:model.total>150%"), before, after).result == "pass"
    assert judge(parse("range:model.device>5%"), before, after).result == "undecided"
    assert judge(parse("step>5%"), before, after).result == "pass"


def test_the_exit_status_tells_a_failure_from_an_open_question() -> None:
    after = counted(operators=5)
    verdicts = {
        text: judge(parse(text), [Window(after)], [Window(after)])
        for text in ("operators>9", "operators>1", "flops>1")
    }
    passed, failed, open_ = verdicts.values()
    assert exit_status([]) == exit_status([passed]) == 0
    assert exit_status([passed, open_]) == 3
    assert exit_status([open_, failed]) == 1


def run(folder: Path, name: str, items: int, *, windows: int = 3, rank: int = 0) -> Path:
    """Some windows of three steps, each step with a range that has `.item()` some times."""
    inside = [annotation("lo`ss", 0, 500)]
    for k in range(items):
        inside.append(span("aten::item", 20 * k, 10))
        inside.append(span("aten::_local_scalar_dense", 20 * k + 1, 5))
    events = in_steps(3, 1000, *inside)
    for window in range(windows):
        write_capture(folder / name, events, f"window{window}_rank{rank}", rank=rank)
    return folder / name


COMMANDS = [
    "diff before after --rows 1 --fail-on 'syncs>2' --fail-on 'step>5%'",
    "diff before after --rows 1 --fail-on 'syncs>1'",
    "diff before after --rows 1 --fail-on 'syncs>1' --markdown",
    "diff before after --rows 1 --fail-on '(select count(*) from events where counted)>+3'",
    "diff before after --rows 1 --fail-on '(select name from events)>3'",
    "diff before after --rows 1 --fail-on 'allocations>1'",
    "diff before after --fail-on 'nothing>1'",
    "baseline before -o perf.json",
    "diff perf.json after --fail-on 'syncs>+0'",
    "diff perf.json before --fail-on 'range:lo`ss.syncs>+0'",
    "diff perf.json before --fail-on 'step>5%'",
    "diff perf.json before",
    "diff after perf.json --fail-on 'syncs>+0'",
    "diff after perf.json --fail-on 'syncs<+0'",
    "diff perf.json perf.json --fail-on 'syncs>0'",
    # Only the lowest rank and the windows of training count.
    "diff ranks ranks --rows 1 --fail-on 'syncs>0'",
]


@pytest.fixture
def sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the runs named above, as the current one."""
    monkeypatch.chdir(tmp_path)
    run(Path(), "before", 1)
    run(Path(), "after", 2)
    run(Path(), "ranks", 1, windows=1)
    run(Path(), "ranks", 5, windows=2, rank=1)
    events = [step(0, 0, 1000), step(1, 1000, 1000)]
    write_capture(Path("ranks"), events, "validation", window={"phase": "validation"})


@pytest.mark.usefixtures("sides")
def test_what_is_printed(transcript: Callable[[list[str]], str], golden: Golden) -> None:
    text = transcript(COMMANDS)
    assert is_harmless(text)
    golden("conditions.txt", text)


@pytest.mark.usefixtures("sides")
def test_json_holds_the_verdicts(command: Command) -> None:
    words = ("diff", "before", "after", "--fail-on", "syncs>1", "--json")
    content = json.loads(command(*words, status=1).out)
    assert content["what"] == "step"
    assert content["conditions"] == [
        {
            "condition": "syncs>1",
            "result": "fail",
            "before": 1,
            "after": 2,
            "reason": None,
            "ranges": [{"path": "lo`ss", "before": 1, "after": 2}],
        }
    ]


def test_the_times_of_ranges_are_those_of_the_counted_steps(tmp_path: Path) -> None:
    """The first step is 25 times as long, and a range outside of all steps longer still."""
    events = [annotation("model", 0, 100_000), *launched("gemm", 10, 20, 90_000, 1)]
    events += [step(0, 100_000, 25_000), annotation("model", 100_000, 24_000)]
    for number in (1, 2):
        start = 124_000 + 1000 * number
        events += [
            step(number, start, 1000),
            annotation("model", start, 600),
            span("aten::mm", start + 100, 300),
            *launched("gemm", start + 110, start + 120, 200, 1 + number),
        ]
    found = capture(tmp_path, events)
    window = of_capture(found)
    assert window.step_ns == 1_000_000
    assert window.ranges.to_dicts() == [{"range": "model", "total": 600_000, "device": 200_000}]

"""A part of a trace: steps, ranges, streams and conditions; and questions in SQL."""

from __future__ import annotations

import json
import re
from pathlib import Path

import polars as pl
import pytest
from builders import annotation, capture, launched, span, step
from commands import Command
from real_traces import every, load, needs_traces

from instrument.base.errors import ConfigError
from instrument.read.capture import Capture
from instrument.read.facts.facts import EVENTS
from instrument.read.facts.schema import names_of
from instrument.read.facts.segments import SEGMENTS


def three_steps(tmp_path: Path) -> Capture:
    events = [annotation("train", 0, 3000)]
    for number in range(3):
        at = 1000 * number
        events += [
            step(number, at, 1000),
            annotation("forward", at + 100, 400),
            span("aten::mm", at + 200, 100 * (number + 1)),
            *launched("gemm", at + 210, at + 300, 100 + number, 1 + 2 * number, tid=7),
            annotation("optimizer", at + 600, 300),
            span("aten::add_", at + 700, 50),
            *launched("add", at + 710, at + 800, 20, 2 + 2 * number, tid=9),
        ]
    return capture(tmp_path, events)


def rows(found: Capture, view: str, *columns: str) -> list[tuple[object, ...]]:
    return [tuple(getattr(row, each) for each in columns) for row in getattr(found, view)]


def test_of_some_steps_all_count_and_everything_can_be_asked(tmp_path: Path) -> None:
    whole = three_steps(tmp_path)
    part = whole.during(steps=(1, 2))
    assert rows(part, "steps", "number") == [(1,), (2,)]
    assert part.links.counted_steps.count == 2
    assert whole.links.counted_steps.count == 2, "the first one does not"
    one = whole.during(steps=2)
    assert dict(rows(one, "kernels", "name", "device_ns")) == {"gemm": 102_000, "add": 20_000}
    assert dict(rows(one, "operators", "name", "cpu_ns"))["aten::mm"] == 300_000
    (train,) = [row for row in one.ranges if row.path == "train"]
    assert train.cpu_ns == 1_000_000, "what reaches beyond the steps is cut"
    assert str(one.diagnose()).startswith("A step takes 1")


def test_what_is_inside_a_range_counts_and_a_backward_is_of_its_forward(tmp_path: Path) -> None:
    part = three_steps(tmp_path).during(range="*forward")
    assert {name for (name,) in rows(part, "kernels", "name")} == {"gemm"}
    assert {name for (name,) in rows(part, "operators", "name")} >= {"forward", "aten::mm"}
    assert "aten::add_" not in part.operators.column("name")
    assert part.during(steps=2).kernels[0].calls == 1


def test_segments_are_of_whole_steps(tmp_path: Path) -> None:
    part = three_steps(tmp_path).during(stream=9)
    with pytest.raises(ConfigError, match="The table segments cannot be restricted to stream '9'"):
        part.sql("select * from segments")


def test_a_stream_and_a_condition_choose_events(tmp_path: Path) -> None:
    whole = three_steps(tmp_path)
    assert rows(whole.during(stream=9), "kernels", "name", "calls") == [("add", 3)]
    long = whole.during(where="kind = 'operator' and duration_ns >= 200000")
    assert rows(long, "operators", "name", "calls") == [("aten::mm", 2)]
    both = whole.during(steps=(0, 1), where="name = 'gemm' and step = 1")
    assert rows(both, "kernels", "calls", "device_ns") == [(1, 101_000)]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"steps": 7}, "No finished step is in 7-7: the trace has the steps 0-2."),
        ({"range": "nothing/*"}, "No range fits 'nothing/*'"),
        ({"stream": 3}, "There is no stream '3'; device work ran on 7, 9."),
        ({"where": "device > "}, "is not an expression of SQL"),
        ({"where": "device_us > 1"}, "did you mean device_ns?"),
    ],
)
def test_what_fits_nothing_is_said(tmp_path: Path, given: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError) as raised:
        len(three_steps(tmp_path).during(**given).operators)
    assert reason in str(raised.value)


@pytest.mark.parametrize(
    ("condition", "calls"),
    [
        ("cpu_ns > 100000 and cpu_ns < 250000", 1),
        ("duration_ns between 100000 and 200000 and name = 'aten::mm'", 2),
        ("name = 'aten::mm' and duration_ns = max(duration_ns) over (partition by name)", 1),
        ("true", 3),
        ("null", 0),
    ],
)
def test_a_condition_may_name_a_column_twice_or_none(tmp_path, condition, calls) -> None:
    whole = three_steps(tmp_path)
    if "cpu_ns" in condition:
        assert len(whole.operators.where("cpu_ns > 140000 and cpu_ns < 200000")) == calls
        return
    found = whole.during(where=condition).sql("select id from events where name = 'aten::mm'")
    assert len(found) == calls


@pytest.mark.parametrize(
    ("condition", "reason"),
    [
        ("1", "is not true or false: write a comparison."),
        ("name", "is not true or false: write a comparison."),
        ("name > 5", "cannot compare string with numeric type"),
        ("name regexp '((('", "unclosed group"),
        ("columns('.*') > 1", "names several columns at once"),
        ("name = '\udc80'", "has bytes that are not UTF-8"),
        ("name = '" + "x" * 5000 + "'", "at most 5,000 are allowed"),
    ],
)
def test_a_condition_that_is_none_is_refused(tmp_path: Path, condition: str, reason: str) -> None:
    whole = three_steps(tmp_path)
    for ask in (lambda: whole.during(where=condition), lambda: whole.kernels.where(condition)):
        with pytest.raises(ConfigError) as raised:
            ask()
        assert reason in str(raised.value)
        assert "\n" not in str(raised.value)


def test_a_part_of_a_part_is_in_both(tmp_path: Path) -> None:
    part = three_steps(tmp_path).during(range="*forward").during(stream=9)
    assert len(part.kernels) == 0
    with pytest.raises(ConfigError, match="restricted to range '\\*forward', stream '9'"):
        part.diagnose()


def test_a_step_that_the_next_one_overlaps_ends_where_that_one_begins(tmp_path: Path) -> None:
    events = [step(1, 0, 1100), step(2, 1000, 1000)]
    for number in range(2):
        at = 1000 * number
        events += launched("gemm", at + 10, at + 20, 100, 1 + number)
    whole = capture(tmp_path, events)
    assert [len(whole.during(steps=k).work.event) for k in (1, 2)] == [1, 1]
    query = "select sum(duration_ns) as ns from segments where lane = 'step' and step = 1"
    assert whole.during(steps=1).sql(query)[0].ns == whole.sql(query)[0].ns == 1_000_000


def test_a_device_that_still_works_for_the_step_before_is_not_idle(tmp_path: Path) -> None:
    events = [step(1, 0, 1000), step(2, 1000, 1000)]
    events += launched("long", 900, 950, 350, 1)
    events += launched("next", 1010, 1300, 100, 2)
    whole = capture(tmp_path, events)
    part = whole.during(steps=2)
    assert part.steps[0].clipped_compute_ns == whole.steps[1].clipped_compute_ns == 400_000
    assert part.steps[0].compute_ns == whole.steps[1].compute_ns == 100_000
    query = "select kind, sum(duration_ns) as ns from segments where lane = 'step' and step = 2"
    query += " group by kind"
    # A part is as a recording that begins there; in the whole, the step begins after the work of the step before it.
    assert {row.kind: row.ns for row in part.sql(query)} == {"compute": 400_000, "idle": 600_000}
    assert {row.kind: row.ns for row in whole.sql(query)} == {"compute": 100_000, "idle": 600_000}
    assert dict(rows(part, "kernels", "name", "device_ns")) == {"long": 300_000, "next": 100_000}


def test_other_tables_do_not_answer_about_a_part_of_the_events(tmp_path: Path) -> None:
    part = three_steps(tmp_path).during(range="*forward")
    for ask in (lambda: part.steps, part.diagnose, lambda: part.whatif, part.report):
        with pytest.raises(ConfigError, match="cannot be restricted to range '\\*forward'"):
            ask()


def test_a_question_in_sql(tmp_path: Path) -> None:
    whole = three_steps(tmp_path)
    answer = whole.sql(
        "select name, count(*) as calls, sum(device_ns) as device_ns from events "
        "where kind = 'kernel' and counted group by name order by device_ns desc"
    )
    assert answer.to_dicts() == [
        {"name": "gemm", "calls": 2, "device_ns": 203_000},
        {"name": "add", "calls": 2, "device_ns": 40_000},
    ]
    both = whole.sql(
        "select k.name, l.name as by from events k join events l on k.launcher = l.id order by k.id"
    )
    assert both[0].by == "cudaLaunchKernel"
    got = whole.sql("select sum(duration_ns) as ns from segments where lane = 'step'")[0].ns
    assert got == 3_000_000
    everything = whole.sql("select * from events")
    assert everything.columns == tuple(names_of(EVENTS))
    assert whole.sql("select * from segments").columns == tuple(names_of(SEGMENTS))
    assert len(whole.during(range="*forward").sql("select id from events")) < len(everything)


@pytest.mark.parametrize(
    "query",
    [
        "select * from read_csv('{file}')",
        "select * from READ_PARQUET('{file}')",
        "select * from \"read_csv\"('{file}')",
        "with t as (select * from read_csv('{file}')) select * from t",
        "select * from events where name in (select * from read_csv('{file}'))",
        "select * from read_csv/**/('{file}')",
        "select * from '{file}'",
        "select * from others",
        "create table t as select * from events",
        "drop table events",
        "select id from events; select 1",
        "selec",
        "select '\udc80' as x",
        "select " + "1+" * 6000 + "1 as x",
        "select name from events where name regexp '((('",
    ],
)
def test_no_query_reads_a_file_or_changes_a_table(tmp_path: Path, query: str) -> None:
    secret = tmp_path / "secret.csv"
    secret.write_text("secret\n1\n", encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        three_steps(tmp_path).sql(query.format(file=secret))
    assert "\n" not in str(raised.value)


def test_columns_that_a_query_does_not_write_out(tmp_path: Path) -> None:
    whole = three_steps(tmp_path)
    (row,) = whole.sql("select columns('^own_.*ns$') from events where name = 'aten::mm' limit 1")
    assert row.own_ns == 95_000
    assert len(whole.sql("select kind from events natural join segments")) == 0
    with pytest.raises(ConfigError, match="Did you mean duration_ns") as raised:
        whole.sql("select durations_ns from events")
    assert "valid columns" not in str(raised.value)


def test_every_answer_can_be_printed_and_written(tmp_path: Path, command: Command) -> None:
    query = (
        "select 'text' as name_ns, [1, 2] as l_ns, true as b_share, 0/0 as nan, 1/0 as inf, 1.5 as "
        "number, date '2020-01-01' as day, interval '1 second' as lasts, cast('x' as blob) as blob, "
        '\'forward\' as "pass", 1 as "a.b" from segments limit 1'
    )
    whole = three_steps(tmp_path)
    answer = whole.sql(query)
    assert answer.to_dicts() == [
        {
            "name_ns": "text", "l_ns": [1, 2], "b_share": True, "nan": None, "inf": None,
            "number": 1.5, "day": "2020-01-01", "lasts": 1_000_000_000, "blob": "x",
            "pass": "forward", "a.b": 1,
        }
    ]  # fmt: skip
    assert answer[0].pass_ == "forward"
    assert "text" in str(answer)
    assert "text" in answer._repr_html_()
    path = whole.trace_path
    assert "text" in command("sql", query, path).out
    assert json.loads(command("sql", "--json", query, path).out)["rows"] == answer.to_dicts()
    assert command("sql", "--csv", query, path).out.startswith("name_ns,l_ns")


def test_an_empty_option_is_not_no_option(tmp_path: Path, command: Command) -> None:
    path = three_steps(tmp_path).trace_path
    assert "No range fits ''" in command("show", "--ops", "--range", "", path, status=2).err
    assert "not an expression" in command("show", "--ops", "--where", "", path, status=2).err


def test_the_options_of_commands(tmp_path: Path, command: Command) -> None:
    path = three_steps(tmp_path).trace_path
    shown = command("show", "--kernels", "--step", "1", "--stream", "7", path).out
    assert "gemm" in shown
    assert "add" not in shown
    asked = command("sql", "--json", "select count(*) as n from events where kind = 'step'", path)
    assert json.loads(asked.out) == {"version": 1, "rows": [{"n": 3}]}
    assert command("diagnose", "--step", "1-2", path).out
    assert json.loads(command("whatif", "--step", "1", "--json", path).out)["steps"] == [1_000_000]
    both = json.loads(command("diff", "--step", "1-2", "--json", path, path).out)
    assert both["wholes"][0]["steps"]["before"]["count"] == 2
    page = json.loads(command("report", "--step", "1-2", "--json", "--before", path, path).out)
    assert "comparison" in page["sections"]
    assert "No finished step is in 7-7" in command("diff", "--step", "7", path, path, status=2).err
    refused = command("show", "--steps", "--range", "*forward", path, status=2)
    assert "cannot be restricted" in refused.err


@needs_traces
def test_the_questions_of_the_documentation_have_answers() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tables.md").read_text(encoding="utf-8")
    kernels, waits, short, self_times = re.findall(r"```sql\n(.*?)```", page, re.DOTALL)
    found = load("v100_resnet50_workers0")
    events = found.facts.events("kind", "counted", "duration_ns")
    counted_ns = events.filter(pl.col("counted") & (pl.col("kind") == "kernel"))["duration_ns"]
    top = found.sql(kernels)
    assert len(top) == 5
    assert 0 < sum(top.column("device_ns")) <= counted_ns.sum()
    steps = found.steps
    for row in found.sql(waits).where(kind="loader wait", step=steps[1].number):
        assert row.duration_ns == pytest.approx(steps[1].loader_wait_ns, rel=0.01)
    operators = {row.name: row for row in found.operators.where(kind="operator")}
    for row in found.sql(self_times):
        expected = operators[row.name]
        assert (row.calls, row.self_cpu_ns) == (expected.calls, expected.self_cpu_ns)
        assert row.share == pytest.approx(expected.share)
    by_call = {row.name: row.calls for row in found.sql(short)}
    (launches,) = found.launches.where(name="cudaLaunchKernel")
    assert by_call["cudaLaunchKernel"] == launches.short_calls


@pytest.mark.parametrize("name", every())
def test_the_table_of_events_of_real_traces_agrees_with_the_views(name: str) -> None:
    found = load(name)
    events = found.facts.events()
    assert events.columns == names_of(EVENTS)
    operators = found.operators
    by_name = events.filter(
        pl.col("kind").is_in(["operator", "range", "runtime", "wait"])
    ).group_by("name", "kind")
    own = {
        (a, b): (calls, ns)
        for a, b, calls, ns in by_name.agg(pl.sum("call"), pl.sum("own_ns")).iter_rows()
    }
    for row in operators:
        if (row.name, row.kind) in own:
            assert own[row.name, row.kind] == (row.calls, row.self_cpu_ns), row.name
    of_kernels = (
        events.filter(pl.col("kind").is_in(["kernel", "communication"]))
        .group_by("name")
        .agg(pl.sum("device_ns"))
    )
    assert dict(of_kernels.iter_rows()) == dict(
        zip(found.kernels.column("name"), found.kernels.column("device_ns"))
    )
    work = events.filter(pl.col("device").is_not_null())
    unlaunched = work.filter(pl.col("operator").is_null())["device_ns"].sum()
    assert work["device_ns"].sum() == events["own_device_ns"].sum() + unlaunched

"""The numbers of the report page, against the tables and against sums by hand."""

from __future__ import annotations

import gzip
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import real_traces
from builders import (
    SINGLE_PROCESS,
    annotation,
    capture,
    in_steps,
    kernels,
    launched,
    made,
    node,
    payload_of,
    span,
    step,
    steps,
    synchronous_steps,
    write_capture,
    write_rank,
)
from page_parts import facts, parts, tables, words

from instrument.base.errors import CaptureError, TraceWarning
from instrument.base.units import duration, percent
from instrument.cli.command import main
from instrument.read.advise.verdict import verdict
from instrument.read.capture import Capture
from instrument.read.facts.idle import device_time
from instrument.read.show.page.page import page, payload
from instrument.read.show.page.parts import columns_of
from instrument.read.show.page.ranges import ranges
from instrument.read.show.page.redacted import redacted
from instrument.read.views.table import Table

US = 1000


def sections(*captures: Capture, **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = payload(captures, **options)["sections"]
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Capture:
    """Three steps of 1000, 1400 and 1200 µs, with a forward, its backward and an optimizer."""
    events = []
    for number, start, length in ((3, 0, 1000), (4, 1000, 1400), (5, 2400, 1200)):
        events += [
            step(number, start, length),
            annotation("forward", start + 100, 300),
            made("aten::mm", start + 150, 200, number),
            node("MmBackward0", start + 450, length - 800, number),
            annotation("Optimizer.step#SGD.step", start + length - 150, 100),
        ]
    return write_capture(tmp_path_factory.mktemp("trained"), events)


def bars(verdict: Any) -> dict[str, dict[str, int]]:
    """The times of the bars by kind and by range."""
    (found,) = parts(verdict, "bars")
    return {
        bar["title"]: {part["name"]: part["ns"] for part in bar["parts"]} for bar in found["items"]
    }


def test_the_verdict_of_a_step(trained: Capture) -> None:
    verdict = sections(trained)["verdict"]
    boxes = facts(verdict)
    (chart,) = (box["chart"] for box in parts(verdict, "facts")[0]["items"] if "chart" in box)
    assert chart == {"numbers": [3, 4, 5], "ns": [1000 * US, 1400 * US, 1200 * US]}
    # the first step does not count
    got = boxes["A step takes"]
    assert got == ("1.300 ms", "mean of 2 steps (steps 4–5); between 1.200 ms and 1.400 ms")
    assert "The times are means of steps 4–5." in words(verdict)
    # forward 300 + optimizer 100 in each step, and the backward: 600 and 400
    assert bars(verdict) == {
        # in the steps 4 and 5: the product of 200 each, and the backward
        "By what happens": {"CPU operators": 700 * US, "Python": 200 * US, "idle": 400 * US},
        "By range": {
            "forward": 800 * US,
            "(no range)": 400 * US,
            "Optimizer.step#SGD.step": 100 * US,
        },
    }
    assert not {"Device idle", "MFU"} & {*boxes}


def test_parts_sum_to_the_steps_exactly(tmp_path: Path) -> None:
    drawn = random.Random(7)
    events, start = [], 0.0
    for number in range(8):
        length = drawn.randint(2_000_000, 9_000_000) / 1000
        events.append(step(number, start, length))
        for k in range(30):
            at = start + drawn.random() * length
            work = drawn.randint(1, 90_000) / 1000
            events += launched(
                f"kernel {k % 4}", at, at + drawn.randint(5, 40), work, number * 30 + k + 1
            )
            if not k % 5:
                events.append(annotation(f"range {k}", start + k * length / 40, length / 50))
        start += length
    made = capture(tmp_path, events)
    found = sections(made)["verdict"]
    spent = device_time(made)
    for times in bars(found).values():
        assert sum(times.values()) == pytest.approx(spent["total_ns"] / 7, abs=len(times))
        assert len(times) > 2
    known = bars(found)["By what happens"]
    assert known["compute"] == round(spent["compute_ns"] / 7)
    idle = spent["idle_ns"] / spent["total_ns"]
    assert facts(found)["Device idle"] == (percent(idle), "of the step")
    assert facts(found)["A step takes"][0] == duration(made.diagnose().step_ns or 0)


def test_findings_are_those_of_diagnose_with_times_since_the_start(tmp_path: Path) -> None:
    inside = annotation(SINGLE_PROCESS, 0, 7000), span("aten::mm", 7000, 2500)
    events = [event | {"ts": event["ts"] + 5_000_000} for event in in_steps(3, 10_000, *inside)]
    made = capture(tmp_path, events)
    content = payload([made])
    found = parts(content["sections"]["verdict"], "finding")
    expected = made.diagnose().findings
    assert [each["code"] for each in found] == [each.code for each in expected]
    first, saving = found[0], expected[0].saving
    assert first["code"] == "loader-wait"
    assert saving is not None
    assert first["share"] == pytest.approx(saving.saving_ns / saving.baseline_ns)
    assert first["saves"].startswith(f"saves {duration(saving.saving_ns)} (")
    (link, *_) = first["evidence"]["columns"][0]["links"]
    begin, end = map(int, re.findall(r"\d+", link))
    assert 0 <= begin <= 20_000 * US
    assert end == begin + 7000 * US
    assert content["head"][0] == {
        "kind": "text", "style": "p", "id": "sentence", "text": verdict(made.diagnose()),
    }  # fmt: skip


def test_the_head_and_the_box_name_the_same_time_of_a_step(tmp_path: Path) -> None:
    late = launched("gemm", 2900, 2950, 200, 1)
    first = write_capture(tmp_path, [*in_steps(3, 1000, span("aten::mm", 0, 9)), *late], "first")
    last = write_capture(tmp_path, in_steps(3, 3000, span("aten::mm", 0, 9)), "last")
    found = []
    for captures in ([first], [first, last]):
        content = payload(captures)
        takes, note = facts(content["sections"]["verdict"])["A step takes"]
        assert content["head"][0]["text"].startswith(f"A step takes {takes}")
        found.append((takes, note.partition("; between")[0]))
    assert found == [
        ("1.075 ms", "mean of 2 steps (steps 1–2)"),
        ("1.075 ms", "median of 2 captures; in this one, 3.000 ms: mean of 2 steps (steps 1–2)"),
    ]


@pytest.mark.parametrize("name", real_traces.every())
def test_the_share_of_a_title_is_that_of_the_finding(name: str) -> None:
    """The share is the first percentage in the title."""
    for finding in real_traces.load(name).diagnose().findings:
        if finding.share is not None:
            assert re.findall(r"([\d.]+) %", finding.title)[0] + " %" == percent(finding.share)


def test_what_if_holds_the_saving_for_each_factor(trained: Capture) -> None:
    (table,) = parts(sections(trained)["whatif"], "table")
    cells = table["cells"]
    at = [*zip(cells["kind"], cells["name"])].index(("range", "forward"))
    for name, by in (("10", 0.9), ("25", 0.75), ("50", 0.5), ("100", 0)):
        edited = trained.whatif.scale(range="forward", by=by)
        assert cells[f"saving_{name}_ns"][at] == trained.whatif.baseline_ns - edited.step_ns
    assert cells["saving_100_ns"][at] > cells["saving_10_ns"][at] > 0


def charts(table: dict[str, Any]) -> list[Any]:
    """The times of each range in each step."""
    (found,) = (column["charts"] for column in table["columns"] if column.get("kind") == "steps")
    return list(found)


def test_ranges_hold_each_step_and_the_rest(trained: Capture) -> None:
    found = tables(sections(trained)["ranges"])
    for table in found.values():
        cells = table["cells"]
        at = cells["name"].index("forward")
        # the forward of 300, and the backward of 200, 600 and 400
        assert charts(table)[at] == [500 * US, 900 * US, 700 * US]
        assert cells["total_ns"][at] == 2100 * US
        (phases,) = (each["parts"] for each in table["columns"] if each.get("kind") == "bar")
        assert (phases["forward"][at], phases["backward"][at]) == (900 * US, 1200 * US)
        optimizer = cells["name"].index("Optimizer.step#SGD.step")
        assert charts(table)[optimizer] == [100 * US] * 3
        assert phases["optimizer"][optimizer] == 300 * US
        lengths = {len(column) for column in cells.values()}
        assert len(lengths) == 1
        rest = trained.ranges_rest
        assert cells["name"][len(cells["name"]) - len(rest) :] == rest.column("name")
        (numbers,) = (each["numbers"] for each in table["columns"] if each.get("kind") == "steps")
        assert numbers == [3, 4, 5]
    assert [*found] == ["Ranges by path", "Ranges by name"]


def test_steps_of_ranges_sum_to_the_tree(tmp_path: Path) -> None:
    events = []
    for number in range(4):
        start = 1000 * number
        events += [step(number, start, 1000), annotation("outer", start, 900)]
        for k in range(number + 1):
            events += [
                annotation("inner", start + 10 + 100 * k, 60),
                annotation("other", start + 75 + 100 * k, 20),
                annotation("inner", start + 80 + 100 * k, 10),  # inside `other`
            ]
    made = capture(tmp_path, events)
    paths, names = tables(sections(made)["ranges"]).values()
    by_path = dict(zip(made.ranges.column("path"), charts(paths)))
    assert by_path["outer"] == [900 * US] * 4
    assert by_path["outer/inner"] == [60 * US * (k + 1) for k in range(4)]
    assert by_path["outer/other"] == [20 * US * (k + 1) for k in range(4)]
    assert by_path["outer/other/inner"] == [10 * US * (k + 1) for k in range(4)]
    by_name = dict(zip(names["cells"]["name"], charts(names)))
    assert by_name["inner"] == [70 * US * (k + 1) for k in range(4)]
    assert paths["depths"] == [*made.ranges.column("depth"), 0]


def test_tables_hold_the_views(tmp_path: Path) -> None:
    made = capture(tmp_path, [*steps(), *kernels()])
    found = tables(sections(made)["tables"])
    assert found["Kernels"]["cells"]["name"] == ["gemm"]
    assert found["Kernels"]["cells"]["device_ns"] == [100 * US]
    (times,) = (each for each in found["Kernels"]["columns"] if each["name"] == "device_ns")
    assert times["texts"] == ["100.0 µs"]
    operators = found["Operators"]["cells"]
    assert operators["name"][0] == "aten::mm"  # the most device time
    assert not {"forward", "attention"} & {*operators["name"]}
    assert {column["name"] for column in found["Operators"]["columns"]} == {*operators}
    assert all(column["doc"] for table in found.values() for column in table["columns"])
    assert all(any(cell is not None for cell in column) for column in operators.values())
    assert "Copies and memsets" not in found


def test_a_column_with_a_unit_is_aligned_as_numbers_even_without_values() -> None:
    columns = columns_of(Table({"name": ["gemm"], "device_ns": [None]}))
    assert [column["is_text"] for column in columns] == [True, False]
    assert columns[1]["texts"] == ["–"]


def test_a_run_holds_all_ranks(tmp_path: Path) -> None:
    ranks = [
        write_rank(tmp_path, rank, synchronous_steps(own, device=True))
        for rank, own in ((0, 300), (1, 320), (2, 700))
    ]
    runs = sections(*ranks)["runs"]
    found = tables(runs)
    table = next(table for caption, table in found.items() if caption.startswith("Ranks"))
    assert table["cells"]["rank"] == [0, 1, 2]
    assert table["cells"]["compute_ns"] == [300 * US, 320 * US, 700 * US]
    slow = next(table for caption, table in found.items() if caption.startswith("Slow ranks"))
    assert slow["cells"]["rank"] == [2]
    steps = found["Step times over the run"]
    assert steps["cells"]["rank"] == [f"rank {rank}" for rank in range(3)]
    (charts,) = (each for each in steps["columns"] if each["name"] == "steps_ns")
    assert (charts["numbers"], charts["charts"]) == ([3, 4], [[1000 * US] * 2] * 3)
    assert "runs" not in sections(ranks[0])


def test_a_rank_whose_trace_is_cut_short_is_marked(tmp_path: Path) -> None:
    ranks = [write_rank(tmp_path, rank, synchronous_steps(300), 2) for rank in (0, 1)]
    trace = ranks[1].folder / "trace.json.gz"
    trace.write_bytes(gzip.compress(gzip.decompress(trace.read_bytes())[:-4]))
    (ranks[1].folder / "summary.json").unlink()
    with pytest.warns(TraceWarning):
        runs = sections(*(Capture.load(each.folder) for each in ranks))["runs"]
    (table,) = (each for caption, each in tables(runs).items() if caption.startswith("Ranks"))
    assert table["cells"]["trace"] == [None, "cut short"]
    assert "The trace file of rank 1 is cut short, and its figures are left out" in str(runs)


def test_windows_of_one_rank_have_only_their_step_times(tmp_path: Path) -> None:
    events = [step(3, 0, 1000), annotation("work", 100, 500)]
    windows = [
        write_capture(tmp_path, [each | {"ts": each["ts"] + k} for each in events], name=f"w{k}")
        for k in range(2)
    ]
    runs = sections(*windows)["runs"]
    assert [part["kind"] for part in runs["parts"]] == ["text", "table"]
    (charts,) = (each for each in runs["parts"][1]["columns"] if each["name"] == "steps_ns")
    assert (charts["numbers"], charts["charts"]) == ([3, 3], [[1000 * US] * 2])


def test_a_trace_without_events_of_the_cpu_has_a_page(tmp_path: Path) -> None:
    found = sections(capture(tmp_path, [step(1, 0, 100)]))
    assert "whatif" not in found or tables(found["whatif"])
    assert "ranges" not in found
    assert facts(found["verdict"])["A step takes"] == ("100.0 µs", "one step counts")


def test_no_capture_is_an_error() -> None:
    with pytest.raises(CaptureError, match="no trace to diagnose"):
        payload([])


PRIVATE = (
    "/home/ann/secret/train.py(12): main",
    "secret_train.py:31",
    "~/plan/model.py(7): forward",
    "s3://bucket/secret/run",
    "C:\\Users\\ann\\secret.py(3): f",
    "on gpu-secret-7 only",
)
PUBLIC = (
    "blocks.0/attention",
    "forward/mlp",
    "aten::mm",
    "nn.Module: Linear_0",
    "Memcpy HtoD (Pinned -> Device)",
)


def test_a_redacted_payload_names_no_file_and_no_host(tmp_path: Path) -> None:
    events = [step(0, 0, 9000), step(1, 9000, 9000)]
    for k, name in enumerate((*PRIVATE, *PUBLIC)):
        events += [annotation(name, 500 * k, 400), span(name, 500 * k + 10, 300)]
    made = write_capture(tmp_path, events, host="gpu-secret-7", command=["/home/ann/secret.py"])
    plain, clean = (json.dumps(payload([made], redact=redact)) for redact in (False, True))
    for word in ("secret", "ann/", "plan/", "Users"):
        assert (word in plain, word in clean) == (True, False), word
    for name in PUBLIC:
        assert name in clean
    assert ": main" in clean  # the function stays
    bare = capture(tmp_path, steps())
    assert payload([bare], redact=True)["title"] == "***"


def test_the_values_of_failed_guards_are_redacted(tmp_path: Path) -> None:
    dynamo = {"recompilations": 1, "failed_guards": {"train.py:3 in f: key == 'hidden'": 1}}
    made = write_capture(tmp_path, steps(), environment={"dynamo": dynamo})
    plain, clean = (json.dumps(payload([made], redact=redact)) for redact in (False, True))
    assert ("hidden" in plain, "hidden" in clean, "failed guard" in clean) == (True, False, True)


def test_folders_with_blanks_are_redacted_whole(tmp_path: Path) -> None:
    """The path of the capture stands in the commands of findings."""
    folder = tmp_path / "jane doe" / "it's private"
    folder.mkdir(parents=True)
    events = in_steps(3, 9000, annotation(SINGLE_PROCESS, 0, 6000))
    made = write_capture(folder, events)
    plain, clean = (json.dumps(payload([made], redact=redact)) for redact in (False, True))
    assert ("private" in plain, "private" in clean, "jane" in clean) == (True, False, False)
    assert "instrument show *** --" in clean
    for name, shown in (
        ("/home/jane doe/my code/train.py(31): main", "(file): main"),
        ("my code/train.py:31 in main", "(file) in main"),
        ("my code/train.py:31", "(file)"),
        (
            "The step waits in train.py:31, and then goes on",
            "The step waits in (file), and then goes on",
        ),
    ):
        assert redacted(name, ()) == shown


def test_report_writes_the_page_and_shows_it_in_a_frame(trained: Capture, tmp_path: Path) -> None:
    made = trained.report(tmp_path / "made.html")
    content = payload([trained])
    assert page(content).html == made.html == (tmp_path / "made.html").read_text(encoding="utf-8")
    assert payload_of(tmp_path / "made.html") == json.loads(json.dumps(content))
    assert "http://" not in made.html.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in made.html
    frame = made._repr_html_()
    assert frame.startswith("<iframe srcdoc=")
    assert "<script" not in frame  # escaped, inside the attribute
    assert "made.html" not in repr(made)


def test_the_command_writes_the_page(trained, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    assert main(["report", str(trained.folder)]) == 0
    written = tmp_path / "report.html"
    assert re.fullmatch(r"Wrote report\.html \([\d.]+ KiB\)\.\n", capsys.readouterr().out)
    assert payload_of(written) == json.loads(json.dumps(payload([trained])))
    assert opened == []
    assert main(["report", str(trained.folder), "-o", "other.html", "--open", "--redact"]) == 0
    assert opened == [(tmp_path / "other.html").as_uri()]
    capsys.readouterr()
    assert main(["report", str(trained.folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"version": 1} | json.loads(
        json.dumps(payload([trained]))
    )
    assert main(["report", str(trained.folder), "--json", "-o", "x.html"]) == 2
    assert "--json prints on stdout" in capsys.readouterr().err


def test_a_long_name_is_redacted_in_linear_time() -> None:
    for name in ("a" * 100_000, "a." * 50_000, "a/" * 50_000, "-/" * 50_000, "a+b://"[:3] * 30_000):
        assert redacted([name], ["box"]) is not None
    assert redacted({"a": ["/x/y", None, 3, "box", "inbox"]}, ["box"]) == {
        "a": ["(file)", None, 3, "***", "inbox"]
    }


def test_ranges_show_the_last_steps(tmp_path: Path) -> None:
    events = in_steps(130, 100)
    events += [annotation("work", 100 * number + 10, number % 50 + 1) for number in range(130)]
    table = tables(sections(capture(tmp_path, events))["ranges"])["Ranges by path"]
    (numbers,) = (each["numbers"] for each in table["columns"] if each.get("kind") == "steps")
    assert numbers == [*range(30, 130)]
    assert charts(table)[0] == [(k % 50 + 1) * US for k in range(30, 130)]


def test_the_card_of_the_utilization_leaves_out_the_first_step(tmp_path: Path) -> None:
    """The same product on a device, in a first step of 10 ms and then in steps of 1 ms."""
    size = {"Input_Dims": [[4096, 4096], [4096, 4096]], "Input_type": ["c10::Half", "c10::Half"]}
    events: list[Any] = []
    for number, start, length in ((0, 0, 10_000), (1, 10_000, 1000), (2, 11_000, 1000)):
        events += [
            step(number, start, length),
            span("aten::mm", start + 5, 20, **size),
            *launched("gemm", start + 10, start + 30, 900, number + 1),
        ]
    device = {"id": 0, "name": "NVIDIA A100-SXM4-80GB", "numSms": 108}
    found = capture(tmp_path, events, deviceProperties=[device])
    shares = found.efficiency_steps.column("mfu")
    assert shares[0] == pytest.approx(shares[1] / 10)
    assert facts(sections(found)["verdict"])["MFU"][0] == percent(shares[1])


def test_more_ranges_need_no_more_reads_of_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []
    column = Table.column

    def counted(table: Table, name: str) -> list[Any]:
        reads.append(name)
        return column(table, name)

    found = []
    for count in (10, 100):
        (folder := tmp_path / f"{count}").mkdir()
        events = [annotation(f"range {k}", 10 * k, 9) for k in range(count)]
        made_of = capture(folder, [step(3, 0, 10 * count), *events])
        with monkeypatch.context() as patched:
            patched.setattr(Table, "column", counted)
            reads.clear()
            ranges(made_of)
            found.append(len(reads))
    assert found[0] == found[1] > 0

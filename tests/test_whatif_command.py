"""`instrument whatif`: its options, its text, its JSON, and what docs/what-if.md shows of it."""

from __future__ import annotations

import json
import os
import re
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from builders import (
    WORKERS,
    Event,
    annotation,
    call,
    is_harmless,
    kernel,
    launched,
    span,
    step,
    synchronous_steps,
    write_capture,
    write_rank,
)
from rich.console import Console

from instrument.analysis.section import Section
from instrument.base.errors import CaptureError
from instrument.base.units import durations_like
from instrument.cli.command import main
from instrument.report import whatif as report
from instrument.report.terminal import draw
from instrument.runs.run import Run
from instrument.whatif.scenario import joint_scenario
from instrument.whatif.selection import short_name

PAGE = (Path(__file__).parent.parent / "docs" / "what-if.md").read_text("utf-8")
TRACES = os.environ.get("INSTRUMENT_TRACES")
LONG = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::TensorList"
    "Metadata<4>, at::native::Functor<float, 4, 4>, float>(at::native::TensorListMetadata<4>, float)"
)


def cpu_steps() -> list[Event]:
    """Three steps of 1000 µs, of which `slow` takes 600, and `fast` 200 with a product of 100."""
    events = []
    for begin in (0, 1000, 2000):
        events += [
            step(begin // 1000, begin, 1000),
            annotation("slow", begin + 100, 600),
            annotation("fast", begin + 750, 200),
            span("aten::mm", begin + 800, 100),
        ]
    return events


def device_steps(name: str = LONG) -> list[Event]:
    """Three steps of 1000 µs that wait for a kernel of 800 µs."""
    events = []
    for number, begin in enumerate((0, 1000, 2000)):
        events += [
            step(number, begin, 1000),
            annotation("forward", begin + 10, 980),
            *launched(name, begin + 20, begin + 50, 800, 2 * number + 1),
            call("cudaDeviceSynchronize", begin + 60, 795, 2 * number + 2),
        ]
    return events


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = write_capture(tmp_path, cpu_steps()).folder
    assert made
    return made


@pytest.fixture
def on_device(tmp_path: Path) -> Path:
    made = write_capture(tmp_path, device_steps()).folder
    assert made
    return made


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["whatif", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def found(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, object]:
    loaded: dict[str, object] = json.loads(printed(capsys, *arguments, "--json"))
    return loaded


def drawn(parts: list[str | Section], width: int) -> str:
    console = Console(
        file=StringIO(), force_terminal=True, color_system=None, width=width, _environ={}
    )
    return draw(parts, console)


def without_trailing_blanks(text: str) -> str:
    return re.sub(" +$", "", text, flags=re.MULTILINE)


def test_the_causal_profile_is_printed_first(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, profile, *others = printed(capsys, folder).rstrip("\n").split("\n\n")
    assert first == "steps_3-4: a step takes 1.000 ms"
    assert profile.splitlines()[1:] == [
        "kind      name           CPU  saving 10  saving 25  saving 50  saving 100  share",
        "--------  --------  --------  ---------  ---------  ---------  ----------  -----",
        "range     slow      0.600 ms   0.060 ms   0.150 ms   0.300 ms    0.600 ms  30.0%",
        "range     fast      0.200 ms   0.020 ms   0.050 ms   0.100 ms    0.200 ms  10.0%",
        "operator  aten::mm  0.100 ms   0.010 ms   0.025 ms   0.050 ms    0.100 ms   5.0%",
    ]
    assert profile.startswith("Causal profile; saving 50: how much shorter a step is if the row")
    assert not others, "nothing is uncertain, and there is no device"
    assert "Causal profile, 1 of 3;" in printed(capsys, folder, "--rows", 1)


def test_edits_compose_in_the_order_of_the_command_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edits = ["--remove", "range:fast", "--scale", "range:slow=0.5", "--scale", "range:slow=0.5"]
    heading, listed, saving, path, profile = printed(capsys, folder, *edits).split("\n\n")
    assert heading == "steps_3-4: a step would take 0.350 ms instead of 1.000 ms"
    assert listed.splitlines() == [
        "Edits:", "1. no range fast", "2. range slow × 0.5", "3. range slow × 0.5"
    ]  # fmt: skip
    assert saving == "Saving: 0.650 ms (65.0%)"
    assert path.splitlines()[0].endswith("what decides how long a step takes: CPU 100.0%")
    assert path.splitlines()[3:] == [
        "CPU   (in no range)  0.200 ms  57.1%",
        "CPU   slow           0.150 ms  42.9%",
    ]
    assert profile.startswith("Causal profile after the edits;")
    slow, fast = (line.split() for line in profile.splitlines()[3:5])
    assert slow[:4] == ["range", "slow", "0.150", "ms"], "the edited time, not the recorded one"
    assert slow[-3:] == ["0.150", "ms", "21.4%"]
    assert fast[-3:] == ["0.000", "ms", "0.0%"], "what is gone wins nothing"


def test_a_longer_step_is_a_negative_saving(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, folder, "--scale", "range:slow=2")
    assert "Saving: -0.600 ms (-60.0%): a step takes longer\n" in text
    assert found(capsys, folder, "--scale", "range:slow=2")["saving_ns"] == -600_000


def test_one_table_is_printed_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = printed(capsys, folder, "--critical-path")
    assert path.split("\n\n")[1].splitlines()[3] == "CPU   slow           0.600 ms  60.0%"
    assert "Causal profile" not in path
    edited = printed(capsys, folder, "--critical-path", "--scale", "range:slow=0.5")
    assert [part.split("\n")[0].split(";")[0].split(":")[0] for part in edited.split("\n\n")] == [
        "steps_3-4", "Edits", "Saving", "Critical path"
    ]  # fmt: skip


def test_a_step_now_minus_its_saving_is_the_step_after_the_edits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If steps differ, the median of the simulated steps can grow although the steps get shorter.

    Three steps of 0.9, 1.0 and 1.5 ms wait 0, 0.3 and 1.5 ms; together they become 26 % shorter.
    """
    lengths = (1000, 900, 1000, 1500)
    begins = [sum(lengths[:k]) for k in range(4)]
    events = [step(k, begin, lengths[k]) for k, begin in enumerate(begins)]
    events += [annotation("slow", begins[2] + 100, 300), annotation("slow", begins[3], 1500)]
    made = write_capture(tmp_path, events)
    heading, _, saving, *_ = printed(capsys, made.folder, "--scale", "range:slow=0.5").split("\n\n")
    assert heading == "steps_3-4: a step would take 0.735 ms instead of 1.000 ms"
    assert saving == "Saving: 0.265 ms (26.5%)"
    given = found(capsys, made.folder, "--scale", "range:slow=0.5")
    numbers = [given[name] for name in ("baseline_ns", "saving_ns", "step_ns", "steps")]
    assert numbers == [1_000_000, 264_706, 735_294, [1_000_000, 900_000, 850_000, 750_000]]


def test_the_json_has_the_keys_that_the_page_describes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = found(capsys, folder, "--scale", "range:slow=0.5")
    assert [*given] == [*report.JSON_KEYS]
    profile, path = (given.pop(name) for name in ("profile", "critical_path"))
    assert given == {
        "version": 1,
        "name": "steps_3-4",
        "step_ns": 700_000,
        "baseline_ns": 1_000_000,
        "saving_ns": 300_000,
        "low_ns": 300_000,
        "high_ns": 300_000,
        "steps": [700_000] * 3,
        "edits": ["range slow × 0.5"],
        "notes": [],
    }
    assert profile[0] == {  # type: ignore[index]
        "kind": "range",
        "name": "slow",
        "cpu_ns": 300_000,
        "device_ns": None,
        "saving_10_ns": 30_000,
        "saving_25_ns": 75_000,
        "saving_50_ns": 150_000,
        "saving_100_ns": 300_000,
        "saving_50_share": pytest.approx(150 / 700),
    }
    assert sum(row["step_ns"] for row in path) == 700_000  # type: ignore[union-attr]
    assert len(found(capsys, folder, "--rows", 1)["profile"]) == 1  # type: ignore[arg-type]


def test_each_option_is_its_edit(on_device: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "at::native::multi_tensor_apply_kernel"
    step_ns = found(capsys, on_device)["step_ns"]
    assert step_ns == 1_000_000
    for options, edit in (
        (["--scale", f"kernel:{name}=0.5"], f"kernel {name} × 0.5"),
        (["--scale", "kernel:*apply*=0.25"], "kernel *apply* × 0.25"),
        (["--remove", f"kernel:{LONG}"], f"no kernel {LONG}"),
        (["--remove", "sync"], "no sync *"),
        (["--remove", "sync:cudaDevice*"], "no sync cudaDevice*"),
        (["--asynchronous"], "no wait in *"),
        (["--asynchronous", "cudaDeviceSynchronize"], "no wait in cudaDeviceSynchronize"),
        (["--graph-launch", "forward"], "range forward as a graph"),
        (["--scale", "operator:cudaLaunchKernel=0.5"], "operator cudaLaunchKernel × 0.5"),
    ):
        given = found(capsys, on_device, *options)
        assert given["edits"] == [edit]
        assert given["step_ns"] < step_ns or "Launch" in edit, edit  # type: ignore[operator]
    halved = found(capsys, on_device, "--scale", f"kernel:{name}=0.5")["saving_ns"]
    assert halved == 400_000
    assert "If all device work took half the time, a step would be 0.400 ms (40.0%) shorter." in (
        printed(capsys, on_device)
    )


def test_an_option_for_what_the_capture_lacks_says_so(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for options, text in (
        (["--scale", "range:slwo=0.5"], "No range matches 'slwo': the capture has slow and others"),
        (["--remove", "kernel:*"], "No kernel matches '*': the capture has none"),
        (["--remove", "sync"], "No synchronizing call matches '*': the capture has none"),
        (["--overlap-copies"], "No copy matches '*': the capture has none"),
        (["--workers", "4"], "No data loader of this capture loads its batches"),
        (["--bandwidth", "2"], "The capture has no communication"),
        (["--balance"], "There are no collectives of several ranks in this scenario"),
        (["--graph-launch", "slow"], "The range slow launches no device work"),
    ):
        assert main(["whatif", str(folder), *options]) == 2
        said = capsys.readouterr()
        assert said.err.startswith(f"instrument: {text}")
        assert said.err.count("\n") == 1
        assert not said.out


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--scale", "slow=0.5"),
        ("--scale", "layer:slow=0.5"),
        ("--scale", "range:slow"),
        ("--scale", "range:=0.5"),
        ("--scale", "range:slow=half"),
        ("--scale", "range:slow=-1"),
        ("--scale", "range:slow=nan"),
        ("--scale", "range:slow=inf"),
        ("--scale", "sync:*=0.5"),
        ("--scale", "thread:*=0.5"),
        ("--remove", "slow"),
        ("--remove", "range:"),
        ("--remove", "step:3"),
        ("--workers", "0"),
        ("--workers", "2.5"),
        ("--workers", "many"),
        ("--bandwidth", "0"),
        ("--bandwidth", "-2"),
        ("--bandwidth", "nan"),
    ],
)
def test_a_misspelt_edit_is_one_sentence_before_the_trace_is_read(
    option: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["whatif", str(tmp_path / "nothing"), f"{option}={value}"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"instrument: {option} is {value!r}; give ")
    assert said.endswith(".\n")
    assert said.count("\n") == 1


def test_a_trace_without_cpu_events_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_capture(tmp_path, [kernel("gemm", 0, 10)]).folder
    assert main(["whatif", str(folder)]) == 2
    assert capsys.readouterr().err.startswith("instrument: The trace has no CPU events")


def test_a_window_without_steps_is_called_a_window(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_capture(tmp_path, [annotation("slow", 0, 600)]).folder
    text = printed(capsys, folder)
    assert text.startswith("steps_3-4: the recorded window takes 600.0 µs\n")
    assert "Note: No step finished in the recording" in text


def test_the_cost_of_recording_is_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cost = {"recorded_step_ns": 1_250_000, "unrecorded_step_ns": 1_000_000, "unrecorded_steps": 20}
    folder = write_capture(tmp_path, cpu_steps(), cost=cost).folder
    text = printed(capsys, folder)
    assert "Note: A recorded step takes 25% longer than a step before the window" in text


def two_ranks(tmp_path: Path) -> list[Path]:
    events = [synchronous_steps(own_us, device=True) for own_us in (200, 600)]
    return [
        write_rank(tmp_path, rank, each, world_size=2).folder for rank, each in enumerate(events)
    ]


def test_a_batch_that_one_of_several_ranks_waits_for_is_a_note(tmp_path: Path) -> None:
    """The second rank's trace begins 5 ms later; its second step waits 60 µs longer or 400 µs."""
    for waits_us, is_noted in ((60, False), (400, True)):
        folder = tmp_path / str(waits_us)
        for rank, own_us in enumerate((200, 600)):
            events = synchronous_steps(own_us, device=True)
            if rank:
                events += [annotation(WORKERS, 20, 20), annotation(WORKERS, 1020, waits_us)]
            write_rank(folder, rank, events, world_size=2, base_ns=5_000_000 * rank)
        (window,) = Run.load(folder).windows
        notes = " ".join(joint_scenario(window).notes)
        assert ("these batches arrive at the recorded times" in notes) == is_noted


def test_positions_of_events_need_one_rank(tmp_path: Path) -> None:
    two_ranks(tmp_path)
    (window,) = Run.load(tmp_path).windows
    both, calls = joint_scenario(window), np.zeros(1, np.int64)
    for edit in (
        lambda: both.scale_events(calls, 0.5),
        lambda: both.asynchronous(positions=calls),
    ):
        with pytest.raises(
            CaptureError, match="Events can be selected by position only in a scenario of one rank"
        ):
            edit()


def test_several_paths_are_the_ranks_of_a_window(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = two_ranks(tmp_path)
    given = found(capsys, *folders, "--balance")
    assert given["name"] == "steps_000003-000004, 2 ranks"
    assert given["edits"] == ["ranks balanced"]
    assert {row["rank"] for row in given["critical_path"]} <= {0, 1, None}  # type: ignore[union-attr]
    text = printed(capsys, *folders, "--critical-path")
    assert re.search(r"^kind +name +rank +step +share$", text, re.MULTILINE)


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_a_narrow_terminal_keeps_what_answers(on_device: Path, width: int) -> None:
    from instrument.capture import Capture

    scenario = Capture.load(on_device).whatif
    parts = report.parts("a" * 20, scenario.scale(kernel="*", by=0.9), rows=8)
    text = drawn(parts, width)
    assert max(map(len, text.splitlines())) <= width
    (header,) = re.findall(r"^kind +name.*saving.*|^name.*saving.*", text, re.MULTILINE)
    kept = ["name", "saving 50", "share"]
    kept += ["kind", "CPU", "device"] if width >= 80 else []
    assert all(name in header for name in kept), header
    assert ("saving 10 " in header) == (width >= 140)
    if width < 140:
        caption = " ".join(text.split())
        assert re.search("; --json or a wider terminal shows (it|them)[.]", caption)


def test_the_columns_of_a_table_line_up(on_device: Path) -> None:
    from instrument.capture import Capture

    parts = report.parts("x", Capture.load(on_device).whatif)
    (profile,) = (part for part in parts if isinstance(part, Section))
    lines = drawn([profile], 80).splitlines()
    rule = next(line for line in lines if line.startswith("─"))
    rows = lines[lines.index(rule) + 1 :]
    ends = [match.end() for match in re.finditer("─+", rule)][2:5]
    times = [row for row in rows if row.startswith(("range", "kernel", "operator"))]
    assert len(times) >= 2
    assert all(row[end - 3 : end] == " ms" for row in times for end in ends), rows


def test_names_of_a_stranger_do_not_control_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_capture(tmp_path, device_steps("evil\x1b]0;owned\x07")).folder
    assert is_harmless(printed(capsys, folder, "--scale", "kernel:evil*=0.5"))


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (LONG, "at::native::multi_tensor_apply_kernel"),
        ("Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD"),
        ("Memset (Device)", "Memset"),
        ("volta_sgemm_64x64_nt", "volta_sgemm_64x64_nt"),
        ("std::enable_if<((8) > (0)) && f<int>::on, void>::type vllm::norm<c10::Half, 8>(int)", "vllm::norm"),
        ("void foo<bar<int> >(int)", "foo"),
        ("<unnamed>::kernel(int)", "kernel"),
        ("decltype(f<a->b>) k<1>(x)", "decltype"),
        ("<lambda>", "<lambda>"),
        ("", ""),
    ],
)  # fmt: skip
def test_a_kernel_has_a_short_name(name: str, short: str) -> None:
    assert short_name(name) == short


def test_times_of_a_column_have_one_unit() -> None:
    assert durations_like(175_153_000)(300_000) == "0.3 ms"
    assert durations_like(87_412_863)(-40_000) == "-0.04 ms"
    assert durations_like(87_412_863)(-4_000) == "0.00 ms"
    assert durations_like(1_234_000)(1_234_500_000) == "1,234.500 ms"
    assert durations_like(999)(12.4) == "12 ns"
    assert durations_like(13_336_315_805)(8_206_000_000) == "8.21 s"
    assert durations_like(0)(0) == "0 ns"


@pytest.mark.skipif(not TRACES, reason="INSTRUMENT_TRACES names no folder of real traces")
def test_what_the_page_shows_of_a_trace_is_printed() -> None:
    from instrument.capture import Capture

    blocks = re.findall(r"```text\n(v100.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 2
    capture = Capture.load(Path(TRACES or "") / "v100_resnet50_workers0.json.gz")
    recorded = drawn(report.parts(capture.name, capture.whatif, rows=6), 80)
    assert without_trailing_blanks(recorded) == blocks[0]
    edited = drawn(report.parts(capture.name, capture.whatif.workers(4)), 80)
    assert without_trailing_blanks(edited).startswith(blocks[1])
    for text in (
        "would be 13.5 ms",
        "CudnnConvolutionBackward            15.2 ms  45.6 ms    20.5",
    ):
        assert text in edited, text

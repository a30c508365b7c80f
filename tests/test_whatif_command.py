"""`instrument whatif`: its options, its text, its JSON, and what docs/what-if.md shows of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from builders import (
    Event,
    annotation,
    call,
    is_harmless,
    kernel,
    launched,
    span,
    step,
    write_capture,
)
from commands import Command
from golden import Golden
from real_traces import load, needs_traces
from rich.console import Console

from instrument.base.units import durations_like
from instrument.read.show import whatif as report
from instrument.read.show.terminal import draw
from instrument.read.views.section import Section

PAGE = Path(__file__).parent.parent / "docs" / "what-if.md"
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


def layer_steps() -> list[Event]:
    """Two steps of 1000 µs that wait for three layers with kernels of 100 and 200 µs in one graph."""
    events = []
    for number, begin in enumerate((0, 1000)):
        events += [
            step(number, begin, 1000),
            call("cudaGraphLaunch", begin + 10, 20, 2 * number + 1),
            call("cudaDeviceSynchronize", begin + 40, 910, 2 * number + 2),
        ]
        for k in range(6):
            name, lasts = (("flash_fwd_kernel", 100), ("mlp_kernel", 200))[k % 2]
            start = begin + 50 + 150 * k - 50 * (k % 2)
            node = {"graph_node_id": k + 1, "annotation": f"Block_{k // 2}/{name}"}
            events.append(kernel(name, start, lasts, correlation=2 * number + 1, **node))
    return events


# A step of the first runs 600 µs of `slow`; of the second, three steps of 0.9, 1.0 and 1.5 ms run 0, 0.3 and 1.5 ms of
# it, so that the median of the simulated steps grows although they get shorter, by 26 % together. A step of the third
# waits for 800 µs of device work.
CAPTURES = {
    "cpu": cpu_steps(),
    "uneven": [
        *(step(k, at, lasts) for k, (at, lasts) in enumerate([(0, 1000), (1000, 900), (1900, 1000), (2900, 1500)])),
        *(annotation("slow", at, lasts) for at, lasts in ((2000, 300), (2900, 1500))),
    ],
    "device": device_steps(),
    "layers": layer_steps(),
    "without_steps": [annotation("slow", 0, 600)],
    "device_alone": [kernel("gemm", 0, 10)],
}  # fmt: skip
KERNEL = "foreach functor<f32>"
COMMANDS = [
    "whatif cpu",
    "whatif cpu --rows 1",
    "whatif cpu --remove range:fast --scale range:slow=0.5 --scale range:slow=0.5",
    "whatif cpu --scale range:slow=2",
    "whatif cpu --scale range:slow=2 --json --rows 1",
    "whatif cpu --critical-path",
    "whatif cpu --critical-path --scale range:slow=0.5",
    "whatif uneven --scale range:slow=0.5",
    "whatif device",
    "whatif layers --scale layer:Block_1=0.5 --rows 1",
    "whatif layers --remove kernel:attention --rows 1",
    "whatif without_steps",
    "whatif costly --rows 1",
    # what the capture lacks
    "whatif cpu --scale range:slwo=0.5",
    "whatif cpu --remove kernel:*",
    "whatif layers --remove layer:block_1",
    "whatif cpu --remove layer:*",
    "whatif cpu --asynchronous",
    "whatif cpu --overlap-copies",
    "whatif cpu --workers 4",
    "whatif cpu --bandwidth 2",
    "whatif cpu --graph-launch slow",
    "whatif device_alone",
    # a misspelt edit, before the trace is read
    *(
        f"whatif nothing --scale={value}"
        for value in (
            "slow=0.5", "module:slow=0.5", "range:slow", "range:=0.5", "range:slow=half", "range:slow=-1",
            "range:slow=nan", "range:slow=inf", "sync:*=0.5", "thread:*=0.5",
        )
    ),
    *(f"whatif nothing --remove={value}" for value in ("slow", "range:", "step:3", "sync:*")),
    *(f"whatif nothing --workers={value}" for value in ("0", "2.5", "many")),
    *(f"whatif nothing --bandwidth={value}" for value in ("0", "-2", "nan")),
]  # fmt: skip


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the captures named above, as the current one."""
    monkeypatch.chdir(tmp_path)
    for name, events in CAPTURES.items():
        write_capture(Path(name), events)
    cost = {"recorded_step_ns": 1_250_000, "unrecorded_step_ns": 1_000_000, "unrecorded_steps": 20}
    write_capture(Path("costly"), cpu_steps(), cost=cost)


@pytest.mark.usefixtures("folders")
def test_what_is_printed(transcript: Callable[[list[str]], str], golden: Golden) -> None:
    golden("whatif.txt", transcript(COMMANDS))


@pytest.mark.usefixtures("folders")
def test_a_change_that_rounds_to_nothing_is_no_change(command: Command) -> None:
    printed = command("whatif", "cpu", "--scale", "range:slow=1.0002").out  # 120 ns
    assert "a step would take 1.000 ms, no change\n" in printed
    assert "\nSaving: 0.000 ms (0 %)\n" in printed
    printed = command("whatif", "cpu", "--scale", "range:slow=1.01").out
    assert "a step would take 1.006 ms instead of 1.000 ms\n" in printed
    assert "\nSaving: -0.006 ms (-0.6 %): a step takes longer\n" in printed


def found(command: Command, *arguments: object) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(command("whatif", *arguments, "--json").out)
    return loaded


def drawn(parts: list[str | Section], width: int) -> str:
    console = Console(
        file=StringIO(), force_terminal=True, color_system=None, width=width, _environ={}
    )
    return draw(parts, console)


def without_trailing_blanks(text: str) -> str:
    return re.sub(" +$", "", text, flags=re.MULTILINE)


@pytest.mark.usefixtures("folders")
def test_in_json_a_step_now_minus_its_saving_is_the_step_after_the_edits(command: Command) -> None:
    given = found(command, "cpu", "--scale", "range:slow=0.5")
    assert [*given] == ["version", *report.JSON_KEYS]
    assert given["step_ns"] == given["baseline_ns"] - given["saving_ns"] == 700_000
    assert sum(row["step_ns"] for row in given["critical_path"]) == 700_000
    given = found(command, "uneven", "--scale", "range:slow=0.5")
    assert given["baseline_ns"] - given["saving_ns"] == given["step_ns"] == 833_333
    assert given["steps"] == [1_000_000, 900_000, 850_000, 750_000]


@pytest.mark.usefixtures("folders")
def test_each_option_is_its_edit(command: Command) -> None:
    assert found(command, "device")["step_ns"] == 1_000_000
    for options, edit in (
        (["--scale", f"kernel:{KERNEL}=0.5"], f"kernel {KERNEL} × 0.5"),
        (["--scale", "kernel:*apply*=0.25"], "kernel *apply* × 0.25"),
        (["--remove", f"kernel:{LONG}"], f"no kernel {LONG}"),
        (["--remove", "operator:cudaDevice*"], "no operator cudaDevice*"),
        (["--asynchronous"], "no wait in *"),
        (["--asynchronous", "cudaDeviceSynchronize"], "no wait in cudaDeviceSynchronize"),
        (["--graph-launch", "forward"], "range forward as a graph"),
        (["--scale", "operator:cudaLaunchKernel=0.5"], "operator cudaLaunchKernel × 0.5"),
    ):
        given = found(command, "device", *options)
        assert given["edits"] == [edit]
        assert given["step_ns"] < 1_000_000 or "Launch" in edit, edit
        if "× 0.5" in edit and "kernel " in edit:
            assert given["saving_ns"] == 400_000


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_a_narrow_terminal_keeps_what_answers(tmp_path: Path, width: int) -> None:
    scenario = write_capture(tmp_path, device_steps()).whatif
    parts = report.parts("a" * 20, scenario.scale(kernel="*", by=0.9), rows=8)
    text = drawn(parts, width)
    assert max(map(len, text.splitlines())) <= width
    (header,) = re.findall(r"^kind +name.*50 % less.*|^name.*50 % less.*", text, re.MULTILINE)
    kept = ["name", "50 % less", "share"]
    kept += ["kind", "CPU", "device"] if width >= 80 else []
    assert all(name in header for name in kept), header
    assert ("  10 % less " in header) == (width >= 100)
    if width < 100:
        caption = " ".join(text.split())
        assert re.search("; --json shows (it|them)[.]", caption)


def test_the_columns_of_a_table_line_up(tmp_path: Path) -> None:
    parts = report.parts("x", write_capture(tmp_path, device_steps()).whatif)
    (profile,) = (part for part in parts if isinstance(part, Section))
    lines = drawn([profile], 80).splitlines()
    rule = next(line for line in lines if line.startswith("─"))
    rows = lines[lines.index(rule) + 1 :]
    ends = [match.end() for match in re.finditer("─+", rule)][2:5]
    times = [row for row in rows if row.startswith(("range", "kernel", "operator"))]
    assert len(times) >= 2
    assert all(row[end - 3 : end] == " ms" for row in times for end in ends), rows


def test_names_of_a_stranger_do_not_control_the_terminal(tmp_path: Path, command: Command) -> None:
    folder = write_capture(tmp_path, device_steps("evil\x1b]0;owned\x07")).folder
    assert is_harmless(command("whatif", folder, "--scale", "kernel:evil*=0.5").out)


def test_times_of_a_column_have_one_unit() -> None:
    assert durations_like(175_153_000)(300_000) == "0.3 ms"
    assert durations_like(87_412_863)(-40_000) == "-0.04 ms"
    assert durations_like(87_412_863)(-4_000) == "0.00 ms"
    assert durations_like(1_234_000)(1_234_500_000) == "1,234.500 ms"
    assert durations_like(999)(12.4) == "12 ns"
    assert durations_like(13_336_315_805)(8_206_000_000) == "8.21 s"
    assert durations_like(0)(0) == "0 ns"


@needs_traces
def test_what_the_page_shows_of_a_trace_is_printed() -> None:
    blocks = re.findall(r"```text\n(v100.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert len(blocks) == 2
    capture = load("v100_resnet50_workers0")
    recorded = drawn(report.parts(capture.name, capture.whatif, rows=6), 80)
    assert without_trailing_blanks(recorded) == blocks[0]
    edited = drawn(report.parts(capture.name, capture.whatif.workers(4)), 80)
    assert without_trailing_blanks(edited).startswith(blocks[1])
    for text in ("would be 13.5 ms", "CudnnConvolutionBackward 15.1 ms 45.6 ms 20.6"):
        assert text in " ".join(edited.split()), text

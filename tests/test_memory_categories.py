"""What memory was for, as torch classifies it: recorded by a session, read, and shown."""

from __future__ import annotations

import gzip
import json
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from builders import payload_of, span, step, write_capture
from collected import Log
from page_parts import parts, tables, words
from torch import nn
from torch.profiler._memory_profiler import MemoryProfileTimeline

from instrument import Session
from instrument.base.errors import CaptureError
from instrument.cli.command import main
from instrument.export.sinks.memory import Memory
from instrument.read.capture import Capture
from instrument.read.views.memory_categories import CATEGORIES
from instrument.record.config.schema import ProfilerConfig

FLOAT = 4


class Training(NamedTuple):
    """A recorded training, with torch's own object that classifies its memory."""

    capture: Capture
    model: nn.Module
    optimizer: torch.optim.Optimizer
    torchs: MemoryProfileTimeline


def recorded(folder: Path, **options: Any) -> tuple[Capture, nn.Module, torch.optim.Optimizer]:
    """Two steps of a small training, recorded from the second on."""
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    options = {
        "memory_categories": True,
        "export": "inline",
        "output_dir": folder,
        "sinks": {},
        **options,
    }
    with Session(wait=1, active=2, model=model, **options) as session:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(16, 32)).sum().backward()
            optimizer.step()
            session.step()
    return session.captures[0], model, optimizer


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """One training, and torch's own classification of its memory."""
    made: list[MemoryProfileTimeline] = []
    keep = MemoryProfileTimeline.__init__

    def init(timeline: MemoryProfileTimeline, of: Any) -> None:
        keep(timeline, of)
        made.append(timeline)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryProfileTimeline, "__init__", init)
        trained = recorded(tmp_path_factory.mktemp("training"))
    return Training(*trained, made[0])


@pytest.fixture
def copied(training: Training, tmp_path: Path) -> Path:
    """A copy of the capture's folder, to write into."""
    return Path(shutil.copytree(training.capture.folder, tmp_path / "copied"))


def test_exact_bytes_of_categories(training: Training) -> None:
    capture, model, optimizer, _ = training
    rows = {row.category: row for row in capture.memory_categories}
    assert {row.device for row in capture.memory_categories} == {"cpu"}
    parameters = sum(each.numel() for each in model.parameters()) * FLOAT
    assert rows["parameter"].start_bytes == rows["parameter"].end_bytes == parameters
    moments = [
        each for state in optimizer.state.values() for name, each in state.items() if name != "step"
    ]
    state = sum(each.numel() for each in moments) * FLOAT
    steps = len(optimizer.state) * FLOAT
    # torch sees the counts of steps or not
    assert state <= rows["optimizer state"].end_bytes <= state + steps
    assert rows["gradient"].end_bytes == parameters
    assert rows["activation"].max_bytes >= 2 * 16 * 64 * FLOAT
    assert rows["activation"].end_bytes == 0
    assert rows["input"].max_bytes >= 16 * 32 * FLOAT


def test_all_categories_together_change_as_the_trace_says(training: Training) -> None:
    capture = training.capture
    (found,), line = capture.categories, capture.memory.timeline("cpu")
    level = found.level_bytes
    assert int(level[-1]) - sum(found.start_bytes.values()) == line["net_bytes"][-1]
    assert abs(int(found.time_ns[0] - line["time_ns"][0])) < 2_000
    assert abs(int(found.time_ns[-1] - line["time_ns"][-1])) < 2_000


def test_both_files_are_torchs_and_tell_the_same(tmp_path: Path, training: Training) -> None:
    capture = training.capture
    for form, suffix in (("", ".json"), ("_raw", ".raw.json")):
        export = getattr(training.torchs, f"export_memory_timeline{form}")
        export(str(tmp_path / f"torchs{suffix}"), "cpu")
    times, sizes = json.loads((capture.folder / "memory_categories_cpu.json").read_text())
    assert [times, sizes] == json.loads((tmp_path / "torchs.json").read_text())
    raw = json.loads(
        gzip.decompress((capture.folder / "memory_categories_cpu.raw.json.gz").read_bytes())
    )
    assert raw == json.loads((tmp_path / "torchs.raw.json").read_text())
    level = [0] * len(CATEGORIES)
    for _, _, size, category in raw:
        level[category] += size
    assert level == sizes[-1][1:]


def test_it_turns_on_what_torch_needs() -> None:
    config = ProfilerConfig(memory_categories=True)
    needed = ("record_shapes", "profile_memory", "with_stack")
    assert all(getattr(config, name) for name in needed)
    told = "profiler.memory_categories=true turned profiler.record_shapes, profile_memory and with_stack on"
    assert [note.partition(":")[0] for note in config.notes] == [told]
    assert ProfilerConfig(memory_categories=True, **dict.fromkeys(needed, True)).notes == []


def test_unclassified(tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("no such key")

    # the other file is there already
    monkeypatch.setattr(MemoryProfileTimeline, "export_memory_timeline_raw", fail)
    capture, *_ = recorded(tmp_path)
    told = (
        "torch cannot classify the window's memory: no such key. The rest of the capture is kept."
    )
    assert log.at("WARNING") == [told]
    assert capture.categories == []
    assert len(capture.memory_categories) == 0
    assert len(capture.memory_devices) == 1
    assert [*capture.folder.glob("*categories*"), *capture.folder.glob(".*")] == []


def by_category(folder: Path) -> list[dict[str, Any]]:
    """The memory by category on the page that the sink writes into a capture's folder."""
    Memory().write(Capture.load(folder), folder)
    choices = parts(payload_of(folder / "memory.html"), "choice")
    return [
        item for choice in choices for item in choice["items"] if item["title"] == "by category"
    ]


def test_page_and_show(
    training: Training, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (item,) = by_category(copied)
    (chart,) = parts(item, "memory")
    assert "optimizer state" in [series["name"] for series in chart["series"]]
    cells = tables(item)["In use at the peak, by category"]["cells"]
    assert cells["at_peak_bytes"] == training.capture.memory_categories.column("at_peak_bytes")
    assert main(["show", str(copied), "--memory-categories"]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("Memory categories")
    assert lines[at + 1].split("  ")[0] == "device"
    assert any(line.startswith("cpu     parameter ") for line in lines[at:])


def by_hand(folder: Path, content: Any, device: str = "cuda-0") -> Capture:
    events = [step(3, 0, 1000), span("aten::mm", 100, 300)]
    capture = write_capture(folder, events, base_ns=1_000_000_000)
    (capture.folder / f"memory_categories_{device}.json").write_text(json.dumps(content))
    return capture


def test_each_number_is_that_of_its_column(tmp_path: Path) -> None:
    nothing = [0] * 9
    middle = [[0, 100, 0, 0, 0, 7, 0, 0, 0], [0, 100, 0, 0, 0, 9, 0, 0, 50]]
    sizes = [[0, 100, *nothing[2:]], *middle, nothing]
    capture = by_hand(tmp_path, [[1_000_200, 1_000_200, 1_000_300, 1_000_400], sizes])
    (found,) = capture.categories
    assert found.device == "cuda:0"
    assert found.time_ns.tolist() == [200_000, 200_000, 300_000, 400_000]
    assert [tuple(row) for row in capture.memory_categories] == [
        ("cuda:0", "parameter", 100, 100, 100, 0),
        ("cuda:0", "unknown", 50, 50, 0, 0),
        ("cuda:0", "activation", 9, 9, 0, 0),
    ]
    first_event = by_hand(tmp_path / "other", [[1_000_200, 1_000_300], middle])
    assert first_event.memory_categories.column("start_bytes") == [0, 0, 0], (
        "none of it was there before"
    )


@pytest.mark.parametrize(
    "content",
    [
        {},
        [[1], []],
        [[], []],
        [[1], [[0, 1]]],
        [["1"], [[0] * 9]],
        [[2**60], [[0] * 9]],
        [[1], [[0] * 10]],
    ],
)
def test_files_with_something_else_are_named(tmp_path: Path, content: Any) -> None:
    capture = by_hand(tmp_path, content)
    with pytest.raises(
        CaptureError, match=r"memory_categories_cuda-0\.json .*: remove (it|the file)\.$"
    ):
        capture.categories  # noqa: B018


def test_no_link_is_followed(tmp_path: Path) -> None:
    capture = by_hand(tmp_path, [[1], [[0] * 9]])
    file = capture.folder / "memory_categories_cuda-0.json"
    file.rename(tmp_path / "elsewhere.json")
    file.symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(CaptureError, match="cannot be read"):
        capture.categories  # noqa: B018


def test_a_page_of_a_capture_without_them_has_none(tmp_path: Path) -> None:
    capture, *_ = recorded(tmp_path, memory_categories=False, profile_memory=True)
    assert by_category(capture.folder) == []
    assert [*capture.folder.glob("memory_categories*")] == []


def test_a_window_in_which_nothing_is_allocated_tells_what_it_uses(tmp_path: Path) -> None:
    one, other = torch.ones(1000), torch.ones(1000)
    with Session(
        active=1, memory_categories=True, export="inline", output_dir=tmp_path, sinks={}
    ) as session:
        torch.equal(one, other)
        session.step()
    rows = session.captures[0].memory_categories
    assert [(row.start_bytes, row.at_peak_bytes, row.end_bytes) for row in rows] == [
        (8000, 8000, 8000)
    ]
    assert session.captures[0].categories[0].time_ns.tolist() == [0]


def test_files_of_other_names_are_left_alone(tmp_path: Path) -> None:
    capture = by_hand(tmp_path, [[1, 2], [[0] * 9] * 2])
    for name in ("cpu.raw.json", "cuda:0.json", "cpu\n.json", "..json", "copy of cpu.json"):
        (capture.folder / f"memory_categories_{name}").write_text("[[1, 2]]")
    assert [found.device for found in capture.categories] == ["cuda:0"]


def test_a_damaged_file_costs_the_page_its_part(copied: Path) -> None:
    (copied / "memory_categories_cpu.json").write_text("[[1784,1784],[[0,1")
    assert by_category(copied) == []
    said = words(payload_of(copied / "memory.html"))
    assert said.endswith("): remove it. The page does not show memory by category.")


def test_a_run_that_ends_before_its_time_does_not_wait_for_torch(tmp_path: Path, log: Log) -> None:
    session = Session(
        active=3, memory_categories=True, export="inline", output_dir=tmp_path, sinks={}
    )
    with pytest.raises(ZeroDivisionError), session:
        torch.ones(1 // len(session.captures))
    assert session.captures[0].categories == []
    sentence = "The window is saved without memory categories, because the process is ending."
    assert sentence in log.at("WARNING")


def test_torch_without_them(tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.profiler._memory_profiler", None)
    capture, *_ = recorded(tmp_path)
    assert capture.categories == []
    assert len(log.at("WARNING")) == 1

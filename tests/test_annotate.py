from __future__ import annotations

import copy
import io
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import view_text
from recording import recorded
from torch import nn

from instrument import Session, mark, profiled, range_pop, range_push
from instrument.annotate import backends


@profiled
def plain(x: int, *, scale: int = 2) -> int:
    """Scale a number."""
    return x * scale


@profiled("named")
def named(x: int) -> int:
    return plain(x) + 1


@profiled("layer")
class Layer(nn.Module):
    """A layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Outer(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


def test_qualified_or_given_name(tmp_path: Path) -> None:
    with recorded(tmp_path) as seen:
        assert named(3) == 7
    assert seen.ranges == [("named", None), ("plain", "named")]


@profiled(name="keyword")
def by_keyword(x: int) -> int:
    with profiled(name="block"):
        return x


def test_a_name_by_keyword_marks_a_function_or_a_block(tmp_path: Path) -> None:
    with recorded(tmp_path) as seen:
        assert by_keyword(3) == 3
    assert seen.ranges == [("keyword", None), ("block", "keyword")]


def test_nothing_is_recorded_while_not_armed(tmp_path: Path) -> None:
    with recorded(tmp_path) as seen:
        backends.disarm()
        named(3)
        with profiled("block"):
            Layer()(torch.ones(1, 3))
    assert seen.ranges == []


def test_a_subclass_that_calls_its_parent_and_a_module_that_was_saved(tmp_path: Path) -> None:
    outer = Outer()
    buffer = io.BytesIO()
    torch.save(outer, buffer)
    buffer.seek(0)
    again = torch.load(buffer, weights_only=False)
    with recorded(tmp_path) as seen:
        expected = outer(torch.ones(1, 3))
        assert torch.equal(copy.deepcopy(again)(torch.ones(1, 3)), expected)
    assert seen.names == ["layer", "layer"]


def test_an_exception_ends_the_range_and_goes_on_unchanged(tmp_path: Path) -> None:
    error = KeyError("mine")

    @profiled("fails")
    def fails() -> None:
        raise error

    with recorded(tmp_path) as seen:
        with pytest.raises(KeyError) as raised, profiled("block"):
            fails()
        with profiled("after"):
            pass
    assert raised.value is error
    assert seen.ranges == [("block", None), ("fails", "block"), ("after", None)]


def test_one_object_entered_from_two_threads_ends_each_threads_own_range(tmp_path: Path) -> None:
    block, inside, leave = profiled("block"), threading.Event(), threading.Event()

    def work() -> None:
        with block:
            inside.set()
            leave.wait(120)

    with recorded(tmp_path) as seen:
        thread = threading.Thread(target=work)
        with block:
            thread.start()
            inside.wait(120)
        leave.set()
        thread.join()
        with profiled("after"):
            pass
    # torch records only the thread that started the profiler and those that autograd starts
    assert seen.ranges == [("block", None), ("after", None)]
    assert block._open == {}


def test_record_function_writes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def events() -> list[dict[str, Any]]:
        with recorded(tmp_path) as seen, profiled("outer"):
            named(1)
        changing = {"ts", "dur", "External id", "Ev Idx"}
        return [
            {k: v for k, v in (event | event["args"]).items() if k not in {*changing, "args"}}
            for event in seen.raw
        ]

    cheap = events()
    monkeypatch.setattr(
        backends, "torch_backend", backends.Backend(backends._public_open, backends._public_close)
    )
    assert backends._torch().open is not backends._public_open, (
        "this torch has no cheap way to compare with"
    )
    assert events() == cheap
    assert len(cheap) == 3


def test_every_form_of_the_decorator() -> None:
    assert profiled()(len)([1]) == 1
    assert profiled("length")(len)([1, 2]) == 2
    assert repr(profiled("x")) == "profiled('x')"


def test_ranges_are_pushed_and_popped_where_no_block_fits(tmp_path: Path) -> None:
    with recorded(tmp_path) as seen:
        assert [range_push("outer"), range_push("inner")] == [0, 1]
        with profiled("block"):
            torch.ones(1)
        assert [range_pop(), range_push("second"), range_pop(), range_pop()] == [1, 1, 1, 0]
    assert seen.ranges == [
        ("outer", None),
        ("inner", "outer"),
        ("block", "inner"),
        ("second", "outer"),
    ]


def test_a_thread_pops_its_own_ranges_alone(tmp_path: Path) -> None:
    depths: list[int] = []
    with recorded(tmp_path, all_threads=True) as seen:
        range_push("mine")
        other = threading.Thread(
            target=lambda: depths.extend([range_push("theirs"), range_pop(), range_pop()])
        )
        other.start()
        other.join()
        assert range_pop() == 0
    assert depths == [0, 0, -1]
    assert seen.ranges == [("mine", None), ("theirs", None)]


def test_what_was_pushed_while_nothing_recorded_is_popped_in_the_window(tmp_path: Path) -> None:
    range_push("before")
    with recorded(tmp_path) as seen:
        range_push("within")
        assert [range_pop(), range_pop()] == [1, 0]
    assert seen.names == ["within"]


def test_moments_are_in_the_trace_and_no_ranges(tmp_path: Path) -> None:
    mark("nobody records")
    with Session(active=2, output_dir=tmp_path, sinks={}, export="inline") as session:
        for number in range(2):
            with profiled("epoch"):
                mark(f"batch {number} ‘ready’")
            session.step()
    (capture,) = session.captures
    rows = [(row.name, row.step) for row in capture.moments]
    assert rows == [("batch 0 ‘ready’", 0), ("batch 1 ‘ready’", 1)]
    first, second = capture.moments.column("start_ns")
    assert capture.steps[0].start_ns < first < capture.steps[1].start_ns < second
    assert capture.ranges.column("path") == ["epoch"]
    assert "batch 0" in view_text(capture, "moments")


def test_moments_reach_nvtx_and_itt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    emitting = backends.Backend(
        lambda name: told.append(f"open {name}"), lambda _: told.append("close"), told.append
    )
    backends.arm(emitting)
    mark("now")
    mark("half \ud800")
    range_push("pushed")
    range_pop()
    backends.disarm(emitting)
    mark("later")
    assert told == ["now", r"half \ud800", "open pushed", "close"]


def test_compiled_code_leaves_moments_and_pushed_ranges_out(tmp_path: Path) -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def compiled(x: torch.Tensor) -> torch.Tensor:
        range_push("region")
        mark("inside")
        y = x + 1
        range_pop()
        return y

    with recorded(tmp_path) as seen:
        assert compiled(torch.ones(1)).item() == 2
    assert "region" not in seen.names
    assert not [name for name in seen.names if "inside" in name]
    assert range_push("outside") == 0
    assert range_pop() == 0

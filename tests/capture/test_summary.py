"""What a notebook shows of a capture."""

from __future__ import annotations

import re

from made_captures import kernels, steps, write_capture

from instrument.capture import Capture


def names(html: str) -> list[str]:
    """The first cell of each row of each table."""
    return re.findall(r"<tr><td[^>]*>([^<]*)</td>", html)


def test_a_capture_shows_its_ranges_as_a_tree_and_its_costliest_operators(tmp_path) -> None:
    shown = write_capture(tmp_path, steps() + kernels())._repr_html_()
    assert f"<b>steps_3-4: steps 3–4, torch 2.13.0+cpu, no device</b><br>{tmp_path / 'steps_3-4'}</p>" in shown
    assert names(shown)[:4] == ["forward", "  attention", "(no range)", "aten::mm"]
    assert "<p>Operators, 3 of 3, by self_device_ns; share: self, of " in shown
    assert 'title="100,000 ns">100.000 µs</td>' in shown
    assert ', <code title="Every event with a duration, and memory, as columns.">events</code>, ' in shown


def test_without_a_device_the_hosts_own_time_decides(tmp_path) -> None:
    shown = write_capture(tmp_path, steps())._repr_html_()
    assert names(shown)[2:] == ["(no range)", "aten::mm", "aten::relu"]
    assert "<p>Nothing is known of device_ns, self_device_ns, " in shown


def test_of_many_ranges_those_with_the_most_host_time_are_shown_in_order(tmp_path) -> None:
    events = [{**steps()[1], "name": f"range<{k}>", "ts": 1000 * k, "dur": 1 + k % 25} for k in range(50)]
    shown = write_capture(tmp_path, events)._repr_html_()
    assert (
        "<p>Ranges, the 20 of 50 with the most host time; share: self total, with the backward it caused, of " in shown
    )
    assert names(shown)[:20] == [f"range&lt;{k}&gt;" for k in [*range(15, 25), *range(40, 50)]]


def test_what_cannot_be_shown_is_told(tmp_path) -> None:
    assert "<p>No ranges: mark code with " in write_capture(tmp_path, [], "empty")._repr_html_()
    capture = write_capture(tmp_path, steps(), "a<b")
    capture.trace_path.write_text("{")
    shown = Capture.load(capture.folder)._repr_html_()
    assert "<b>a&lt;b</b><br>The trace file " in shown
    assert "is cut short" in shown
    assert "<table" not in shown


def test_completion_finds_every_view() -> None:
    views = re.findall(r"<code[^>]*>(\w+)(?:\(\))?</code>", Capture(None, None, {})._repr_html_())
    assert {"events", "operators", "ranges", "stacks", "steps"} <= set(views) <= set(dir(Capture(None, None, {})))

"""The steps."""

from __future__ import annotations

from capture.traces import annotation, capture, span


def test_steps_are_in_order_with_their_numbers(tmp_path) -> None:
    events = [
        annotation("ProfilerStep#12", 50, 8.5),
        annotation("ProfilerStep#11", 10, 20),
        annotation("ProfilerStep#x", 70, 1),
        span("ProfilerStep#13", 60, 1, cat="Operator"),  # torch before 1.12
        span("ProfilerStep#11", 12, 30, cat="gpu_user_annotation", tid=100),
    ]
    steps = capture(tmp_path, events).steps
    assert steps.columns == ("number", "start_ns", "duration_ns")
    assert [tuple(row) for row in steps] == [(11, 10000, 20000), (12, 50000, 8500), (13, 60000, 1000)]

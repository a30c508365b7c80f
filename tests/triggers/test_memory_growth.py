from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import warm

from instrument import Session
from instrument.record import limits
from instrument.record.triggers import Step, memory_growth
from instrument.record.triggers.memory_growth import MemoryGrowth

MIB = 1024**2


def said(
    monkeypatch: pytest.MonkeyPatch, sizes: Sequence[int], recorded: Sequence[int] = ()
) -> dict[int, str]:
    """What it says after which steps, for a process of these sizes, over 20 steps."""
    now = iter(sizes)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(memory_growth, "_resident_bytes", lambda: next(now))
    hooks = MemoryGrowth(over=20, at_least_bytes=10 * MIB).begin(Path(), [].append)
    found = {}
    for number in range(len(sizes)):
        hooks.poll()
        answer = hooks.fires(Step(number, 1, recorded=number in recorded))
        if answer:
            found[number] = str(answer)
    return found


def test_a_leak_is_found_and_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [100 * MIB + number * MIB for number in range(45)]
    assert said(monkeypatch, sizes) == {
        20: "memory grew by 20.00 MiB from step 0 to 20, from 100.0 MiB to 120.0 MiB",
        42: "memory grew by 20.00 MiB from step 22 to 42, from 122.0 MiB to 142.0 MiB",
    }


def test_what_is_no_leak_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    saw = [100 * MIB + (number % 15) * MIB for number in range(100)]
    assert said(monkeypatch, saw) == {}, "falls again and again"
    assert said(monkeypatch, [100 * MIB + number * MIB // 4 for number in range(100)]) == {}, (
        "too little"
    )
    assert said(monkeypatch, [100 * MIB] * 50 + [500 * MIB] * 50) == {}, "made once"


def test_windows_make_it_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [100 * MIB + number * MIB for number in range(40)]
    assert list(said(monkeypatch, sizes, recorded=[10, 11])) == [32]


def test_with_a_device_the_allocator_is_asked_at_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "memory_allocated", lambda: asked.append(1) or len(asked) * 20 * MIB
    )
    hooks = MemoryGrowth(over=50).begin(Path(), [].append)
    assert hooks.poll is None
    answers = [hooks.fires(Step(number, 1)) for number in range(51)]
    assert answers[50] == "memory grew by 200.0 MiB from step 0 to 50, from 20.00 MiB to 220.0 MiB"
    assert not any(answers[:50])
    assert len(asked) == 11


def test_its_windows_record_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grown = iter(range(100, 10_000, 20))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(memory_growth, "_resident_bytes", lambda: next(grown) * MIB)
    options = {"at_steps": [2], "active": 1, "export": "inline", "sinks": {}}
    options |= {"triggers": {"memory_growth": {"over": 10}}}
    with Session(options, output_dir=tmp_path) as session:
        triggers = session._loop.run.triggers._triggers.items()
        hooks = {name: each.callbacks for name, each in triggers}
        for _ in session.steps(range(30)):
            hooks["memory_growth"].poll()
            torch.ones(1000).sum()
    by_trigger = {capture.metadata["window"]["trigger"]: capture for capture in session.captures}
    assert set(by_trigger) == {None, "memory_growth"}
    for trigger, capture in by_trigger.items():
        known = [each.cpu_bytes for each in capture.operators if each.cpu_bytes is not None]
        assert bool(known) == capture.metadata["config"]["profile_memory"] == (trigger is not None)


def test_resident_size(monkeypatch: pytest.MonkeyPatch) -> None:
    statm = {Path("/proc/self/statm"): "9000 700 200 5 0 600 0\n"}  # in pages
    monkeypatch.setattr(Path, "read_text", lambda path, **_: statm[path])
    monkeypatch.setattr(limits, "_free_bytes", lambda: 0)
    page = os.sysconf("SC_PAGE_SIZE")
    assert (memory_growth._resident_bytes(), limits.resident_bytes()) == (700 * page, 500 * page)


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_the_resident_size_is_that_which_the_system_tells() -> None:
    code = """
        from pathlib import Path
        from instrument.record.limits import resident_bytes
        from instrument.record.triggers.memory_growth import _resident_bytes
        before, keep = resident_bytes(), b"x" * (300 * 2**20)
        status = Path("/proc/self/status").read_text()
        print(_resident_bytes() / 1024 / int(status.partition("VmRSS:")[2].split()[0]))
        print((resident_bytes() - before) / len(keep))
    """
    for ratio in warm.run_code(code).stdout.split():
        assert 0.9 < float(ratio) < 1.1

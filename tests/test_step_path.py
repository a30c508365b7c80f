"""How many calls, and through how many files, a step takes: what a reader has to follow."""

from __future__ import annotations

import json

import pytest
import warm

# In a process of its own: modules that other tests marked would be looked at too.
PROGRAM = """
import gc, json, sys
from pathlib import Path

import torch
import instrument
from instrument import Session

gc.disable()  # in a window, a collection calls us, whatever the step does
home, found = Path(instrument.__file__).parent, []


def note(frame, event, _):
    file = Path(frame.f_code.co_filename)
    if event == "call" and home in file.parents:
        found[-1].append((file.relative_to(home).as_posix(), frame.f_code.co_name))


with Session(wait=3, warmup=1, active=2, repeat=2, output_dir=sys.argv[1], sinks={"table": {}}) as session:
    for _ in range(16):
        torch.ones(2).sum()
        found.append([])
        sys.setprofile(note)
        session.step()
        sys.setprofile(None)
assert len(session.captures) == 2
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[list[tuple[str, str]]]:
    """The file and name of each function of ours that each `step()` of a run calls; steps 4–5 and 10–11 are recorded.

    With the worker, which the first window starts; one rank, no triggers, no `model=`.
    """
    folder = tmp_path_factory.mktemp("run")
    done = warm.run_code(PROGRAM, str(folder))
    assert done.returncode == 0, done.stderr
    return [[(file, name) for file, name in calls] for calls in json.loads(done.stdout)]


@pytest.mark.parametrize("number", [0, 1, 6, 7, 12, 15])
def test_waiting_step_is_three_calls(steps: list[list[tuple[str, str]]], number: int) -> None:
    calls = [each for each in steps[number] if each != ("record/finisher.py", "has_news")]
    assert calls[0] == ("record/session.py", "step")
    assert len(calls) <= 3, calls
    assert len(steps[number]) - len(calls) <= 1, "while a window is exported"
    assert len({file for file, _ in calls}) <= 2


def test_the_end_of_a_window_passes_through_few_files(steps: list[list[tuple[str, str]]]) -> None:
    calls = steps[11]
    assert {"_end_window", "save", "queue", "_wake"} <= {name for _, name in calls}, (
        "it is a step that ends a window"
    )
    # the comparison of the recorded steps with those before is one pure function to a reader, and a
    # comprehension is no call
    followed = [(f, name) for f, name in calls if f != "base/step_times.py" and name[0] != "<"]
    assert len(followed) <= 92, followed
    assert len({file for file, _ in calls}) <= 14, {file for file, _ in calls}

"""Loads torch once; then forks for each line of tests and seconds on standard input, and prints what came of it."""

from __future__ import annotations

import ast
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import loguru  # noqa: F401
import numpy  # noqa: F401
import omegaconf  # noqa: F401
import pydantic  # noqa: F401
import pytest
import torch.profiler  # noqa: F401

_OUTPUT = Path("tmp-output")
_OPTIONS = ("-x", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", "--hypothesis-seed=0")


def run(tests: list[str]) -> int:
    """Run some tests in a process group of its own; what they print is not shown."""
    os.setsid()
    output = os.open(_OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), output, output)):
        os.dup2(file, number)
    return int(pytest.main([*_OPTIONS, *tests]))


def waited(child: int, timeout_s: float) -> str:
    """`passed`, `timed out` or `failed` with the name of a test; nothing that the child started goes on."""
    ends = time.monotonic() + timeout_s
    while not (done := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < ends:
        time.sleep(0.05)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not done[0]:
        os.waitpid(child, 0)
        return "timed out"
    if (code := os.waitstatus_to_exitcode(done[1])) == 0:
        return "passed"
    lines = _OUTPUT.read_text(errors="replace").splitlines()
    return next(
        (
            f"failed {line.split(' - ')[0]}"
            for line in lines
            if line.startswith(("FAILED", "ERROR"))
        ),
        f"failed exit {code}",
    )


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, which the tests' own settings add again
    for line in sys.stdin:
        tests, timeout_s = ast.literal_eval(line)
        if not (child := os.fork()):
            os._exit(run(tests))
        print(waited(child, timeout_s), flush=True)

"""Random programs of calls, blocks, exceptions, generators and threads: their ranges are what ran."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st
from recording import recorded

from instrument import profiled
from instrument.annotate import backends
from instrument.annotate.wrapper import RESUMED

# A program is a list of steps: ("call" | "block" | "generator" | "method" | "shared", its own steps),
# ("raise",), ("arm",), ("disarm",), or ("catch", steps).
Program = list[tuple[Any, ...]]


def programs() -> st.SearchStrategy[Program]:
    def deeper(inner: st.SearchStrategy[Program]) -> st.SearchStrategy[Program]:
        kinds = ["call", "block", "generator", "method", "shared", "catch", "thread"]
        return st.lists(
            st.one_of(
                st.tuples(st.sampled_from(kinds), inner),
                st.just(("raise",)),
                st.just(("arm",)),
                st.just(("disarm",)),
            ),
            max_size=4,
        )

    return st.recursive(st.just([]), deeper, max_leaves=25)


class Stop(Exception):  # noqa: N818 - it is no error
    pass


@dataclass
class Model:
    """What should be recorded: per thread, the open ranges and each range's (name, parent)."""

    armed: bool = True
    ranges: dict[int, list[tuple[str, str | None]]] = field(default_factory=dict)
    open: dict[int, list[str]] = field(default_factory=dict)
    count: int = 0

    def enter(self, name: str) -> bool:
        if not self.armed:
            return False
        mine = self.open.setdefault(threading.get_ident(), [])
        self.ranges.setdefault(threading.get_ident(), []).append((name, mine[-1] if mine else None))
        mine.append(name)
        return True

    def leave(self, entered: bool) -> None:
        if entered:
            self.open[threading.get_ident()].pop()

    def name(self, kind: str) -> str:
        self.count += 1
        return f"{kind}{self.count}"


class Runner:
    """Runs a program with real annotations, and keeps the model beside them."""

    def __init__(self) -> None:
        self.model = Model()
        self.shared = profiled("shared")

    def run(self, program: Program) -> None:
        for kind, *rest in program:
            getattr(self, f"do_{kind}")(*rest)

    def inside(self, name: str, program: Program) -> None:
        entered = self.model.enter(name)
        try:
            self.run(program)
        finally:
            self.model.leave(entered)

    def do_call(self, program: Program) -> None:
        name = self.model.name("call")
        profiled(name)(lambda: self.inside(name, program))()

    def do_method(self, program: Program) -> None:
        name = self.model.name("method")

        class Holder:
            @profiled(name)
            def run(holder) -> None:  # noqa: N805
                self.inside(name, program)

        Holder().run()

    def do_block(self, program: Program) -> None:
        name = self.model.name("block")
        with profiled(name):
            self.inside(name, program)

    def do_shared(self, program: Program) -> None:
        with self.shared:
            self.inside("shared", program)

    def do_generator(self, program: Program) -> None:
        name = self.model.name("generator")

        @profiled(name)
        def slices() -> Iterator[None]:
            for i, step in enumerate([*program, None]):
                # the suffix is that of each slice after the first
                self.inside(name + (RESUMED if i else ""), [step] if step else [])
                yield

        for _ in slices():
            pass
        entered = self.model.enter(name + RESUMED)  # the slice that finds the end
        self.model.leave(entered)

    def do_raise(self) -> None:
        raise Stop

    def do_catch(self, program: Program) -> None:
        with suppress(Stop):
            self.run(program)

    def do_arm(self) -> None:
        self.switch(True)

    def do_disarm(self) -> None:
        self.switch(False)

    def switch(self, on: bool) -> None:
        self.model.armed = on
        (backends.arm if on else backends.disarm)()

    def do_thread(self, program: Program) -> None:
        thread = threading.Thread(target=self.do_catch, args=(program,))
        thread.start()
        thread.join()


def start(program: Program) -> Runner:
    runner = Runner()
    runner.switch(True)
    try:
        runner.do_catch(program)
    finally:
        backends.disarm()
    return runner


def flat(ranges: dict[int, list[tuple[str, str | None]]]) -> list[tuple[str, str | None]]:
    return sorted(((name, parent) for mine in ranges.values() for name, parent in mine), key=str)


@settings(max_examples=max(150, settings().max_examples))  # they take a second
@given(programs())
# rarely found by chance
@example([("shared", [("disarm",), ("shared", []), ("arm",), ("call", [])])])
@example([("disarm",), ("generator", [("arm",), ("call", [])])])
@example([("catch", [("shared", [("shared", [("raise",)])])]), ("call", [])])
def test_ranges_of_random_programs_open_and_close_as_the_program_runs(program: Program) -> None:
    seen = Model()
    wrong: list[str] = []

    def closes(name: str) -> None:
        if seen.open[threading.get_ident()].pop() != name:
            wrong.append(name)

    def opens(name: str) -> str:
        seen.enter(name)
        return name

    before, backends.torch_backend = backends.torch_backend, backends.Backend(opens, closes)
    try:
        runner = start(program)
    finally:
        backends.torch_backend = before
    assert wrong == []
    assert not any(seen.open.values())
    assert flat(seen.ranges) == flat(runner.model.ranges)


@given(programs())
def test_the_trace_of_a_random_program_holds_its_ranges(program: Program) -> None:
    run: Callable[[], Runner] = lambda: start(program)  # noqa: E731
    with TemporaryDirectory() as folder, recorded(Path(folder), all_threads=True) as seen:
        runner = run()
    assert sorted(seen.ranges, key=str) == flat(runner.model.ranges)

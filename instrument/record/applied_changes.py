"""Applies changes of `instrument.record.changes` to a script from outside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch.optim import Optimizer
from torch.utils.data import DataLoader

from instrument.base.files import CHANGES_VARIABLE
from instrument.base.log import logger
from instrument.record.changes import CHANGES, Program, parse
from instrument.record.parameters import alive
from instrument.record.unedited import Watch

Chosen = tuple[str, str]  # the name of a change, and its value


def variables(text: str) -> dict[str, str]:
    """The variables that must be set before a process starts, for the changes that `text` names."""
    found = {CHANGES_VARIABLE: text}
    for name, value in parse(text):
        if (environment := CHANGES[name].environment) is not None:
            found |= environment(value)
    return found


@dataclass
class AppliedChanges:
    """The changes that are made to a script: some before it begins, the others between its steps.

    Attributes:
        given: the changes that the whole run has.
        switched: those that are on, of the changes that can be switched between steps.
    """

    given: Sequence[Chosen] = ()
    switched: list[Chosen] = field(default_factory=list)
    _offs: list[Callable[[], None]] = field(default_factory=list)
    _fitting: set[str] = field(default_factory=set)

    def prepare(self) -> None:
        """Make the changes that must be made before the script builds its objects."""
        for name, value in self.given:
            if (prepare := CHANGES[name].prepare) is not None:
                prepare(value)

    def switch(self, program: Program, more: Sequence[Chosen] = ()) -> None:
        """Switch on, between two steps, exactly the given changes and `more`."""
        wanted = [each for each in [*self.given, *more] if CHANGES[each[0]].on is not None]
        if wanted == self.switched:
            return
        self.switched = []  # until all are on
        while self._offs:
            self._offs.pop()()
        # all before any is on: one that is on can hide what another one looks for, also afterwards
        for name in {name for name, _ in wanted} - self._fitting:
            if CHANGES[name].fits(program):
                self._fitting.add(name)
        for name, value in wanted:
            change = CHANGES[name]
            if name not in self._fitting:
                logger.warning("The change {} does not fit this script: it is not made.", name)
            elif change.on is not None:
                self._offs.append(change.on(program, value))
        self.switched = wanted


def program_of(watch: Watch) -> Program:
    """What is known of the running script; this reads all objects of the process."""
    return Program(watch.models(), alive(Optimizer), alive(DataLoader), watch.autocast)

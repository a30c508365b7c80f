"""Simulate a change; the result is None if the change cannot be simulated."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from instrument.errors import InstrumentError
from instrument.trace.events import Ints

if TYPE_CHECKING:
    from instrument.whatif.scenario import Scenario


def simulated(edit: Callable[[], Scenario]) -> Scenario | None:
    """Return the scenario that `edit` makes; None if its step cannot be simulated.

    The step is simulated at once, so that reading the saving of a finding cannot fail later.
    """
    try:
        scenario = edit()
        scenario.saving_ns  # noqa: B018 - raises if the step cannot be simulated
    except InstrumentError:
        return None
    return scenario


def scaled(whatif: Scenario, events: Ints, by: float = 0) -> Scenario | None:
    """Return the simulation in which the time of CPU events and of their device work is multiplied.

    `by` is the factor. The result is None if the capture cannot be simulated.
    """
    return simulated(lambda: whatif.scale_events(events, by=by))


def is_worth(scenario: Scenario | None, least_share: float) -> bool:
    """Whether a change saves at least this share of the step; True if its saving is unknown."""
    return scenario is None or scenario.saving_ns >= least_share * scenario.baseline_ns

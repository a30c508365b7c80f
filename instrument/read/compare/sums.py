"""`Sums`: what the counted steps of captures did, summed by range, operator, shapes and kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import polars as pl

from instrument.read.compare.counters import Counters
from instrument.read.facts.device_work import KINDS as DEVICE_KINDS
from instrument.read.facts.idle import lasting_steps
from instrument.read.facts.segments import plain_path, segments
from instrument.read.views.operators import shape_text
from instrument.read.views.table import known_sum
from instrument.read.views.views import Views

#: The columns that name the rows of each frame.
KEYS: Mapping[str, tuple[str, ...]] = {
    "parts": ("range", "kind"),
    "ranges": ("range",),
    "operators": ("name",),
    "shapes": ("name", "input_shapes"),
    "kernels": ("name", "kind"),
    "counters": ("range", "counter"),
}
PEAK = "peak_bytes"  # the counter that is a maximum, and not a sum
_NO_CALLS = ("range", "step", "mark")


@dataclass(frozen=True)
class Sums:
    """Sums over the counted steps of one or several captures; see `CountedSteps`.

    Attributes:
        captures: the names of the captures.
        what: "step", or "recording" if a capture has no finished steps, so that its whole recording
            is summed.
        steps_ns: the duration of each step, until the device has ended what it launched.
        counter_steps: the number of steps over which the counters are summed.
        frames: by the names in `KEYS`, a frame with the keys and a column for each quantity, which
            is null if it is not known. `parts` sums exactly to the steps. In `counters`, the range
            of whole steps is null.
    """

    captures: tuple[str, ...]
    what: Literal["step", "recording"]
    steps_ns: tuple[int, ...]
    counter_steps: int
    frames: Mapping[str, pl.DataFrame]

    def __getitem__(self, name: str) -> pl.DataFrame:
        return self.frames[name]

    @property
    def steps(self) -> int:
        """The number of steps, at least 1."""
        return max(len(self.steps_ns), 1)


class Samples(NamedTuple):
    """The captures of one side: the sums of each sample, and of all together.

    A sample is what the user gave as one path; intervals need three of them on each side.
    """

    each: Sequence[Sums]
    all: Sums

    @classmethod
    def of(cls, every: Sequence[Sums]) -> Samples:
        """Add the samples of one side."""
        return cls(every, added(every))


def sums_of(capture: Views, counted: Counters) -> Sums:
    """Sum the counted steps of a capture.

    Raises:
        CaptureError: the capture holds no trace.
        TraceError: the trace cannot be read.
    """
    links = capture.links
    span = lasting_steps(links, capture.work).only(links.counted_steps.kept)
    parts = segments(capture, "step").filter("counted")
    frames = {"parts": parts.select("kind", range="path", ns="duration_ns")}
    frames |= _of_events(capture)
    own = frames["parts"].select("range", step_ns="ns")
    frames["ranges"] = pl.concat([frames["ranges"], own], how="diagonal")
    frames["counters"] = _of_counters(counted)
    return Sums(
        captures=(capture.name,),
        what=span.what,
        steps_ns=tuple((span.end_ns - span.start_ns).tolist()),
        counter_steps=counted.steps,
        frames={name: summed(name, frame) for name, frame in frames.items()},
    )


def added(every: Iterable[Sums]) -> Sums:
    """Add the sums of several captures."""
    listed = list(every)
    return Sums(
        captures=tuple(name for each in listed for name in each.captures),
        what="step" if all(each.what == "step" for each in listed) else "recording",
        steps_ns=tuple(ns for each in listed for ns in each.steps_ns),
        counter_steps=sum(each.counter_steps for each in listed),
        frames={name: summed(name, pl.concat([each[name] for each in listed])) for name in KEYS},
    )


def summed(name: str, frame: pl.DataFrame) -> pl.DataFrame:
    """Sum the rows of a frame with equal keys; a sum of unknown quantities is unknown."""
    keys, quantity = list(KEYS[name]), pl.exclude(KEYS[name])
    total = known_sum(quantity)
    if name == "counters":
        total = pl.when(pl.col("counter").first() == PEAK).then(quantity.max()).otherwise(total)
    return frame.group_by(keys, maintain_order=True).agg(total)


def _of_events(capture: Views) -> dict[str, pl.DataFrame]:
    events = capture.facts.events(
        "kind", "name", "path", "shapes", "call", "parent", "own_ns", "own_device_ns",
        "duration_ns", "own_cpu_bytes", "own_device_bytes", "flops", "bytes", "counted",
    )  # fmt: skip
    # torch counts an operator that is alone in one of the same name as a part of it.
    outer = pl.when("call").then("shapes").otherwise(pl.col("shapes").gather(pl.col("parent")))
    events = events.with_columns(input_shapes=outer).filter("counted")
    events = events.with_columns(
        name=_mapped(events["name"], plain_path),
        range=_mapped(events["path"], plain_path),
        input_shapes=_mapped(events["input_shapes"], lambda text: shape_text(text.encode())),
    )
    kind, is_call = pl.col("kind"), pl.col("own_ns").is_not_null()
    on_device = kind.is_in(DEVICE_KINDS)
    has_device = len(capture.work.event) > 0
    calls = events.filter(is_call & ~kind.is_in(_NO_CALLS)).select(
        "name",
        pl.col("input_shapes").fill_null("[]"),
        calls=pl.col("call").cast(pl.Int64),
        self_cpu_ns="own_ns",
        self_device_ns="own_device_ns",
        self_cpu_bytes="own_cpu_bytes",
        self_device_bytes="own_device_bytes",
        flops="flops",
    )
    of_ranges = events.filter(pl.col("range").is_not_null() & (is_call | on_device)).select(
        "range",
        calls=kind.is_in(["range", "loader"]).cast(pl.Int64),
        self_cpu_ns="own_ns",
        self_device_ns=pl.when(on_device).then("duration_ns").otherwise(0 if has_device else None),
        flops="flops",
    )
    kernels = events.filter(on_device).select(
        "name",
        kind=kind.replace("memset", "copy"),
        calls=pl.lit(1, pl.Int64),
        device_ns="duration_ns",
        bytes="bytes",
    )
    has_shapes = events["shapes"].count() > 0
    return {
        "ranges": of_ranges,
        "operators": calls.drop("input_shapes"),
        "shapes": calls if has_shapes else calls.clear(),
        "kernels": kernels,
    }


def _mapped(column: pl.Series, text_of: Callable[[str], str]) -> pl.Series:
    """Replace each text; each distinct one is converted once."""
    texts = column.unique().drop_nulls().to_list()
    return column.replace({text: new for text in texts if (new := text_of(text)) != text})


def _of_counters(counted: Counters) -> pl.DataFrame:
    whole = [(None, name, count and count.total) for name, count in counted.counts.items()]
    inside = [
        (plain_path(path), name, count.total)
        for path, counts in counted.ranges.items()
        for name, count in counts.items()
    ]
    schema = {"range": pl.String, "counter": pl.String, "value": pl.Int64}
    return pl.DataFrame([*whole, *inside], schema, orient="row")

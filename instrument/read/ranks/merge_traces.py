"""Merge the traces of a window's ranks into one file, on one clock, for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, suppress
from decimal import Decimal
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Raw

from instrument.base.files import replacing
from instrument.read.ranks.run import Ranks
from instrument.read.trace.events import decoded
from instrument.read.trace.gzip_stream import Source
from instrument.read.trace.json_stream import Pieces
from instrument.read.trace.rewrite import writing
from instrument.read.views.views import Views

# Arguments that link events of one rank by equal numbers, each with its smallest valid number.
# Different ranks use the same numbers, so a different multiple of 2**40 is added for each rank.
# Viewers in JavaScript hold integers up to 2**53: enough for 8192 ranks.
_JOINING = {
    "correlation": 1, "External id": 1, "external id": 1, "Sequence number": 0,
    "Python id": 0, "Python parent id": 0,
}  # fmt: skip
_RANK_OFFSET = 2**40
_LONGEST_NUMBER = 19  # digits of a 64-bit integer
# Kineto's sort index of a CPU process is the number of the process. The sort index of a device is
# `_DEVICES` plus the number of the device. Kineto's own spans have larger sort indices. Within a
# rank, the CPU comes first, then the devices, then these spans.
_DEVICES = 2**24
_PLACES = 1000

_Event = dict[str, Raw]
_Clock = tuple[Decimal, Decimal]  # the arguments of `_convert`
_SAME, _NS = (Decimal(1), Decimal(0)), Decimal("0.001")
_EVENTS = msgspec.json.Decoder(list[_Event])
_ARGS = msgspec.json.Decoder(_Event)


def merge(ranks: Ranks, target: Path) -> int:
    """Write the ranks' traces into one file; return how many. After an error, no file is left.

    The file is gzipped if its name ends in `.gz`. The name of each process begins with its rank.
    Numbers that link events (flows, correlations, operators, sequences) are changed, so that no two
    ranks use the same numbers. All times and durations are converted to the lowest rank's clock by
    `Ranks.clocks`, which is the key `ranks` of the file; a rank without a known clock is not moved.
    All other content is copied.

    Cost: one pass over the files in constant memory, 5 to 7 µs per event.

    Raises:
        CaptureError: no capture holds a trace.
        TraceError: a trace cannot be read.
        OSError: the target cannot be written.
    """
    traces = [Views.load(path).trace_path for path in ranks.paths]
    if not any(traces):
        Views.load(ranks.paths[0]).require_trace()
    base_ns = ranks.summaries[0].base_ns
    head = {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base_ns,
        "traceName": target.name,
        "ranks": ranks.clocks.to_dicts(),
    }
    numbers = count(1)
    with replacing(target) as raw, writing(raw, target) as file:
        file.write(msgspec.json.encode(head)[:-1] + b',"traceEvents":[')
        between = b"\n"
        clocks = ranks.measured_clocks
        every = zip(traces, ranks.summaries, *map(np.ndarray.tolist, clocks[1:4]))
        for position, (trace, summary, offset_ns, drift, at_ns) in enumerate(every):
            later_ns = summary.base_ns - base_ns - offset_ns
            later = Decimal(later_ns) + Decimal(drift) * (at_ns - summary.base_ns)
            clock = (1 - Decimal(drift), later / 1000)
            rank = _Rank(position, summary.rank, clock, numbers)
            for event in _events(trace, rank) if trace is not None else ():
                file.write(between + msgspec.json.encode(event))
                between = b",\n"
        file.write(b"\n]}\n")
    return len(traces) - traces.count(None)


def _events(trace: Path, rank: _Rank) -> Iterator[_Event]:
    with closing(Source(trace)) as source:
        for piece in Pieces(source, trace, _decode, _encoded):
            yield from map(rank.event, piece)
    yield from rank.names()


def _decode(text: bytes) -> list[_Event]:
    text.decode()  # raises for invalid UTF-8, which the decoder accepts
    return _EVENTS.decode(text)


def _encoded(event: dict[str, Any], _: str = "") -> _Event:
    return {key: _raw(value) for key, value in event.items()}


def _raw(value: Any) -> Raw:
    return Raw(json.dumps(value).encode())


class _Rank:
    """Changes the process, times and ids of one rank's events, so that the traces can be merged."""

    def __init__(
        self, position: int, rank: int | None, clock: _Clock, numbers: Iterator[int]
    ) -> None:
        self._position, self._rank = position, rank
        self._clock, self._numbers = clock, numbers
        self._processes: dict[bytes, int] = {}
        self._unnamed: dict[int, str] = {}

    def event(self, event: _Event) -> _Event:
        """Change the process, time and ids (such as `correlation`) of an event, in place."""
        pid = bytes(event.get("pid", b"0"))
        if pid not in self._processes:
            self._processes[pid] = next(self._numbers)
            self._unnamed[self._processes[pid]] = pid.decode().strip('"')
        process = self._processes[pid]
        event["pid"] = Raw(b"%d" % process)
        if "ts" in event and self._clock != _SAME:
            _convert(event, *self._clock)
        if bytes(event.get("ph", b"")) == b'"M"':
            self._describe(event, process)
        elif self._position:
            self._keep_apart(event)
        return event

    def names(self) -> Iterator[_Event]:
        """Yield a naming event for each process that has no name in the trace."""
        for process, before in self._unnamed.items():
            args = {"name": f"rank {self._rank}: {before}"}
            named = {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": args}
            yield _encoded(named)

    def _describe(self, event: _Event, process: int) -> None:
        name, args = (decoded(bytes(event.get(key, b"null"))) for key in ("name", "args"))
        if name == "process_name" and isinstance(args, dict):
            self._unnamed.pop(process, None)
            event["args"] = _raw(args | {"name": f"rank {self._rank}: {args.get('name', '')}"})
        elif name == "process_sort_index" and isinstance(args, dict):
            index = args.get("sort_index")
            place = 1 + index - _DEVICES if isinstance(index, int) else 0
            sort_index = self._position * _PLACES + min(max(place, 0), _PLACES - 1)
            event["args"] = _raw(args | {"sort_index": sort_index})

    def _keep_apart(self, event: _Event) -> None:
        for key in ("id", "bind_id"):
            if key in event:
                event[key] = self._moved(event[key], 0)
        if bytes(event.get("args", b""))[:1] == b"{":
            args = _ARGS.decode(event["args"])
            args |= {
                key: self._moved(args[key], least) for key, least in _JOINING.items() if key in args
            }
            event["args"] = Raw(msgspec.json.encode(args))

    def _moved(self, number: Raw, least: int) -> Raw:
        text = bytes(number)
        if text.startswith(b'"'):
            return Raw(b'"%d.%b' % (self._position, text[1:]))
        if not text.isdigit() or len(text) > _LONGEST_NUMBER or int(text) < least:
            return number
        return Raw(b"%d" % (int(text) + self._position * _RANK_OFFSET))


def _convert(event: _Event, rate: Decimal, later_us: Decimal) -> None:
    """Multiply the time and the duration by `rate`, then add `later_us` to the time, in place.

    Values that are not numbers stay unchanged.
    """
    with suppress(ArithmeticError):
        time = Decimal(bytes(event["ts"]).decode())
        begin = (time * rate + later_us).quantize(_NS)
        event["ts"] = Raw(f"{begin:f}".encode())
        if rate != 1 and "dur" in event:  # from the end, so that ends that are equal stay equal
            end = (time + Decimal(bytes(event["dur"]).decode())) * rate + later_us
            event["dur"] = Raw(f"{end.quantize(_NS) - begin:f}".encode())

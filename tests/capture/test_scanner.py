"""The compiled scanner gives what decoding gives, to the last column, or gives up."""

from __future__ import annotations

import gzip
import json
import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import real_traces
from fuzz.oracle import is_scanned_as_decoded
from hypothesis import given
from hypothesis import strategies as st

from capture.conftest import each_body
from capture.plain_loops import same
from instrument.base.errors import TraceError
from instrument.read.trace import reader, scanner
from instrument.read.trace.events import Events
from instrument.read.trace.schema import Args, decode

_scanner = pytest.importorskip(
    "instrument.read.trace._scanner", reason="the scanner is not compiled"
)
Reading = Callable[[Path], tuple[Events, int]]


def event(
    number: int,
    name: str = "aten::add",
    args: str = "",
    head: str = "",
    ts: str = "",
    dur: str = "",
) -> str:
    """An event as torch 2.13 writes them."""
    own = f'"External id": {number},"Record function id": 0, "Sequence number": {number // 3}, '
    return f"""
  {{
    "ph": "X",
    "cat": "cpu_op",
    "name": "{name}",
    "pid": 7,{head}
    "tid": {7 + number % 2},
    "ts": {ts or f"4353870089{number:03}.{number:03}"},
    "dur": {dur or f"{number * 37}.{number:03}"}
    ,
    "args": {{
      {args or own + f'"Fwd thread id": 1, "Ev Idx": {number}'}
    }}
  }}"""


def document(events: list[str]) -> str:
    return '{"traceEvents": [' + ",".join(events) + "\n  ]}"


COMMON = [event(n, f"aten::op{n % 5}") for n in range(120)]
FLOW = '\n  {\n    "ph": "s", "id": 1, "pid": 7, "tid": 7, "ts": 4.5, "cat": "ac2g", "name": "ac2g"\n  }'
INSTANT = (
    '\n  {\n    "ph": "i", "name": "[memory]", "pid": 7, "tid": 9, "ts": 5.125,'
    '\n    "args": {\n      "Bytes": -64, "Device Type": 0\n    }\n  }'
)


class Counting:
    """The compiled module, with the number of events that its scanners have read."""

    scanned = 0

    Scanner = _scanner.Scanner

    def Columns(self) -> Any:  # noqa: N802 - the name of the class in the module
        inner = _scanner.Columns()
        return SimpleNamespace(add=partial(self._add, inner), keep=inner.keep, take=inner.take)

    def _add(self, inner: Any, piece: Any) -> Any:
        found = inner.add(piece)
        self.scanned += found[0]
        return found


def scan(text: bytes, begin: int = 0, end: int | None = None) -> Any:
    piece = _scanner.Scanner()
    understood = piece.scan(text, begin, len(text) if end is None else end)
    return _scanner.Columns().add(piece) if understood else None


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Reading:
    """Reads a trace twice, scanned and decoded, and holds them to be the same; tells how many events were scanned."""

    def read(path: Path) -> tuple[Events, int]:
        counting = Counting()
        monkeypatch.setattr(scanner, "compiled", counting)
        events = _events_or_sentence(path)
        monkeypatch.setattr(scanner, "compiled", None)
        decoded = _events_or_sentence(path)
        assert (
            events == decoded
            if isinstance(events, str) or isinstance(decoded, str)
            else same(events, decoded)
        )
        return events, counting.scanned

    return read


def _events_or_sentence(path: Path) -> Events | str:
    try:
        return reader.read(path)
    except TraceError as error:
        return str(error)


def test_the_scanner_knows_the_arguments_that_are_kept() -> None:
    assert sorted(_scanner.ARGS) == sorted(Args.__struct_encode_fields__)


@pytest.mark.parametrize("name", each_body())
def test_recordings_are_scanned_and_the_same(recordings, both, name) -> None:
    events, scanned = both(recordings(name).path)
    assert scanned > len(events) / 2


def test_a_recording_with_stacks_is_scanned_and_the_same(recordings, both) -> None:
    events, scanned = both(recordings("convolutions", with_stack=True).path)
    assert scanned > len(events) / 2
    assert (events.python_parent >= 0).any()


@pytest.mark.parametrize("name", real_traces.every())
def test_real_traces_are_scanned_and_the_same(both, name) -> None:
    events, scanned = both(real_traces.path(name))
    assert scanned > 0.9 * events.recorded


def test_what_is_scanned_is_what_was_written(tmp_path, both) -> None:
    path = tmp_path / "trace.json"
    path.write_text(document([*COMMON[:60], FLOW, INSTANT, *COMMON[60:]]))
    events, scanned = both(path)
    assert scanned == 122
    number = np.arange(120)
    assert np.array_equal(events.start_ns, 4353870089_000_000 + number * 1001)
    assert np.array_equal(events.duration_ns, number * 37_001)
    assert np.array_equal(events.external_id, number)
    assert np.array_equal(events.sequence, number // 3)
    assert [events.names[code] for code in events.name] == [f"aten::op{n % 5}" for n in number]
    assert [events.threads[code] for code in events.thread] == [(7, 7 + n % 2) for n in number]
    assert events.memory.size_bytes.tolist() == [-64]


ODD_ARGUMENTS = {
    "empty arguments": " ",
    "a number with a fraction": '"External id": 7.5, "Ev Idx": 3',
    "a number with an exponent": '"External id": 7e2, "Ev Idx": 3',
    "a negative number": '"External id": 7, "Sequence number": -1, "Ev Idx": 3',
    "a number with zeros in front": '"External id": 07, "Ev Idx": 3',
    "a number of 64 bits": '"External id": 18446744073709551615, "Ev Idx": 3',
    "a number of 17 digits": '"External id": 12345678901234567, "Ev Idx": 3',
    "nothing for a number": '"Python parent id": null, "Python id": 4, "Ev Idx": 3',
    "a number twice": '"External id": 7,"Record function id": 0, "External id": 8, "Ev Idx": 3',
    "both external ids": '"External id": 7, "external id": 8, "Ev Idx": 3',
    "0 for one external id": '"External id": 0, "external id": 8, "Ev Idx": 3',
    "shapes": '"External id": 7, "Input Dims": [[2, 3], []], "Ev Idx": 3',
    "a number behind shapes": '"External id": 7, "Input Dims": [], "correlation": 8, "Ev Idx": 3',
    "a number behind the rest": '"External id": 7, "Input Dims": [], "correlation": 8',
    "a missing comma": '"External id": 7 "Ev Idx": 3',
    "a comma too many": '"External id": 7,, "Ev Idx": 3',
    "a comma in front": ', "Ev Idx": 3',
    "a comma behind": '"External id": 7,',
    "half a list": '"External id": 7, "Input Dims": [, "Ev Idx": 3',
    "a brace for a comma": '"External id": 7{"Ev Idx": 3',
    "a brace behind a 0": '"External id": 7, "x": 0{"Ev Idx": 3',
    "a brace before the rest": '"External id": 7{"Input Dims": []',
    "a brace too many": '"External id": 7}, "x": {"Ev Idx": 3',
    "a phase in a list": '"External id": 7, "x": [{"b": 1}, {"ph": 2}]',
    "bytes of an operator": '"External id": 7, "bytes": 8',
    "a small number": '"External id": -18446744073709551615, "Ev Idx": 3',
}  # fmt: skip
ODD = {
    **{what: event(200, args=args) for what, args in ODD_ARGUMENTS.items()},
    "no arguments": event(200).partition("\n    ,")[0] + "\n  }",
    "a longer fraction": event(200, ts="4353870089200.0004"),
    "a whole time": event(200, ts="4353870089200", dur="5"),
    "a large time": event(200, ts="8999999999999999.999"),
    "too large a time": event(200, ts="9223372036854775.9"),
    "an exponent": event(200, dur="1e3"),
    "a negative duration": event(200, dur="-1.000"),
    "a time as text": event(200, ts='"5"'),
    "zeros in front": event(200, ts="04.000"),
    "an infinite duration": event(200, dur="Infinity"),
    "a backslash": event(200, name="a\\nb"),
    "a bare newline": event(200, name="a\nb"),
    "a bad escape": event(200, name="a\\xb"),
    "letters of other alphabets": event(200, name="é中"),
    "braces in a name": event(200, name="void f<{lambda()#1}>()"),
    "an event in a name": event(200, name='},\n  {\n    "ph": "X",'),
    "a comma and brace in a name": event(200, name="}, {"),
    "two names": event(200, head='\n    "name": "aten::mul",'),
    "another time before": event(200, head='\n    "ts": 5.000,'),
    "arguments before": event(200, head='\n    "args": {"External id": 5},'),
    "another phase before": event(200, head='\n    "ph": "B",'),
    "a process that is no number": event(200, head='\n    "pid": 1.5,'),
    "a kernel": event(
        200, args='"External id": 7, "grid": [1, 2, 3], "blocks per SM": 0.5'
    ).replace("cpu_op", "kernel"),
    "a begin": FLOW.replace('"s"', '"B"'),
    "a list in its place": "\n  [1]",
    "a memory event without its size": INSTANT.replace("-64", "null"),
    "an instant whose name is a number": INSTANT.replace('"[memory]"', "5").replace("Bytes", "b"),
}


@pytest.mark.parametrize("what", ODD)
def test_an_odd_event_among_common_ones_is_read_as_by_the_decoder(tmp_path, both, what) -> None:
    path = tmp_path / "trace.json"
    for behind in (COMMON[60:], []):
        path.write_text(document([*COMMON[:60], ODD[what], *behind]))
        both(path)


def test_kinds_and_texts_are_forgotten_where_they_are_too_many(tmp_path, both, monkeypatch) -> None:
    monkeypatch.setattr("instrument.read.trace.scanner._MOST_BYTES", 600)
    monkeypatch.setattr("instrument.read.trace.json_stream.LARGEST", 1 << 12)
    monkeypatch.setattr("instrument.read.trace.json_stream.SMALLEST", 1 << 9)
    path = tmp_path / "trace.json"
    path.write_text(document(COMMON))
    assert both(path)[1] > 100


def test_an_event_with_a_phase_in_its_arguments_is_read_alone(tmp_path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(document([ODD["a phase in a list"]]))
    assert len(reader.read(path)) == 1


def test_many_distinct_names_are_read(tmp_path, both) -> None:
    path = tmp_path / "trace.json"
    path.write_text(document([event(n % 1000, f"n{n}") for n in range(5000)]))
    events, scanned = both(path)
    assert (len(events.names), scanned) == (5000, 5000)


ONE = '{"ph": "X", "dur": 1, %s}'
UNDERSTOOD = {
    "nothing more": '{"ph": "X", "dur": 1}',
    "blanks": '\t{ "ph"\r:\n"X" , "dur" : 1 , "args" : { } }\n',
    "a time of three decimals": ONE % '"ts": -0.001',
    "64 levels": ONE % f'"x": {"[" * 64}{"]" * 64}',
    "escapes": ONE % r'"name": "\"\\\/\b\f\n\r\t\u00e9\uFFFF"',
    "all kinds of values": ONE % '"x": [{"a": [true, false, null, -1.5E+3, "", {}, []], "": 0}]',
    "an unsigned number": ONE % '"args": {"correlation": 18446744073709551615}',
    "a small number": ONE % '"args": {"correlation": -18446744073709551615}',
    "blanks that differ": '{"ph": "X", "dur": 1}, {"ph":  "X",  "dur":   1}',
    "a fraction where it is not kept": '{"ph": "s", "args": {"correlation": -1.5}}',
    "a wrong type where it is not kept": '{"ph": "s", "ts": "x", "pid": [], "args": {"correlation": "y"}}',
}  # fmt: skip
NOT_UNDERSTOOD = {
    "nothing": "",
    "no duration": '{"ph": "X"}',
    "a comma behind": '{"ph": "X", "dur": 1},',
    "no comma": '{"ph": "X", "dur": 1}{"ph": "X", "dur": 1}',
    "no phase": '{"name": "a"}',
    "two phases": '{"ph": "X", "ph": "X"}',
    "a phase that is unknown": '{"ph": "Y"}',
    "a phase of two letters": '{"ph": "XX"}',
    "an escaped phase": r'{"ph": "\u0058"}',
    "arguments twice": ONE % '"args": {}, "args": {}',
    "no arguments": ONE % '"args": null',
    "an escaped key": ONE % r'"n\u0061me": "a"',
    "four decimals": ONE % '"ts": 1.0001',
    "an exponent": ONE % '"ts": 1e3',
    "the first time that is too large": ONE % '"ts": 4611686018427387',
    "the first duration that is too large": ONE % '"dur": 8796093022208',
    "65 bits": ONE % '"args": {"correlation": 18446744073709551616}',
    "a float": ONE % '"args": {"correlation": 1.0}',
    "a wrong type of what is kept": ONE % '"args": {"correlation": "y"}',
    "a wrong type of memory": '{"ph": "i", "args": {"Bytes": "y"}}',
    "65 levels": ONE % f'"x": {"[" * 65}{"]" * 65}',
    "half a character": ONE % r'"x": "\ud83d"',
    "a control character": ONE % '"x": "\x01"',
    "a bad escape": ONE % r'"x": "\x"',
    "NaN": ONE % '"x": NaN',
    "a list ended by a brace": ONE % '"x": [}',
    "an object ended by a bracket": ONE % '"x": {]',
    "a number with a 0 in front": ONE % '"x": 01',
    "a point at the end": ONE % '"x": 1.',
}  # fmt: skip


@pytest.mark.parametrize("what", UNDERSTOOD)
def test_what_is_understood(what) -> None:
    text = UNDERSTOOD[what].encode()
    found = scan(b"[" + text, 1, len(text) + 1)
    assert found[0] == len(decode(b"[%b]" % text))
    assert is_scanned_as_decoded(text)


def test_an_instant_that_the_decoder_refuses_is_left_to_it() -> None:
    assert not is_scanned_as_decoded(b'{"ph": "i", "name": 5}')


@pytest.mark.parametrize("what", NOT_UNDERSTOOD)
def test_what_is_not_understood_is_left_to_the_decoder(what) -> None:
    text = NOT_UNDERSTOOD[what].encode()
    assert scan(text, 0, len(text)) is None


@pytest.mark.parametrize(("begin", "end"), [(-1, 3), (2, 1), (0, 99), (2**62, 2**63 - 1)])
def test_positions_outside_the_text_are_refused(begin, end) -> None:
    with pytest.raises(ValueError, match="begin and end must be positions in the text"):
        scan(UNDERSTOOD["nothing more"].encode(), begin, end)


def test_every_cut_of_an_event_is_refused() -> None:
    text = UNDERSTOOD["all kinds of values"].encode() + b" " + INSTANT.strip().encode()
    whole = text.index(b" " + INSTANT.strip().encode())
    taken = [end for end in range(len(text)) if scan(text, 0, end)]
    assert taken == [whole, whole + 1]


SEEDS = [each.encode() for each in (*UNDERSTOOD.values(), COMMON[7], INSTANT.strip(), FLOW.strip())]
TEXT = document(
    [*COMMON[:30], FLOW, *COMMON[30:40], INSTANT, *(ODD[what] for what in ("shapes", "a kernel"))]
).encode()
PARTS = [
    b'"', b"{", b"}", b",", b":", b"[", b"]", b" ", b"\n", b"0", b"7", b".", b"-", b"e5", b"null", b"\\", b"\xff",
    b"},\n  {", b'},\n  {\n    "ph": "X",', b', "Ev Idx": 7', b'"External id": 9, ', b'"dur": 3.000,', b"9" * 17, b"",
]  # fmt: skip
CHANGES = st.lists(
    st.tuples(
        st.integers(20, len(TEXT) - 1),
        st.integers(0, 9),
        st.one_of(st.sampled_from(PARTS), st.binary(max_size=2)),
    ),
    min_size=1,
    max_size=3,
)


@given(CHANGES, st.booleans())
def test_a_changed_text_is_read_as_the_decoder_reads_it(tmp_path, both, changes, cut) -> None:
    text = TEXT
    for at, length, put in changes:
        text = text[:at] + put + text[at + length :]
    path = tmp_path / "trace.json"
    path.write_bytes(text[: changes[0][0]] if cut else text)
    both(path)


@given(st.lists(st.integers(0, 119), min_size=2, max_size=60), st.sampled_from([None, 0, 1, 4]))
def test_any_indent_is_read_as_the_decoder_reads_it(tmp_path, both, chosen, indent) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(json.loads(document([COMMON[n] for n in chosen])), indent=indent))
    assert len(both(path)[0]) == len(chosen)


def test_random_edits_are_scanned_as_they_are_decoded() -> None:
    """Some hundreds of texts; `make fuzz` reads millions."""
    edit = random.Random(0)
    scanned = 0
    for _ in range(600):
        text = bytearray(edit.choice(SEEDS))
        for _ in range(edit.randint(1, 3)):
            at, put = edit.randrange(len(text)), edit.choice([*PARTS, bytes([edit.randrange(256)])])
            text[at : at + edit.choice((0, 1, 1, 4))] = put
        scanned += is_scanned_as_decoded(bytes(text))
    assert scanned > 30


NUMBERS = st.lists(
    st.tuples(
        st.lists(st.sampled_from([0, 1, 2**63 - 1]), min_size=1, max_size=4), st.integers(0, 2)
    ),
    max_size=8,
)


@given(NUMBERS, st.booleans())
def test_the_pieces_that_are_kept_become_columns(pieces, drops) -> None:
    """Whichever of three scanners reads each piece, and what is dropped between two pieces."""
    found, scanners = _scanner.Columns(), [_scanner.Scanner() for _ in range(3)]
    for numbers, which in pieces:
        events = [
            f'{{"ph": "X", "dur": 1, "name": "{n}", "args": {{"correlation": {n}}}}}'
            for n in numbers
        ]
        if drops:
            other = b'{"ph": "X", "dur": 1, "name": "dropped", "args": {"Input Dims": []}}'
            assert scanners[which].scan(other, 0, len(other))
            assert found.add(scanners[which])
        text = ",".join(events).encode()
        assert scanners[which].scan(text, 0, len(text))
        assert found.add(scanners[which])[0] == len(numbers)
        found.keep(scanners[which])
    (count, columns), memory, texts = found.take()
    every = [n for numbers, _ in pieces for n in numbers]
    correlation, kind = (np.frombuffer(columns[k], t) for k, t in ((3, np.int64), (12, np.int32)))
    assert count == len(every)
    assert np.broadcast_to(correlation, count).tolist() == every
    assert len(correlation) == (1 if len(set(every)) == 1 else count)
    names = list(dict.fromkeys(every))
    assert [names[code] for code in np.broadcast_to(kind, count)] == every
    assert texts == ([], [], [], [])
    assert memory[0] == 0
    assert found.take()[0][0] == 0


def test_what_no_scanner_has_read_is_refused() -> None:
    columns, piece = _scanner.Columns(), _scanner.Scanner()
    for other in (piece, 5, columns):
        with pytest.raises(ValueError, match="the scanner has no piece that it understood"):
            columns.add(other)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("most_bytes", [1 << 25, 3000])
def test_one_thread_and_two_read_the_same_columns(tmp_path, monkeypatch, pack, most_bytes) -> None:
    monkeypatch.setattr("instrument.read.trace.scanner._MOST_BYTES", most_bytes)
    monkeypatch.setattr("instrument.read.trace.scanner._LEAST_BYTES", 0)
    monkeypatch.setattr("instrument.read.trace.json_stream.LARGEST", 1 << 12)
    monkeypatch.setattr("instrument.read.trace.json_stream.SMALLEST", 1 << 9)
    path = tmp_path / "trace.json"
    odd = [
        event(n, f"aten::{n}", f'"Input Dims": [[{n}]], "Sequence number": {n}') for n in range(990)
    ]
    kinds = [*ODD.values(), INSTANT, FLOW, *odd]
    choose = random.Random(most_bytes)
    for share in (0, 0.01, 0.2):
        events = [
            choose.choice(kinds) if choose.random() < share else choose.choice([*COMMON, *odd])
            for _ in range(1500)
        ]
        text = document(events).encode()
        path.write_bytes(pack(text if share else text[:-2000]))
        found = []
        for cpus in (1, 2, 4):
            monkeypatch.setattr(reader, "cpus", lambda cpus=cpus: cpus)
            found.append(reader.read(path))
        for other in found[1:]:
            assert same(found[0], other)
            assert found[0].texts == other.texts
            assert found[0].names == other.names
            assert found[0].threads == other.threads
        monkeypatch.setattr(scanner, "compiled", None)
        assert same(found[0], reader.read(path))
        monkeypatch.undo()


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_trace_is_read_from_a_pipe(tmp_path, pack) -> None:
    pipe = tmp_path / "trace.json"
    os.mkfifo(pipe)
    text = pack(document([event(n % 1000, f"n{n}") for n in range(9000)]).encode())
    with ThreadPoolExecutor(1) as thread:
        written = thread.submit(pipe.write_bytes, text)
        assert len(reader.read(pipe)) == 9000
        assert written.result() == len(text)

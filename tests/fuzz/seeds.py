"""Writes the seeds for fuzzing the scanner: short lists of events, of real traces and made by hand."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from instrument.trace import _scanner

PER_TRACE, EVENTS_EACH = 24, 3
BY_HAND = [
    '{"ph":"X"}',
    '{"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": "stream 7", "ts": -1.5, "dur": 0.001,'
    ' "args": {"grid": [1, 1, 1], "correlation": 18446744073709551615, "External id": null}}',
    '{"ph":"i","ts":5,"args":{"Bytes":-64,"Device Id":0,"Addr":140,"Total Allocated":9}}',
    '{"ph":"B","ts":1} , {"ph":"E","ts":2}\n,{"ph":"M","args":{"name":"a\\u00e9\\n"}}',
    '{"args":{"Input Dims":[[2,[3]],{"a":{"b":[true,false,null,-1.5e+3]}}]},"ph":"X","dur":1e3}',
]


def seeds(folder: Path | None) -> Iterator[bytes]:
    """Texts of a few events each, with commas between them."""
    yield from (text.encode() for text in BY_HAND)
    for path in sorted(folder.glob("*.json.gz")) if folder else []:
        events = json.loads(
            gzip.decompress(path.read_bytes()).decode(errors="replace"), strict=False
        )["traceEvents"]
        step = max(len(events) // PER_TRACE, 1)
        for begin in itertools.islice(range(0, len(events), step), PER_TRACE):
            chosen = [json.dumps(event) for event in events[begin : begin + EVENTS_EACH]]
            yield ",\n ".join(chosen).encode()[:4000]


def main(target: Path, dictionary: Path) -> None:
    folder = os.environ.get("INSTRUMENT_TRACES")
    target.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(seeds(Path(folder) if folder else None)):
        (target / f"seed{number}").write_bytes(text)
    keys = ["ph", "cat", "name", "pid", "tid", "ts", "dur", "args", *_scanner.ARGS]
    quoted = [f'"\\"{key}\\":"' for key in keys]
    dictionary.write_text(
        "\n".join([*quoted, '"\\"ph\\":\\"X\\""', '"},{"', '"null"', '"1e5"']) + "\n"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

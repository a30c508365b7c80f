"""Fuzzes the code in C, then all commands; `make fuzz` runs it. Needs clang, and real traces for better seeds.

libFuzzer runs `loops_fuzz.c` and `scanner_fuzz.c` under ASan and UBSan, each for a third of the seconds. Then the
scanner reads each text that libFuzzer found worth keeping, and edits of it, beside the decoder. The last third is for
the commands; see `commands.py`. Ends with 1 after a finding.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from fuzz import commands
from fuzz.oracle import is_scanned_as_decoded
from instrument.read.trace import _scanner
from instrument.read.trace.schema import Complete

HERE = Path(__file__).parent
PER_TRACE, EVENTS_EACH, MOST_BYTES = 24, 3, 4000
BY_HAND = [
    '{"ph":"X"}',
    '{"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": "stream 7", "ts": -1.5, "dur": 0.001,'
    ' "args": {"grid": [1, 1, 1], "correlation": 18446744073709551615, "External id": null}}',
    '{"ph":"i","ts":5,"args":{"Bytes":-64,"Device Id":0,"Addr":140,"Total Allocated":9}}',
    '{"ph":"B","ts":1} , {"ph":"E","ts":2}\n,{"ph":"M","args":{"name":"a\\u00e9\\n"}}',
    '{"args":{"Input Dims":[[2,[3]],{"a":{"b":[true,false,null,-1.5e+3]}}]},"ph":"X","dur":1e3}',
]
BUILD = ["clang", "-std=c99", "-g", "-O1", "-fsanitize=fuzzer,address,undefined"]
BUILD += ["-fno-sanitize-recover=all"]


def seeds(folder: Path | None) -> Iterator[bytes]:
    """Pieces of a few events each, with commas between them; zero bytes separate the pieces of a text."""
    yield from (text.encode() for text in BY_HAND)
    yield "\0".join(BY_HAND).encode()
    for path in sorted(folder.glob("*.json.gz")) if folder else []:
        text = gzip.decompress(path.read_bytes()).decode(errors="replace")
        events = json.loads(text, strict=False)["traceEvents"]
        step = max(len(events) // PER_TRACE, 1)
        for begin in itertools.islice(range(0, len(events), step), PER_TRACE):
            chosen = [json.dumps(event) for event in events[begin : begin + EVENTS_EACH]]
            yield ",\n ".join(chosen).encode()[:MOST_BYTES]
            yield "\0".join(chosen).encode()[:MOST_BYTES]


def fuzz(name: str, texts: Path, seconds: int, *limits: str) -> bool:
    """Run libFuzzer on a folder of texts, which it extends; whether it found nothing."""
    program = texts.with_name(name)
    build = [*BUILD, f"-I{HERE}", str(HERE / f"{name}.c"), "-o", str(program)]
    subprocess.run(build, check=True)
    outputs = [f"-artifact_prefix={Path.cwd()}/{name}-", "-print_final_stats=1"]
    limits = (f"-max_total_time={seconds}", "-timeout=10", *limits)
    done = subprocess.run(
        [str(program), str(texts), *limits, *outputs],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    print(f"{name}.c:")
    for line in done.stderr.splitlines():
        if re.match("stat::|SUMMARY|artifact|.*DONE", line) or (done.returncode and "==" in line):
            print(line)
    return done.returncode == 0


def compare(texts: list[bytes], seconds: float) -> bool:
    """Read the texts, and edits of them, beside the decoder; whether all gave the same."""
    edit, until, read, accepted = random.Random(0), time.monotonic() + seconds, 0, 0
    for text in itertools.chain(texts, (edited(texts, edit) for _ in itertools.count())):
        if read >= len(texts) and time.monotonic() > until:
            break
        try:
            accepted += is_scanned_as_decoded(text)
        except Exception as error:
            print(f"{error!r}: {text!r}")
            return False
        read += 1
    print(
        f"{read} texts read beside the decoder, {accepted} of them scanned, all with the same columns"
    )
    return True


def edited(texts: list[bytes], edit: random.Random) -> bytes:
    """A text with a few bytes replaced, most often by a part of another text."""
    text = bytearray(edit.choice(texts) or b" ")
    for _ in range(edit.randint(1, 3)):
        other = edit.choice(texts)
        at, begin = edit.randrange(len(text)), edit.randrange(len(other) + 1)
        put = edit.choice([other[begin : begin + edit.randrange(12)], bytes([edit.randrange(256)])])
        text[at : at + edit.choice((0, 1, len(put)))] = put
        text = text or bytearray(b" ")
    return bytes(text)


def scanner(folder: Path, traces: Path | None, seconds: int) -> bool:
    """Fuzz the compiled trace reader; whether nothing was found."""
    dictionary, texts = folder / "keys", folder / "texts"
    keys = [*Complete.__struct_encode_fields__, "ph", *_scanner.ARGS]
    dictionary.write_text(
        "".join(f'"\\"{key}\\":"\n' for key in keys) + '"\\"ph\\":\\"X\\""\n"},{"\n'
    )
    texts.mkdir()
    for number, text in enumerate(seeds(traces)):
        (texts / f"seed{number}").write_bytes(text)
    found_nothing = fuzz("scanner_fuzz", texts, seconds, "-max_len=8192", f"-dict={dictionary}")
    kept = [path.read_bytes() for path in sorted(texts.iterdir())]
    return compare([piece for text in kept for piece in text.split(b"\0")], seconds / 4) and (
        found_nothing
    )


def main(seconds: int) -> int:
    given = os.environ.get("INSTRUMENT_TRACES")
    traces, each = Path(given) if given else None, max(seconds // 3, 1)
    with TemporaryDirectory(prefix="instrument-fuzz-") as name:
        folder = Path(name)
        (folder / "columns").mkdir()
        nothing = [
            fuzz("loops_fuzz", folder / "columns", each, "-max_len=512"),
            scanner(folder, traces, each * 4 // 5),
            commands.main(["--seconds", str(each)]) == 0,
        ]
    return 0 if all(nothing) else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))

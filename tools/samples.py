"""Records the samples of `instrument samples` anew: `python tools/samples.py [NAME ...]`.

Each folder of `instrument/samples/` holds a program. It is run by `instrument run` in an empty
folder, with one thread for each process, on a machine whose CPUs are idle: a recording in which the
program waited for a CPU, or whose first finding is not the fault of the sample, is made again. The
name of the host, the version of its kernel, and the names of folders are replaced.
"""

from __future__ import annotations

import gzip
import os
import platform
import shutil
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory

from instrument.cli.samples import FOLDER, SAMPLES, Sample
from instrument.read.advise.diagnose import diagnose
from instrument.read.capture import Capture
from instrument.read.views.find_captures import captures_at

ATTEMPTS = 8
KEPT = ("capture.json", "detail.json.gz", "lines_rank*.json", "summary.json", "trace.json.gz")


def main() -> None:
    for name in sys.argv[1:] or SAMPLES:
        for _ in range(ATTEMPTS):
            with TemporaryDirectory() as folder, TemporaryDirectory() as compiled:
                os.environ.update(OMP_NUM_THREADS="1", TORCHINDUCTOR_CACHE_DIR=compiled)
                problem = recorded(name, SAMPLES[name], Path(folder))
            print(f"{name}: {problem or 'recorded'}", flush=True)
            if not problem:
                break
        else:
            sys.exit(f"{name} is not recorded in {ATTEMPTS} attempts.")


def recorded(name: str, sample: Sample, folder: Path) -> str:
    """Record a sample into the package; return why the recording is of no use, else an empty text."""
    program = FOLDER / name / sample.program
    shutil.copy(program, folder)
    launcher = ["torch.distributed.run", f"--nproc-per-node={sample.ranks}", "-m"]
    command = [*(launcher if sample.ranks > 1 else []), "instrument", "run", "--", sample.program]
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        check=True,
        stderr=subprocess.PIPE,
        text=True,
    )
    print(done.stderr)
    captures = [Capture.load(each) for each in captures_at(folder / "profile")]
    found = [each.code for each in diagnose(captures).findings]
    if "busy-cpus" in found:
        return "other programs used the CPUs"
    first = found[0] if found else None
    if first != sample.fault:
        return f"the first finding is {first}, and not {sample.fault}"
    for old in FOLDER.joinpath(name).iterdir():
        if old.is_dir():
            shutil.rmtree(old)
        elif old != program:
            old.unlink()
    for pattern in KEPT:
        for file in (folder / "profile").rglob(pattern):
            target = FOLDER / name / file.relative_to(folder / "profile")
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(without_machine(file.read_bytes(), folder))
    return ""


def without_machine(content: bytes, folder: Path) -> bytes:
    """The content of a file without what only this machine has."""
    if content.startswith(b"\x1f\x8b"):
        return gzip.compress(without_machine(gzip.decompress(content), folder), mtime=0)
    system = f"{platform.system()}-{platform.machine()}"
    text = content.decode()
    for old, new in (
        (f"{folder}/", ""),
        (f"{Path(sysconfig.get_path('purelib'))}/", ""),
        (f'"{socket.gethostname()}"', '"host"'),
        (platform.platform(), system),
    ):
        text = text.replace(old, new)
    for left in (str(Path.home()), sys.prefix, str(FOLDER), platform.release()):
        assert left not in text, left
    return text.encode()


if __name__ == "__main__":
    main()

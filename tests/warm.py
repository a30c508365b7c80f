"""Scripts in processes of their own that need not load torch: forked from one that has loaded it, which saves seconds.

A script runs as `python FILE`, `python -m MODULE` or `python -c CODE` runs it, with its own arguments, environment, folder, `__main__`,
exit handlers and exit status, and can be sent signals. What this cannot show is that a script loads what it needs in a
bare interpreter: that is left to processes started in the ordinary way. A script that runs for ten minutes is
aborted, and prints the stacks of all its threads.

`multiprocessing`'s forkserver starts a script as fast (0.18 s where this takes 0.21), but serves one process: each of
xdist's would load its own, 4.4 s of a CPU and 370 MB, and so would each script that starts an exporter.
"""

from __future__ import annotations

import atexit
import faulthandler
import fcntl
import gc
import importlib
import json
import os
import pkgutil
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from subprocess import CompletedProcess
from textwrap import dedent
from types import ModuleType, SimpleNamespace
from typing import IO, Any, TextIO
from weakref import finalize

import pytest

SOCKET = "INSTRUMENT_TESTS_WARM"
HANGS_S = 600
EXPORTER = "INSTRUMENT_TESTS_WARM_EXPORTER"
_WORKER = "PYTEST_XDIST_WORKER"


def run(command: Sequence[str], folder: Path, env: Mapping[str, str]) -> CompletedProcess[str]:
    """Run `FILE ARGUMENTS…` or `-m MODULE ARGUMENTS…` and give back all that it printed, its errors too."""
    with tempfile.TemporaryFile() as output:
        code = run_into(command, folder, environment(env), output.fileno())
        output.seek(0)
        printed = output.read().decode()
    return CompletedProcess(list(command), code, printed)


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """An environment that names the server, which is started if there is none yet."""
    own = {_WORKER: os.environ[_WORKER]} if _WORKER in os.environ else {}
    return {**env, **own, SOCKET: env.get(SOCKET) or server()}


def run_into(command: Sequence[str], folder: Path, env: Mapping[str, str], output: int) -> int:
    """Run a script that prints into an open file, with the server that `env` names; its exit status."""
    with _asked(command, folder, env, {1: output, 2: output}) as connection:
        connection.readline()
        return int(connection.readline())


def run_code(code: str, *arguments: str, folder: Path | None = None) -> CompletedProcess[str]:
    """Run `-c CODE ARGUMENTS…` and give back what it printed, its errors apart."""
    return run_apart(["-c", dedent(code), *arguments], folder or Path.cwd(), os.environ)


def run_apart(
    command: Sequence[str], folder: Path, env: Mapping[str, str]
) -> CompletedProcess[str]:
    """Run as `run` does, and give back what it printed, its errors apart."""
    script = Script(command, folder, env)
    stdout, stderr = script.communicate()
    return CompletedProcess(list(command), script.wait(), stdout, stderr)


def package_warnings() -> str:
    """The Python warnings inside the package in the scripts run so far; the next call does not give them again."""
    if SOCKET not in os.environ and not server.cache_info().currsize:
        return ""
    file = _warnings_of(server())
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    finally:
        file.unlink(missing_ok=True)


def with_trainers() -> dict[str, str]:
    """What in its environment has a script forked from a process that has loaded Lightning and Transformers too."""
    return {SOCKET: _of_trainers(server())}


def _of_trainers(address: str) -> str:
    return f"{address}-trainers"


def _warnings_of(address: str) -> Path:
    """Where a server's scripts, for this process among those of xdist, note their warnings."""
    return Path(address).with_name(f"warnings-{os.environ.get(_WORKER, '')}.txt")


class Script:
    """A script that runs, with what tests use of `subprocess.Popen`."""

    returncode: int | None = None

    def __init__(self, command: Sequence[str], folder: Path, env: Mapping[str, str]) -> None:
        pipes = [os.pipe(), os.pipe()]
        self._start(command, folder, env, {1: pipes[0][1], 2: pipes[1][1]})
        for _, end in pipes:
            os.close(end)
        self.stdout, self.stderr = (os.fdopen(end, encoding="utf-8") for end, _ in pipes)
        for each in (self.stdout, self.stderr):
            finalize(self, each.close)

    def _start(
        self, command: Sequence[str], folder: Path, env: Mapping[str, str], handles: dict[int, int]
    ) -> None:
        self._connection = _asked(command, folder, environment(env), handles)
        finalize(self, self._connection.close)
        self.pid = int(self._connection.readline())

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float = HANGS_S) -> int:
        if self.returncode is None:
            self.returncode = _exit_status(self._connection, self.pid, timeout)
        return self.returncode

    def communicate(self, timeout: float = HANGS_S) -> tuple[str, str]:
        printed = {}
        readers = [
            threading.Thread(
                target=lambda file=file: printed.update({file: file.read()}), daemon=True
            )
            for file in (self.stdout, self.stderr)
        ]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        return printed[self.stdout], printed[self.stderr]


class Exporter(Script):
    """An exporter that is forked, with what `Finisher` uses of `subprocess.Popen`."""

    stdin: IO[bytes]

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdout: IO[bytes],
        stderr: int | None,
        env: Mapping[str, str],
        pass_fds: Sequence[int],
        start_new_session: bool,
        **_: object,
    ) -> None:
        reading, to_it = os.pipe()
        handles = {0: reading, 1: stdout.fileno(), **{number: number for number in pass_fds}}
        if stderr is None:
            handles[2] = 2
        own = "setsid()" if start_new_session else f"setpgid(0, {os.getpgrp()})"
        given = command[command.index("-c") + 1 :]
        code = f"import os; os.{own}; {given[0]}"
        self._start(["-c", code, *given[1:]], Path.cwd(), env, handles)
        os.close(reading)
        self.stdin = os.fdopen(to_it, "wb", buffering=0)

    def wait(self, timeout: float = HANGS_S) -> int:
        if self.returncode is None and not select.select([self._connection], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("exporter", timeout)
        return super().wait()

    def poll(self) -> int | None:
        if select.select([self._connection], [], [], 0)[0]:
            self.wait()
        return self.returncode


@contextmanager
def exporters() -> Iterator[None]:
    """Fork exporters, here and in scripts, from a process that has loaded all that they need."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(EXPORTER, "yes")
        fork_exporters(patch)
        yield


def fork_exporters(patch: pytest.MonkeyPatch) -> None:
    """Have `Finisher` fork its exporters instead of starting a new interpreter."""
    like_subprocess = SimpleNamespace(
        Popen=Exporter,
        **{each: getattr(subprocess, each) for each in ("PIPE", "DEVNULL", "TimeoutExpired")},
    )
    patch.setattr("instrument.record.finisher.subprocess", like_subprocess)


def _exit_status(connection: TextIO, pid: int, timeout: float) -> int:
    """The exit status of a script; -6, SIGABRT, of one that still runs after `timeout` seconds."""
    if not select.select([connection], [], [], timeout)[0]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGABRT)
    return int(connection.readline())


def _asked(
    command: Sequence[str], folder: Path, env: Mapping[str, str], handles: dict[int, int]
) -> TextIO:
    """What gives a line with the script's process id, and one with its exit status when it has ended.

    The script gets `handles`, open files by the numbers that they have there.
    """
    request = json.dumps([list(command), str(folder), dict(env), list(handles)])
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(env[SOCKET])
        socket.send_fds(connection, [b"."], list(handles.values()))
        connection.sendall(f"{request}\n".encode())
        return connection.makefile()


@cache
def server() -> str:
    """The address of the server; processes of xdist have that of the process that started them."""
    if address := os.environ.get(SOCKET):
        return address
    # no TemporaryDirectory: a child that multiprocessing forks from Python 3.13 on clears the exit
    # handlers, and would remove the folder with the last reference to it
    folder = tempfile.mkdtemp(prefix="warm-")
    address = f"{folder}/socket"
    # it ends with its standard input, whatever becomes of this process
    process = subprocess.Popen(
        [sys.executable, __file__, address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdin
    assert process.stdout
    assert process.stdout.readline() == b"ready\n"

    def end() -> None:
        process.kill()  # processes forked by other tests may hold its standard input open
        process.wait()
        process.stdin.close()
        process.stdout.close()
        shutil.rmtree(folder)

    atexit.register(end)
    return address


def _load() -> None:
    import hydra.utils  # noqa: F401
    import numpy.ma  # noqa: F401  # which numpy loads at the first median
    import torch._dynamo.backends.common  # which torch.compile loads
    import torch._inductor.config  # which torch's profiler loads at its first window
    import torch.profiler

    import instrument
    from instrument import Session, profiled  # noqa: F401
    from instrument.cli.command import main  # noqa: F401

    read = ("advise", "compare", "facts", "ranks", "show", "show/page", "trace", "views")
    for room in (*(f"read/{each}" for each in read), "export"):
        for module in pkgutil.iter_modules([f"{Path(instrument.__file__).parent}/{room}"]):
            importlib.import_module(f"instrument.{room.replace('/', '.')}.{module.name}")
    import instrument.export.sinks.table

    torch.compiler.list_backends()  # loads them all, as the first torch.compile does

    assert not torch.cuda.is_initialized()
    # a script's end would pass over all these objects, and so copy their memory: two seconds
    gc.collect()
    gc.freeze()
    # and would take torch's operators out of its tables: 0.05 s
    for each in list(finalize._registry):  # type: ignore[attr-defined]
        each.atexit = False


def _load_trainers() -> None:
    for module in ("lightning.pytorch", "transformers.trainer"):
        with suppress(ImportError):
            importlib.import_module(module)
    gc.collect()
    gc.freeze()


def _serve(address: str) -> list[str]:
    """Fork for each request; returns in a process that is to run a script, with its arguments."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait for scripts
    with socket.socket(socket.AF_UNIX) as plain, socket.socket(socket.AF_UNIX) as trainers:
        plain.bind(address)
        trainers.bind(_of_trainers(address))
        listeners = [plain, trainers]
        for each in listeners:
            each.listen()
        print("ready", flush=True)  # whoever asks by now waits
        _load()
        while True:
            readable, _, _ = select.select([*listeners, sys.stdin], [], [])
            if sys.stdin in readable:
                sys.exit()
            if plain in listeners and trainers in readable:
                listeners = [plain] if os.fork() else [trainers]
                (trainers if plain in listeners else plain).close()
                if trainers in listeners:
                    _load_trainers()
                continue
            connection, _ = readable[0].accept()
            if not os.fork():
                break
            connection.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, received, *_ = socket.recv_fds(connection, 1, 16)
    with connection:
        lines = connection.makefile("rw")
    command, folder, env, numbers = json.loads(lines.readline())
    if script := os.fork():
        for file in received:
            os.close(file)
        with suppress(OSError):  # nobody may be there to hear it
            print(script, file=lines, flush=True)
            print(os.waitstatus_to_exitcode(os.waitpid(script, 0)[1]), file=lines, flush=True)
        os._exit(0)
    lines.close()
    files = [os.open(os.devnull, os.O_RDWR) for _ in range(3)] + received
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, 500) for file in files]  # out of the numbers' way
    for file in files:
        os.close(file)
    for file, number in zip(moved, [0, 1, 2, *numbers], strict=True):
        os.dup2(file, number)
        os.close(file)
    faulthandler.enable()  # SIGABRT prints the stacks of all threads
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    _note_warnings(_warnings_of(address))
    return command


def _note_warnings(file: Path) -> None:
    """Write into a file what Python warns of inside the package, except of traces, and show it as usual."""
    import instrument
    from instrument.base.errors import TraceWarning

    package, usual = Path(instrument.__file__).parent, warnings.showwarning

    def show(message: Warning, category: type[Warning], filename: str, *where: Any) -> None:
        if Path(filename).is_relative_to(package) and not issubclass(category, TraceWarning):
            with file.open("a", encoding="utf-8") as lines:
                lines.write(warnings.formatwarning(message, category, filename, where[0]))
        usual(message, category, filename, *where)

    warnings.showwarning = show
    warnings.filterwarnings("always", module=r"instrument\b")


def _run_main() -> int:
    """Run the script that `sys.argv` names; its exit status."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    try:
        if sys.argv[0] == "-c":
            sys.path[:1] = ["", *filter(None, named)]
            exec(compile(sys.argv.pop(1), "<string>", "exec"), vars(main))
        elif sys.argv[0] == "-m":
            sys.path[:1] = [str(Path.cwd()), *filter(None, named)]
            del sys.argv[0]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            file = Path(sys.argv[0])
            sys.path[:1] = [str(file.absolute().parent), *filter(None, named)]
            main.__file__ = str(file.absolute())
            exec(compile(file.read_bytes(), sys.argv[0], "exec"), vars(main))
    except SystemExit as asked:
        if not isinstance(asked.code, int | None):
            raise
        return asked.code or 0
    return 0


def _end(status: int) -> None:
    """End as Python does, but leave all objects.

    To destroy what was loaded copies its memory, 0.4 s of a CPU for each script, and
    DistributedDataParallel may hang if it is destroyed after its process group.
    """
    threading._shutdown()
    atexit._run_exitfuncs()
    with suppress(AttributeError, OSError, ValueError):  # else Python says what is wrong with them
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    sys.argv = _serve(sys.argv[1])
    if EXPORTER in os.environ:
        fork_exporters(pytest.MonkeyPatch())
    _end(_run_main())

"""The key `environment` of capture.json: settings, threads, compilations, collections, loaders."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from collected import Log
from recording import run_session
from torch.utils.data import DataLoader, IterableDataset

from instrument import Capture, Session
from instrument.read.trace.capture_json import typed
from instrument.record import facts
from instrument.record.facts import (
    _MOST_LOADERS,
    Collections,
    DynamoCounts,
    Loaders,
    compilations,
    compiled_since,
    cpu_quota,
    dynamo_counts,
    loader_settings,
    local_ranks,
    shortened,
    usable_cpus,
)
from instrument.record.recorder import Recorder
from instrument.record.torch_support import known

pytestmark = [
    pytest.mark.usefixtures("inline_export"),
    pytest.mark.filterwarnings("ignore::Warning:torch.*"),  # Dynamo's own
]
STEPS = 5


@pytest.fixture(autouse=True)
def _no_automatic_collections() -> Iterator[None]:
    """Only the tests' own collections are counted."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def dynamo() -> Iterator[Any]:
    """Dynamo, with nothing compiled."""
    module = pytest.importorskip("torch._dynamo", reason="torch.compile needs Dynamo")
    try:
        torch.compile(torch.neg, backend="eager")(torch.ones(1))
    except RuntimeError as error:
        pytest.skip(f"torch.compile does not work here: {error}")
    module.reset()
    yield module
    module.reset()


def recorded(folder: Path, each_step: Callable[[int], Any]) -> dict[str, Any]:
    """The environment of a window of steps 2 and 3 out of five."""
    steps = count()
    return of(run_session(folder, STEPS, lambda: each_step(next(steps)), wait=2, active=2))


def of(session: Session) -> dict[str, Any]:
    """The environment of the only capture, as a reader of its folder sees it."""
    (capture,) = session.captures
    loaded = Capture.load(capture.folder)
    assert loaded.about.environment is not None
    found: dict[str, Any] = loaded.metadata["environment"]
    return found


def nothing(_: int) -> None:
    """A step without anything special."""


# Settings.


SETTINGS = [
    "grad_enabled", "anomaly_mode", "float32_matmul_precision", "allow_tf32", "cudnn_benchmark",
    "deterministic_algorithms",
]  # fmt: skip


def test_the_settings_are_those_at_the_beginning_of_the_window(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    usual = recorded(tmp_path / "usual", nothing)
    known = {"intra_op": threads, "inter_op": torch.get_num_interop_threads()}
    assert usual["threads"] == {**known, "cpus": usable_cpus(), "local_ranks": 1}
    assert [usual[key] for key in SETTINGS] == [True, False, "highest", False, False, False]
    try:
        torch.set_num_threads(threads + 3)
        torch.use_deterministic_algorithms(True)
        torch.set_float32_matmul_precision("medium")
        torch.backends.cudnn.benchmark = True
        with torch.autograd.set_detect_anomaly(True), torch.no_grad():
            changed = recorded(tmp_path / "changed", nothing)
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.benchmark = False
    assert changed["threads"]["intra_op"] == threads + 3
    assert [changed[key] for key in SETTINGS] == [False, True, "medium", True, True, True]


def test_what_torch_hides_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("not today")

    monkeypatch.setattr(torch, "get_num_threads", fail)
    monkeypatch.setattr(torch, "is_anomaly_enabled", fail)
    monkeypatch.setattr(facts, "usable_cpus", fail)
    monkeypatch.setattr(torch.backends, "cuda", SimpleNamespace())
    found = recorded(tmp_path, nothing)
    assert (found["threads"]["intra_op"], found["threads"]["cpus"]) == (None, None)
    assert [found[key] for key in SETTINGS[:4]] == [True, None, "highest", None]


def test_tf32_is_known_from_the_newer_setting_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mixed:
        fp32_precision = "tf32"

        @property
        def allow_tf32(self) -> bool:
            raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setattr(torch.backends, "cuda", SimpleNamespace(matmul=Mixed()))
    assert facts.settings()["allow_tf32"] is True
    Mixed.fp32_precision = "ieee"
    assert facts.settings()["allow_tf32"] is False


# Threads.


def cgroup(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_the_smallest_quota_of_a_cgroup_and_its_parents_counts(tmp_path: Path) -> None:
    cgroup(tmp_path / "job" / "task", cpu__max="max 100000\n")
    assert cpu_quota("0::/job/task\n", tmp_path) is None
    cgroup(tmp_path / "job", cpu__max="150000 100000\n")
    assert cpu_quota("0::/job/task\n", tmp_path) == 1.5
    cgroup(tmp_path / "job" / "task", cpu__max="400000 100000\n")
    assert cpu_quota("0::/job/task\n", tmp_path) == 1.5
    assert cpu_quota("0::/elsewhere\n", tmp_path) is None
    cgroup(tmp_path / "job", cpu__max="150000 0\n")
    assert cpu_quota("0::/job\n", tmp_path) is None


def test_a_quota_of_cgroups_version_1(tmp_path: Path) -> None:
    member = "9:name=systemd:/x\n4:cpu,cpuacct:/docker/1\n0::/x\n"
    own = tmp_path / "cpu,cpuacct"
    cgroup(own, cpu__cfs_quota_us="-1\n", cpu__cfs_period_us="100000\n")
    assert cpu_quota(member, tmp_path) is None
    cgroup(own, cpu__cfs_quota_us="250000\n", cpu__cfs_period_us="100000\n")
    assert cpu_quota(member, tmp_path) == 2.5, "a container sees its own group as the root"
    cgroup(own / "docker" / "1", cpu__cfs_quota_us="200000\n", cpu__cfs_period_us="100000\n")
    assert cpu_quota(member, tmp_path) == 2.0


@pytest.mark.nightly
@pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="the kernel does not measure waits for a CPU"
)
def test_the_time_in_which_another_program_uses_the_cpu_is_measured(tmp_path: Path) -> None:
    def compute(_: int) -> None:
        until = time.thread_time() + 0.05
        while time.thread_time() < until:
            pass

    usual = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(usual)})  # of this thread, and of the program that it starts
    busy = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    try:
        with subprocess.Popen(busy, stdout=subprocess.PIPE) as other:
            other.stdout.readline()
            try:
                found = recorded(tmp_path, compute)["cpu_wait"]
            finally:
                other.kill()
    finally:
        os.sched_setaffinity(0, usual)
    assert 0.2 < found["waited_ns"] / found["window_ns"] < 1


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("5 1000 1\n", "9 1300 2\n", {"waited_ns": 300, "ran_ns": 4, "window_ns": 2_000}),
        (None, None, None),
        ("0 0 0\n", "0 0 0\n", None),
        ("\n", "\n", None),
        ("5 1000 1\n", "9 900 2\n", None),
    ],
    ids=["measured", "no file", "not measured", "empty", "of another thread"],
)
def test_the_wait_for_a_cpu_is_what_the_kernel_measures_in_the_window(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: str | None,
    after: str | None,
    expected: dict[str, int] | None,
) -> None:
    read, contents, now_ns = Path.read_text, iter([before, after]), count(7_000, 2_000)
    own = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")

    def fake(path: Path, *rest: Any, **options: Any) -> str:
        if path != own:
            return read(path, *rest, **options)
        if (content := next(contents)) is None:
            raise FileNotFoundError
        return content

    monkeypatch.setattr(Path, "read_text", fake)
    clock = {"monotonic_ns": partial(next, now_ns), "perf_counter_ns": time.perf_counter_ns}
    monkeypatch.setattr(facts, "time", SimpleNamespace(**clock))
    found = recorded(tmp_path, nothing)["cpu_wait"]
    if found is not None:
        assert found.pop("workers_waited_ns") >= 0
    assert found == expected
    assert next(contents, None) is None


def test_the_waits_of_threads_that_python_did_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads are 11 and 12, of which 12 starts in the window, and 13, which is another one then."""
    tasks = [{"11": (5, 100), "13": (5, 900)}, {"11": (6, 400), "12": (1, 30), "13": (1, 2)}]
    window, main = facts.WindowFacts(), threading.current_thread()
    for at in tasks:
        listed = [Path(each) for each in (*at, str(main.native_id))]
        times = {**at, main.native_id: (7, 8)}
        monkeypatch.setattr(Path, "iterdir", lambda _, listed=listed: listed)
        monkeypatch.setattr(facts, "_scheduled", times.__getitem__)
        (window.begin(main) if at is tasks[0] else window.end())
    assert window.environment()["cpu_wait"]["workers_waited_ns"] == 330


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="only Linux has affinities")
def test_usable_cpus_by_affinity_and_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 4, 5})
    for quota, usable in ((None, 4), (2.5, 3), (0.2, 1), (64.0, 4)):
        monkeypatch.setattr(facts, "cpu_quota", lambda *_, quota=quota: quota)
        assert usable_cpus() == usable
    seen = iter([{0}, {1}])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: next(seen, set()))
    monkeypatch.setattr(Path, "iterdir", lambda _: iter([Path("1"), Path("2")]))
    assert usable_cpus() == 2, "OpenMP may bind each thread to a CPU of its own"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ("", 1),
        ("RANK=3 WORLD_SIZE=8 LOCAL_WORLD_SIZE=4", 4),
        ("RANK=3 WORLD_SIZE=8", None),
        ("RANK=0 WORLD_SIZE=1", 1),
        ("OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=6 OMPI_COMM_WORLD_LOCAL_SIZE=3", 3),
        (
            "SLURM_PROCID=9 SLURM_NODEID=2 SLURM_STEP_TASKS_PER_NODE=4(x2),3 SLURM_STEP_NUM_TASKS=11",
            3,
        ),
        (
            "SLURM_PROCID=5 SLURM_NODEID=1 SLURM_STEP_TASKS_PER_NODE=4(x2),3 SLURM_STEP_NUM_TASKS=11",
            4,
        ),
        ("SLURM_PROCID=0 SLURM_NODEID=0 SLURM_STEP_NUM_TASKS=2", None),
    ],
)
def test_the_launcher_says_how_many_processes_share_the_machine(
    monkeypatch: pytest.MonkeyPatch, variables: str, expected: int | None
) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "MPI_")) or "RANK" in name or "WORLD" in name:
            monkeypatch.delenv(name)
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    assert known(local_ranks) == expected


# Garbage collection.


def test_collections_within_the_window_are_counted_on_every_thread(tmp_path: Path) -> None:
    def collect(step: int) -> None:
        gc.collect()  # in each of the five steps, of which two are recorded
        if step == 2:
            other = threading.Thread(target=gc.collect)
            other.start()
            other.join()

    before = list(gc.callbacks)
    began = time.perf_counter_ns()
    found = recorded(tmp_path, collect)["garbage_collection"]
    assert found["collections"] == 3
    assert 0 < found["longest_ns"] < found["total_ns"] < time.perf_counter_ns() - began
    assert gc.callbacks == before
    quiet = recorded(tmp_path / "quiet", nothing)["garbage_collection"]
    assert quiet == dict.fromkeys(("collections", "total_ns", "longest_ns"), 0)


def counting() -> int:
    return sum(isinstance(each, Collections) for each in gc.callbacks)


def test_outside_windows_and_after_errors_no_collection_calls_us(tmp_path: Path, log: Log) -> None:
    log.expect("exception KeyError")
    counts = []

    def train(session: Session) -> None:
        with session:
            for _ in range(STEPS):
                counts.append(counting())
                session.step()
            raise KeyError("batch")

    session = Session(active=None, wait=2, warmup=1, output_dir=tmp_path)
    with pytest.raises(KeyError):
        train(session)
    assert counts == [0, 0, 0, 1, 1]
    assert counting() == 0
    assert of(session)["garbage_collection"]["collections"] == 0


def test_failure_leaves_no_hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    log.expect("Recording failed and training goes on")
    seen = []

    def fail(*_: Any) -> None:
        seen.append(counting())
        raise ValueError("not today")

    monkeypatch.setattr(Recorder, "next_step", fail)
    with Session(wait=1, active=1, output_dir=tmp_path) as session:
        for _ in range(3):
            session.step()
    assert session.captures == []
    assert seen[0] == 1
    assert counting() == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_counts_nothing(tmp_path: Path) -> None:
    with Session(active=None, output_dir=tmp_path):
        assert counting() == 1
        child = os.fork()
        if child == 0:
            os._exit(counting())
        assert os.waitpid(child, 0)[1] == 0
        assert counting() == 1


def test_a_collection_that_began_before_the_window_is_not_counted() -> None:
    noted = Collections()
    noted("stop", {})
    assert noted.totals["collections"] == 0
    for _ in range(2):
        noted("start", {})
        noted("stop", {})
    assert noted.totals["collections"] == 2
    noted("start", {})
    assert noted.totals["collections"] == 2


# Dynamo.


def counted(*values: object) -> dict[str, Any]:
    keys = ("graphs", "graph_breaks", "recompilations", "failed_guards")
    return dict(zip(keys, values, strict=True))


def broken(x: torch.Tensor, factor: int) -> torch.Tensor:
    y = x * factor
    torch._dynamo.graph_break()
    return y + 1


def test_compilations_of_the_window(tmp_path: Path, dynamo: Any, log: Log) -> None:
    log.expect("torch.compile compiled")
    first, second = (torch.compile(broken, backend="eager") for _ in range(2))

    def step(number: int) -> None:
        if number == 0:
            first(torch.ones(2), 1)  # before the window
        if number == 2:
            dynamo.reset_code_caches()
            first(torch.ones(2), 1)
            first(torch.ones(2), 2)
        if number == 4:
            second(torch.ones(3, 3), 5)  # after the window

    found = recorded(tmp_path, step)["dynamo"]
    assert found["graphs"] == 3, "both halves again, and the first for another factor"
    ((reason, times),) = found["graph_breaks"].items()
    assert "graph_break()" in reason
    assert "\n" not in reason
    assert times >= 1
    assert found["recompilations"] >= 1
    line = broken.__code__.co_firstlineno
    assert found["failed_guards"] == {f"test_environment.py:{line} in broken: factor == 1": 1}


def test_a_window_without_compilation_has_zeros(tmp_path: Path, dynamo: Any) -> None:
    compiled = torch.compile(broken, backend="eager")
    compiled(torch.ones(2), 1)
    found = recorded(tmp_path, lambda _: compiled(torch.ones(2), 1))["dynamo"]
    assert found == counted(0, {}, 0, {})


def test_gc_in_a_compiled_function(tmp_path: Path, dynamo: Any, log: Log) -> None:
    log.expect("torch.compile compiled")
    from torch._dynamo.utils import counters

    def collecting(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        gc.collect()
        return y * 2

    compiled = torch.compile(collecting, backend="eager")
    counters.clear()
    found = recorded(tmp_path, lambda step: compiled(torch.ones(2)) if step == 2 else None)
    assert counters["frames"]["total"] == 2, "the function before and after its graph break"
    assert found["dynamo"]["graphs"] == 2
    assert found["garbage_collection"]["collections"] >= 1


def test_missing_counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    log.expect("torch.compile compiled")
    utils = SimpleNamespace(counters={"stats": {"unique_graphs": 3}})
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", utils)  # type: ignore[arg-type]
    empty: Any = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "torch._dynamo.convert_frame", empty)

    def compile_two(step: int) -> None:
        utils.counters["stats"]["unique_graphs"] += 2

    for name, each_step, graphs in (("compiles", compile_two, 4), ("compiles not", nothing, 0)):
        found = recorded(tmp_path / name, each_step)["dynamo"]
        assert found == counted(graphs, {}, None, None)
    before = dynamo_counts()
    utils.counters = None  # as if torch had changed it
    assert compiled_since(known(dynamo_counts)) is None
    assert known(lambda: compiled_since(before)) is None


def test_dynamo_is_not_loaded_to_count(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch._dynamo.utils", "torch._dynamo.convert_frame"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    before = dynamo_counts()
    assert compiled_since(before) is None
    assert "torch._dynamo.utils" not in sys.modules
    # loaded within the window
    utils = SimpleNamespace(counters={"stats": {"unique_graphs": 3}})
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", utils)  # type: ignore[arg-type]
    assert compiled_since(before) == counted(3, {}, 0, None)


def counts(
    graphs: int, recompilations: int | None, guards: dict[str, int] | None = None, **breaks: int
) -> DynamoCounts:
    counters = {"stats": {"unique_graphs": graphs}, "graph_break": breaks}
    return DynamoCounts(counters, recompilations, guards)


def test_compilations_are_differences() -> None:
    once, twice = {"k == 1": 1}, {"k == 1": 1, "k == 2": 2}
    later = compilations(counts(2, 1, once, a=1, b=2), counts(5, 4, twice, a=1, b=5, c=1))
    assert later == counted(3, {"b": 3, "c": 1}, 3, {"k == 2": 2})
    cleared = compilations(counts(2, 0, {"k == 1": 3}, a=1), counts(1, 1, {"k == 2": 1}, b=1))
    assert cleared == counted(None, None, 1, None), "the program has cleared the counters"
    reset = compilations(counts(2, 2, a=1), counts(2, 1, a=2))
    assert reset == counted(0, {"a": 1}, None, None), "torch._dynamo.reset was called"
    assert compilations(counts(2, None), counts(2, 1))["recompilations"] is None


def test_reasons_are_few_short_and_without_secrets() -> None:
    many = {f"reason {number}\n  with a second line": number + 1 for number in range(30)}
    kept = shortened(many)
    assert list(kept) == [
        *(f"reason {number} with a second line" for number in range(29, 9, -1)),
        "(other reasons)",
    ]
    assert sum(kept.values()) == sum(many.values())
    long = {"x" * 200 + "a": 1, "x" * 200 + "b": 2}
    assert shortened(long) == {"x" * 200: 3}
    token = "hf_" + "a1" * 20
    hidden = shortened({f"open https://me:word@host/?q=1 {token}": 1, "y" * 190 + f" {token}": 1})
    assert all("hf_" not in reason and "word" not in reason for reason in hidden)


# Loaders.


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Five numbers, and no length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(STEPS))


IN_PROCESS = {
    "phase": "train", "workers": 0, "batch_size": 2, "pin_memory": False,
    "persistent_workers": False, "prefetch_factor": None, "iterable": False,
}  # fmt: skip


def test_the_loader_that_the_window_iterates_is_described(tmp_path: Path) -> None:
    loader = DataLoader(range(10), batch_size=2)  # type: ignore[arg-type]
    with Session(wait=2, active=2, output_dir=tmp_path) as session:
        for _ in session.steps(loader):
            pass
    assert of(session)["loaders"] == [IN_PROCESS]


def test_every_loader_of_the_window_is_listed_once_and_no_other(tmp_path: Path) -> None:
    before = DataLoader(range(2), batch_size=1)  # type: ignore[arg-type]
    persistent: Any = DataLoader(
        Stream(), batch_size=2, num_workers=1, persistent_workers=True, prefetch_factor=3
    )
    after = DataLoader(range(6), batch_size=3)  # type: ignore[arg-type]
    evaluated = DataLoader(range(3), batch_size=2)  # type: ignore[arg-type]
    with Session(wait=3, active=4, output_dir=tmp_path) as session:
        for loader in (before, persistent, persistent):
            for _ in session.steps(loader):
                pass
            with session.phase("validation"):
                for _ in session.steps(evaluated if loader is persistent else before):
                    pass
        for _ in session.steps(after):
            pass
    trained = {"workers": 1, "persistent_workers": True, "prefetch_factor": 3, "iterable": True}
    found = of(session)["loaders"]
    assert found == [IN_PROCESS | trained, IN_PROCESS | {"phase": "validation"}]


def test_without_a_known_loader_the_loaders_are_unknown(tmp_path: Path) -> None:
    assert recorded(tmp_path / "none", nothing)["loaders"] is None
    with Session(wait=1, active=1, output_dir=tmp_path / "generator") as session:
        for _ in session.steps(iter(range(STEPS))):
            pass
    assert of(session)["loaders"] is None


def test_any_object_is_asked_for_its_settings_and_none_can_fail() -> None:
    class Hostile:
        num_workers = 2
        pin_memory = "yes"
        prefetch_factor = -1

        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

    unknown = dict.fromkeys(IN_PROCESS.keys() - {"phase"})
    assert loader_settings(Hostile()) == {**unknown, "workers": 2}
    assert loader_settings(SimpleNamespace(num_workers="4")) is None
    assert loader_settings(None) is None
    sampler = torch.utils.data.BatchSampler(range(6), batch_size=3, drop_last=False)
    batches: tuple[Any, ...] = ([[0, 1], [2, 3]], sampler)
    sampled = [
        loader_settings(DataLoader(range(6), batch_sampler=each))  # type: ignore[arg-type]
        for each in batches
    ]
    assert [settings["batch_size"] for settings in sampled] == [None, 3]  # type: ignore[index]


def test_a_trainers_loader_counts_until_the_run_ends() -> None:
    loaders = Loaders()
    loaders.add(SimpleNamespace(num_workers=1), "train")
    loaders.add(SimpleNamespace(num_workers=2), "train")
    loaders.begin_window()
    assert [each["workers"] for each in loaders.seen.values()] == [2]
    loaders.end_run()
    loaders.begin_window()
    assert loaders.seen == {}


def test_the_number_of_loaders_is_bounded() -> None:
    loaders = Loaders()
    for workers in range(100):
        with loaders.iterating(SimpleNamespace(num_workers=workers), "train"):
            pass
    assert len(loaders.seen) == _MOST_LOADERS


def test_the_written_key_has_the_types_that_readers_expect(tmp_path: Path) -> None:
    written = recorded(tmp_path, nothing)
    struct = typed({"environment": written}).environment
    assert sorted(written) == sorted(struct.__struct_fields__)
    for key in ("threads", "garbage_collection"):
        assert list(written[key]) == list(getattr(struct, key).__struct_fields__)

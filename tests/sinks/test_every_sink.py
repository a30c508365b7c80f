"""What every built-in sink does; the config group lists them, so a new one is tested too."""

from __future__ import annotations

import gzip
import inspect
import json
import os
import pickle
import pkgutil
import subprocess
import sys
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders import (
    Event,
    allocation,
    annotation,
    frame,
    is_harmless,
    kernels,
    steps,
    write_capture,
)
from collected import Log
from installed import need
from omegaconf import OmegaConf

import instrument.export.sinks
from instrument.base.errors import (
    CaptureError,
    ConfigError,
    InstrumentError,
    MissingPackage,
    TraceError,
)
from instrument.base.instantiate import build, for_any_process, sink_of_class
from instrument.base.presets import shipped
from instrument.export.sinks import Sink
from instrument.export.window import finish
from instrument.read.capture import Capture
from instrument.record.config.schema import ProfilerConfig

GROUP = files("instrument") / "conf" / "profiler" / "sinks"
SHIPPED = shipped("sinks")
PACKAGES = {"tensorboard": "tensorboard"}
# With its defaults this one leaves the trace as it is.
OPTIONS: dict[str, dict[str, Any]] = {"chrome_trace": {"metadata": {"run": "a7"}}}
HOSTILE = "e é\x1b]0;owned\x07\x1b[2J\x9b31m\nforged  9\r\u202e</script><b>%s{x}"
# What a trace without any events lacks.
NOTHING_IN = {
    "memory": "The trace holds no memory events; record it with profile_memory=true.",
    "stacks": "holds no Python frames",
}
REFUSES_CUT = ("chrome_trace", "tensorboard")


def events(name: str = "block") -> list[Event]:
    """Something for every sink: ranges, operators, kernels, Python frames, memory."""
    return [
        *steps(),
        *kernels(),
        annotation(name, 650, 20),
        frame(f"train.py(1): {name}", 0, 2500, Python_id=1),
        allocation(260, 4096, 1, 4096, device=0),
    ]


@pytest.fixture(params=SHIPPED)
def name(request: pytest.FixtureRequest) -> str:
    if request.param in PACKAGES:
        need(PACKAGES[request.param])
    return str(request.param)


@pytest.fixture
def sink(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sink:
    """The sink as a config names it; the home and the working directory are empty folders."""
    for place in ("home", "here"):
        (tmp_path / place).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    return build("sink", name, {"_target_": SHIPPED[name], **OPTIONS.get(name, {})})


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "profile"


def contents(folder: Path) -> dict[str, Any]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def written(sink: Sink, capture: Capture) -> dict[str, bytes]:
    """The files below the captures' folder that writing made or changed."""
    output = capture.folder.parent
    before = contents(output)
    try:
        sink.write(capture, capture.folder)
    finally:
        sink.close()
    return {path: data for path, data in contents(output).items() if before.get(path) != data}


def one_sentence(error: BaseException) -> str:
    text = str(error)
    assert is_harmless(text)
    assert "\n" not in text
    return text


def test_every_sink_has_a_config_file() -> None:
    found = set()
    for module in pkgutil.iter_modules(instrument.export.sinks.__path__):
        for kind in vars(import_module(f"instrument.export.sinks.{module.name}")).values():
            if inspect.isclass(kind) and issubclass(kind, Sink) and kind is not Sink:
                found.add(f"{kind.__module__}.{kind.__qualname__}")
    assert found == {*SHIPPED.values()}


def test_a_config_file_lists_every_option_with_its_default(name: str) -> None:
    text = (GROUP / f"{name}.yaml").read_text(encoding="utf-8")
    loaded = OmegaConf.to_container(OmegaConf.create(text))
    assert isinstance(loaded, dict)
    assert list(loaded) == [name]
    built = build("sink", name, loaded[name])
    options = dict(loaded[name])
    target = f"{type(built).__module__}.{type(built).__name__}"
    assert options.pop("_target_") == SHIPPED[name] == target
    assert options == built.model_dump()
    assert list(options) == list(type(built).model_fields)
    assert "@package" not in text


def test_what_it_needs_is_an_option_of_the_recording(sink: Sink) -> None:
    fields = ProfilerConfig.model_fields
    assert [flag for flag in sink.needs if fields[flag].annotation is not bool] == []


@pytest.mark.parametrize("kind", ["ordinary", "truncated", "hostile"])
def test_writes_in_folder(sink: Sink, kind: str, output: Path, tmp_path: Path, log: Log) -> None:
    hostile = kind == "hostile"
    window = {"first_step": 3, "last_step": 4, "steps": 2, "planned_steps": 9}
    cut = {"truncated": kind == "truncated", "reason": HOSTILE if hostile else "exception"}
    about = {"window": window | cut, "versions": {"torch": HOSTILE if hostile else "2.13.0"}}
    folder = HOSTILE.replace("/", "") if hostile else "steps_3-4"
    capture = write_capture(
        output, events(f"{HOSTILE}\ud800" if hostile else "block"), folder, **about
    )
    made = written(sink, capture)
    assert made
    for path, data in made.items():
        if path.endswith((".txt", ".html")):
            assert is_harmless(data.decode()), path
            assert b"</script><b>" not in data or path.endswith(".txt"), path
    assert is_harmless("\n".join(log))
    assert [*contents(tmp_path / "home"), *contents(tmp_path / "here")] == []
    assert {path.name for path in tmp_path.iterdir()} == {"home", "here", "profile"}
    rows = [tuple(row) for row in Capture.load(capture.folder or "").operators]
    assert rows == [tuple(row) for row in capture.operators], "the trace says the same as before"


def test_empty_trace_is_written_or_refused(sink: Sink, name: str, output: Path) -> None:
    capture = write_capture(output, [])
    if name in NOTHING_IN:
        with pytest.raises(InstrumentError) as error:
            written(sink, capture)
        assert NOTHING_IN[name] in one_sentence(error.value)
        assert len(contents(output)) == 2, "nothing is left of it"
    else:
        assert written(sink, capture)


@pytest.mark.filterwarnings("ignore::instrument.base.errors.TraceWarning")
def test_beginning_of_a_cut_trace_is_written(sink: Sink, name: str, output: Path) -> None:
    """Like an interrupted copy; the sinks that pass on the file itself refuse it."""
    capture = write_capture(output, [*events(), *steps()])
    packed = capture.trace_path.read_bytes()
    capture.trace_path.write_bytes(packed[: len(packed) * 3 // 4])
    before = contents(output)
    if name in REFUSES_CUT:
        with pytest.raises(TraceError, match="gzip that is cut short; copy or record it again"):
            written(sink, Capture.load(capture.folder or ""))
        assert contents(output) == before
    elif name not in NOTHING_IN:
        assert written(sink, Capture.load(capture.folder or ""))


def test_a_trace_that_has_been_dropped_is_told_in_a_sentence(sink: Sink, output: Path) -> None:
    capture = write_capture(output, events())
    capture.trace_path.unlink()
    before = contents(output)
    with pytest.raises(CaptureError, match="holds no trace") as error:
        written(sink, Capture.load(capture.folder or ""))
    one_sentence(error.value)
    assert contents(output) == before


def test_a_second_time_changes_nothing(sink: Sink, output: Path) -> None:
    capture = write_capture(output, events())
    written(sink, capture)
    first = contents(output)
    written(sink, Capture.load(capture.folder or ""))
    again = contents(output)
    for each in (first, again):  # a key that is written twice is one
        packed = [path for path in each if path.endswith("trace.json.gz")]
        each |= {path: json.loads(gzip.decompress(each[path])) for path in packed}
    assert again == first


def test_two_ranks_stay_out_of_each_others_way(sink: Sink, output: Path) -> None:
    ranks = [
        write_capture(output, events(), f"steps_3-4_rank{rank}", rank=rank, world_size=2, pid=rank)
        for rank in (0, 1)
    ]
    first, second = (written(sink, capture) for capture in ranks)
    assert not first.keys() & second.keys()
    assert len(first) == len(second)


def test_another_process_can_build_its_like(sink: Sink) -> None:
    assert pickle.loads(pickle.dumps(sink)) == sink
    mapping = for_any_process(sink, None)
    options = json.loads(json.dumps(mapping))
    assert sink_of_class(options.pop("_target_"), options) == sink


def test_failure_keeps_the_raw_trace(sink: Sink, name: str, output: Path, log: Log) -> None:
    log.expect("summary.json")
    raw = b'"traceEvents": [{"ph": "X", "na'
    queued = output / ".steps_3-4.queued"
    queued.mkdir(parents=True)
    (queued / "trace.json").write_bytes(b"{" + raw)
    (queued / "capture.json").write_text(json.dumps({"format": 1, "name": "steps_3-4"}))
    failed: set[str] = set()
    folder = finish(queued, {name: sink}, failed=failed)
    assert folder == output / "steps_3-4"
    assert raw in gzip.decompress((folder / "trace.json.gz").read_bytes())
    for line in log.at("ERROR"):
        assert line.startswith(f"The {name} sink failed on steps_3-4: ")
        assert "\n" not in line
    assert len(log.at("ERROR")) == (name in failed) == (name != "chrome_trace")


def test_an_unknown_option_gets_one_sentence(name: str, sink: Sink) -> None:
    option = next(iter(type(sink).model_fields))
    wrong = option[:-1] + option[-1] * 2
    for given, end in (
        (wrong, f"; did you mean {option!r}?"),
        ("zzzz", f"; choose from {option!r}"),
    ):
        with pytest.raises(ConfigError) as error:
            build("sink", name, {given: 3})
        start = f"{type(sink).display_name()} has no option {given!r}{end}"
        assert one_sentence(error.value).startswith(start)


@pytest.mark.parametrize("spec", [None, SimpleNamespace(origin=None)], ids=["nothing", "a folder"])
def test_missing_package_when_built(name: str, spec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instrument.base.errors.find_spec", lambda package: spec)
    if name not in PACKAGES:
        build("sink", name, {})
        return
    with pytest.raises(MissingPackage) as error:
        build("sink", name, {})
    assert one_sentence(error.value).lower() == (
        f"the {name} sink needs the package {PACKAGES[name]}: pip install "
        f"'torch-instrument[{name}]'."
    )


@pytest.mark.nightly  # a new interpreter loads what all sinks need
def test_writing_loads_no_torch_and_starts_no_thread(output: Path) -> None:
    capture = write_capture(output, events())
    code = """if True:
        import sys, threading
        from instrument.read.capture import Capture
        from instrument.base.instantiate import sink_of_class
        capture = Capture.load(sys.argv[1])
        for name in sys.argv[2:]:
            sink_of_class(name, {}).write(capture, capture.folder)
            print(name, *{"torch", "tensorflow"} & {*sys.modules}, threading.active_count())
    """
    names = [*SHIPPED]
    command = [sys.executable, "-c", code, str(capture.folder), *names]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "LOGURU_LEVEL": "ERROR"}
    )
    assert (done.stdout, done.stderr) == ("".join(f"{name} 1\n" for name in names), "")

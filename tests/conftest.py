"""What every test gets: the log, and proof that nothing of ours is left running."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import warm
from browsing import browser as browser
from browsing import opened as opened
from browsing import opened_once as opened_once
from collected import Log, logged
from commands import command as command
from commands import transcript as transcript
from golden import golden as golden
from hypothesis import HealthCheck, settings
from left_on import Before
from waits import now as now

from instrument import ProfilerConfig
from instrument.record import facts, finisher

# No example fails because the machine is busy. The gate tries few examples, the same in each run; `make nightly`
# tries many new ones, with --hypothesis-profile=nightly. A test that says no max_examples of its own follows.
_QUIET = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile(
    "gate", max_examples=30, derandomize=True, deadline=None, suppress_health_check=_QUIET
)
settings.register_profile(
    "nightly", max_examples=1000, deadline=None, suppress_health_check=_QUIET, print_blob=True
)
settings.load_profile("gate")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write the files in tests/golden anew"
    )


@pytest.fixture(autouse=True, scope="session")
def _ctrl_c() -> None:
    """Ctrl-C works, here and in child processes, also where a shell has its background jobs ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _patience() -> Iterator[None]:
    """Training waits two seconds for git, and after an exception for the exporter, five for sinks: too few on a busy machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finisher, "_AFTER_FAILURE_S", 120.0)
        patch.setattr(facts, "_GIT_S", 120.0)
        patch.setattr(finisher, "_CLOSING_S", 120.0)
        yield


# xdist gives the next file to each process that has ended one: files that take long come first.
_LONGEST = (
    *("test_docs", "test_run_command", "test_upload", "test_examples", "test_forged_lines"),
    *(
        "test_cli",
        "test_event_order",
        "test_pytest_plugin",
        "test_other_profilers",
        "test_exporter",
    ),
    *("test_faults", "test_use", "test_hydra", "test_lightning", "test_regression_gate"),
)


def pytest_configure(config: pytest.Config) -> None:
    """The processes of xdist fork their scripts from one process, which loads torch while they do."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        os.environ[warm.SOCKET] = warm.server()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return one process more than there are CPUs, because tests wait for others; each loads torch."""
    return min(4, (os.cpu_count() or 1) + 1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {name: number for number, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))


@pytest.fixture(autouse=True)
def log() -> Iterator[Log]:
    """Collect the log; a warning or an error that the test does not expect fails it."""
    with logged() as lines:
        yield lines


@pytest.fixture(autouse=True)
def _warnings_in_scripts() -> Iterator[None]:
    """A Python warning inside the package fails the test in scripts and exporters too, where it is no error."""
    yield
    warned = warm.package_warnings()
    assert not warned, f"Warnings in a script or an exporter:\n{warned}"


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
    """No warning of ours is hidden in a fixture for several tests, either."""
    if fixturedef.scope == "function":
        return (yield)
    with logged():
        return (yield)


@pytest.fixture
def inline_export(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions finish their windows themselves unless told otherwise: starting another process takes a second."""
    monkeypatch.setattr(ProfilerConfig, "__pydantic_validator__", _validator_of_inline_export())
    monkeypatch.setattr(ProfilerConfig.model_fields["export"], "default", "inline")


@cache
def _validator_of_inline_export() -> Any:
    """Made once, because that takes 13 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProfilerConfig.model_fields["export"], "default", "inline")
        ProfilerConfig.model_rebuild(force=True)
        made = ProfilerConfig.__pydantic_validator__
    ProfilerConfig.model_rebuild(force=True)
    return made


@pytest.fixture(scope="module")
def warm_exporters() -> Iterator[None]:
    """Exporters, here and in scripts, are forked from a process that has loaded what they need."""
    with warm.exporters():
        yield


@pytest.fixture
def cold_exporters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exporters are started as users have them, for a test among others with `warm_exporters`."""
    monkeypatch.setattr(finisher, "subprocess", subprocess)
    monkeypatch.delenv(warm.EXPORTER)


@pytest.fixture(autouse=True, scope="module")
def frozen_heap() -> None:
    """A collection takes milliseconds: it skips the million objects that exist before the module's tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    """As in a process in which no test has compiled code: where one has, detail windows do less."""
    with pytest.MonkeyPatch.context() as patch:
        if (dynamo := sys.modules.get("torch._dynamo.eval_frame")) is not None:
            patch.setattr(dynamo, "cached_backends", {})
            counters: Any = sys.modules["torch._dynamo.utils"].counters
            patch.delitem(counters, "frames", raising=False)
        yield


@pytest.fixture(autouse=True)
def _nothing_left_running() -> Iterator[None]:
    """Fail a test that leaves something on, and turn it off for those after it."""
    before = Before()
    yield
    left = before.restore()
    assert not left, f"The test left behind {', '.join(left)}."

"""What every test gets: the log, and proof that nothing of ours is left running."""

from __future__ import annotations

import gc
import signal
import subprocess
from collections.abc import Iterator

import pytest
import warm
from browsing import browser as browser
from browsing import opened as opened
from browsing import opened_once as opened_once
from collected import Log
from commands import command as command
from commands import transcript as transcript
from golden import golden as golden
from hypothesis import HealthCheck, settings
from left_on import Before
from loguru import logger

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


@pytest.fixture(autouse=True)
def log() -> Iterator[Log]:
    """Collect the log; an error that no test asked for fails it."""
    lines = Log()
    handler = logger.add(
        lambda message: lines.append(str(message).rstrip("\n")), format="{level} {message}", level=0
    )
    yield lines
    logger.remove(handler)
    if not lines.errors_expected:
        assert not lines.at("ERROR"), "something failed behind the test's back"


@pytest.fixture
def inline_export(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sessions finish their windows themselves unless told otherwise: starting another process takes a second."""
    with monkeypatch.context() as patch:
        patch.setattr(ProfilerConfig.model_fields["export"], "default", "inline")
        ProfilerConfig.model_rebuild(force=True)
        yield
    ProfilerConfig.model_rebuild(force=True)


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
def _nothing_left_running() -> Iterator[None]:
    """Fail a test that leaves something on, and turn it off for those after it."""
    before = Before()
    yield
    left = before.restore()
    assert not left, f"The test left behind {', '.join(left)}."

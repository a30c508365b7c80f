"""The pytest plugin: tests that fail if counters of a training step exceed limits (a budget).

    @pytest.mark.perf_budget(operators=412, syncs=0, peak="2GB")
    def test_a_training_step(profile_session):
        with profile_session as session:
            for batch in session.steps(batches):
                train(batch)

pytest imports this module in each run. So this module imports only pytest and the standard library.
Only tests that use the fixture load torch and the rest of this package.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Iterator
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

if TYPE_CHECKING:
    from instrument.read.capture import Capture
    from instrument.read.compare.counters import Counters
    from instrument.read.compare.limits import Condition
    from instrument.record.facts import DynamoCounts
    from instrument.record.session import Session

MARKER, FIXTURE = "perf_budget", "profile_session"
FOLDER = "perf"

_RECORDING = pytest.StashKey["_Recording"]()
_HELP = (
    f"{MARKER}(operators=412, syncs=0, peak='2GB'): limits on the counters of a step that the "
    f"test's {FIXTURE} records; without arguments, the limits are the counters in the test's file "
    f"in {FOLDER}/"
)
# The prefix of pytest's user properties that hold a test's counters. pytest-xdist sends user
# properties from its worker processes to the report.
_PROPERTY = "perf:"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this plugin."""
    group = parser.getgroup("torch-instrument")
    group.addoption(
        "--perf-update",
        action="store_true",
        help=f"for each test with {FIXTURE}, write the counters to the test's file in {FOLDER}/",
    )
    group.addoption(
        "--perf-report",
        action="store_true",
        help=f"at the end, print the counters of each test with {FIXTURE}",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", _HELP)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Check the budgets of all collected tests; a wrong one is a usage error."""
    for item in items:
        if item.get_closest_marker(MARKER) is None:
            continue
        from instrument.base.errors import ConfigError

        if FIXTURE not in getattr(item, "fixturenames", ()):
            raise pytest.UsageError(
                f"{item.nodeid}: {MARKER} needs the fixture {FIXTURE}: add it to the test's "
                "arguments."
            )
        try:
            _budget(item)
        except ConfigError as error:
            raise pytest.UsageError(f"{item.nodeid}: {error}") from None


@pytest.fixture
def profile_session(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Session]:
    """A session that records everything that a test's budget (its limits for a step) needs.

    Start it with `with`, or with `start(model)`. With `start(model)`, the model's submodules are
    ranges, and the plugin stops the session after the test. Call `session.step()` after each step,
    or loop over `session.steps(batches)`.

    The first step is a warm-up that is not recorded; torch.compile compiles in this step. If
    several steps are recorded, the first recorded step is not counted. So run at least four steps:
    then two steps are counted, and the plugin can find a counter that varies between steps.
    """
    from instrument.record.facts import dynamo_counts
    from instrument.record.session import Session

    session = Session(
        active=None,
        warmup=1,
        record_shapes=True,
        profile_memory=True,
        with_flops=True,
        with_stack=True,
        export="inline",
        output_dir=tmp_path / "profile",
    )
    request.node.stash[_RECORDING] = _Recording(session, dynamo_counts())
    yield session
    session.stop()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, None]:
    """Check the budget of a test that has passed; the test fails if a budget is exceeded."""
    outcome = yield
    recording = item.stash.get(_RECORDING, None)
    if recording is None or outcome.excinfo is not None:
        return
    try:
        _judge(item, recording)
    except (Exception, pytest.fail.Exception) as error:
        outcome.force_exception(error)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the counters of all tests if --perf-report is given."""
    if not config.getoption("--perf-report"):
        return
    rows = [
        (report.nodeid, name.removeprefix(_PROPERTY), value)
        for outcome in ("passed", "failed")
        for report in terminalreporter.getreports(outcome)
        if report.when == "call"
        for name, value in report.user_properties
        if str(name).startswith(_PROPERTY)
    ]
    terminalreporter.section("counters of a step")
    width = max((len(name) for _, name, _ in rows), default=0)
    test = None
    for nodeid, name, value in rows:
        if nodeid != test:
            terminalreporter.line(nodeid)
        terminalreporter.line(f"  {name:<{width}}  {value}")
        test = nodeid


class _Recording(NamedTuple):
    session: Session
    compiled_before: DynamoCounts


def _judge(item: pytest.Item, recording: _Recording) -> None:
    """Compare a test's counters with its budget.

    With `--perf-update`, the counters become the new budget in the test's file, and only limits
    that the marker itself gives are compared.
    """
    from instrument.base.errors import InstrumentError
    from instrument.base.files import write
    from instrument.base.printable import printable_lines
    from instrument.read.compare import limits
    from instrument.read.compare.baseline import as_text, read
    from instrument.read.compare.counters import Occurred, calls_behind

    try:
        capture, counted = _counted(recording)
        path = _file(item, counted)
        stored = read(path) if path.exists() else None
        updates = item.config.getoption("--perf-update")
        conditions = _budget(item)
        if conditions == [] and not updates:
            if stored is None:
                pytest.fail(
                    f"{MARKER} has no limits, and the file {path} does not exist: run pytest with "
                    "--perf-update, and add the file to the repository.",
                    pytrace=False,
                )
            conditions = limits.limits_of(stored)
        if updates:  # a change is judged with the next recording
            conditions = [each for each in conditions or () if each.kind == "value"]
        conditions = conditions or []
        before = [] if stored is None else [limits.Window(stored)]
        after = [limits.window_of(capture, counted, conditions)]
        verdicts = [limits.judge(each, before, after) for each in conditions]
        item.user_properties += _properties(counted, conditions)
        if updates:
            path.parent.mkdir(exist_ok=True)
            write(path, as_text(counted))
    except InstrumentError as error:
        pytest.fail(str(error), pytrace=False)
    broken = [each for each in verdicts if limits.breaks_budget(each, counted)]
    if broken:
        occurred = Occurred(capture)
        lines: list[str] = []
        for each in broken:
            calls = partial(calls_behind, each.condition.name, occurred, stored, counted)
            lines += limits.as_lines(each, calls)
        pytest.fail(printable_lines(*lines), pytrace=False)


def _counted(recording: _Recording) -> tuple[Capture, Counters]:
    """Stop the session, and compute the counters of its last capture.

    Graph breaks and recompilations are counted from the start of the test, because torch.compile
    compiles in the first step, which is not recorded.
    """
    from instrument.read.compare.counters import counters, with_compilations
    from instrument.record.facts import compilations, dynamo_counts

    session = recording.session
    session.stop()
    if not session.captures:
        pytest.fail(
            f"{FIXTURE} has recorded nothing: start it with `with {FIXTURE} as session:`, and run "
            "at least two steps. If the test already does both, look for the cause in the log.",
            pytrace=False,
        )
    capture = session.captures[-1]
    compiled = compilations(recording.compiled_before, dynamo_counts())
    return capture, with_compilations(counters(capture), compiled)


def _properties(counted: Counters, limits: Iterable[Condition]) -> list[tuple[str, object]]:
    from instrument.read.compare.limits import amount_of

    limit_of = {each.name: f", limit {each.limit}" for each in limits}
    found: list[tuple[str, object]] = []
    for name, count in counted.counts.items():
        text, limit = amount_of(name), limit_of.get(name, "")
        if count is None:
            value = "not recorded" if limit else ""
        elif count.per_step is None:
            value = f"{text(count.least)} to {text(count.most)}, varies"
        else:
            value = text(count.most)
        if value:
            found.append((_PROPERTY + name, value + limit))
    return found


def _budget(item: pytest.Item) -> list[Condition] | None:
    """The limits of a test's markers; None without a marker."""
    from instrument.read.compare.limits import budget

    markers = [*item.iter_markers(MARKER)]
    if not markers:
        return None
    # pytest lists the marker of the test first. In reverse order, it overrides the other markers.
    given = {k: v for marker in reversed(markers) for k, v in marker.kwargs.items()}
    return budget(given, [each for marker in markers for each in marker.args])


def _file(item: pytest.Item, counted: Counters) -> Path:
    """The file with the counters of a test; runs with and without a device use separate files."""
    name = item.nodeid.partition("::")[2].replace("::", ".")
    plain = re.sub(r"[^\w.-]", "-", name)
    if plain != name:  # without a hash, two tests could have the same plain name
        plain += f"-{blake2b(name.encode('utf-8', 'replace'), digest_size=3).hexdigest()}"
    device = "" if counted.counts["kernels"] is None else ".device"
    return item.path.parent / FOLDER / f"{item.path.stem}.{plain}{device}.json"

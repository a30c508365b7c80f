"""`instrument run`: run a script that nobody edited, record some steps, and say what slows it."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import textwrap
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from instrument.base.errors import ConfigError, reason_of
from instrument.base.files import CHANGES_VARIABLE, TRIAL_VARIABLE
from instrument.base.prose import wrapped
from instrument.base.rank_info import lowest_rank, rank_info
from instrument.cli.arguments import add_step_kind
from instrument.cli.output import say
from instrument.record.own_modules import doubles, own_modules
from instrument.record.script import prepared, when_torch_is_loaded

if TYPE_CHECKING:
    from instrument.read.advise.finding import Finding
    from instrument.record.config.schema import ProfilerConfig
    from instrument.record.unedited import StepKind, Watch

    # preset, overrides, --step, --with, and the words of the script
    Asked: TypeAlias = tuple[str, Sequence[str], StepKind | None, str, Sequence[str]]

T = TypeVar("T")

HELP = "run a script as it is, and say what slows it"

_PRESET = "summary"
# Only without these options, a second window may replace the first.
_WHEN = ("at_steps", "every_n_steps", "keep", "phases", "repeat", "skip_first", "wait", "warmup")
_SAY_WHEN = tuple(f"profiler.{name}=" for name in _WHEN)
# How long the end waits at most until all windows are finished, also those of other ranks.
# After its main thread has ended, a script's other threads train on if steps end this often.
_LONGEST_STEP_S = 5.0
_LONGEST_WAIT_S = 30.0
_FEW_WORDS = 6
# These versions of torch print when a window begins and ends, and nothing else at this level.
_TALKS = ("2.13.", "2.14.")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments and the text of its help."""
    options = "[PRESET] [profiler.OPTION=VALUE ...] [options]"
    parser.usage = (
        f"instrument run {options} [--] SCRIPT [ARGUMENTS ...]\n"
        f"       instrument run {options} -m MODULE [ARGUMENTS ...]"
    )
    parser.description = (
        "Run a script or a module like `python`, and record some of its steps. At its end, say on "
        "stderr what slows it and what to change, and write the page report.html into the folder "
        "of its last window. The results, the output and the exit status of the script do not "
        "change. A step ends when an optimizer has stepped; without an optimizer, after a "
        "backward; in inference, after a call of the model. The first two steps are never "
        "recorded. profiler.OPTION is any option of the profiler. For several ranks: "
        "torchrun ... -m instrument run -- SCRIPT"
    )
    parser.set_defaults(options=[])
    add = parser.add_argument
    add("words", metavar="PRESET", nargs="*", help=f"what to record (default: {_PRESET})")
    add_step_kind(parser)
    changes = "changes of `instrument try` to make to the script, such as fused,workers=2"
    add("--with", dest="changes", metavar="CHANGES", default="", help=changes)


def split(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Split the words after `instrument run` into the command's own and those of the script.

    The script begins after `--`, with `-m`, or with the first word that is no option or preset.
    """
    from instrument.base.presets import presets

    own, before = presets(), ""
    for number, word in enumerate(words):
        if word == "--":
            return words[:number], words[number + 1 :]
        is_option = word.startswith(("profiler.", "-")) and ("=" in word or word[0] == "-")
        if word == "-m" or not (is_option or word in own or before in ("--step", "--with")):
            return words[:number], words[number:]
        before = word
    return words, []


def run(arguments: argparse.Namespace) -> Callable[[], int]:
    """Check the arguments; return a function that runs the script and returns its exit status."""
    words = [*arguments.words, *arguments.options]
    preset, *more = [word for word in words if "=" not in word] or [_PRESET]
    if more:
        raise ConfigError(
            f"{preset} and {more[0]} are two presets: give one, or `--` and the script."
        )
    overrides = [word for word in words if "=" in word]
    config_of(preset, overrides)  # raises before the script begins
    script, changes = prepared(arguments.program), arguments.changes
    if changes and os.environ.get(CHANGES_VARIABLE) != changes:
        # the script must load torch itself, in a process that has the variables of the changes
        from instrument.record.applied_changes import variables

        os.environ.update(variables(changes))
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    asked = preset, overrides, arguments.step, changes, [*arguments.program]
    return lambda: _record(script, asked) or 0


def config_of(preset: str, overrides: Sequence[str]) -> ProfilerConfig:
    """The options of a preset with overrides, for a run whose steps 0 and 1 cannot be recorded.

    Windows that would begin with one of these begin with step 2 or later. There is the trigger
    `file`, for `instrument trigger`, but not the preset's sink `table`, because the verdict
    replaces its log.
    """
    from instrument.base.instantiate import parse_options
    from instrument.base.presets import merged
    from instrument.base.presets import preset as options_of
    from instrument.record.config.schema import as_config

    options = options_of(preset)
    options.get("sinks", {}).pop("table", None)
    options = merged(options, {"triggers": {"file": {}}})
    given = parse_options(overrides).get("profiler", {})
    if given.keys() & {"at_steps", "every_n_steps"}:
        options["wait"] = 0  # the preset's wait would have no effect
    options = merged(options, given)
    if "profile_all_threads" not in given:
        # a script may train on any thread, and a step may end within a backward
        of_one = options["profile_memory"] or options["memory_categories"]
        options["profile_all_threads"] = not of_one
    config = as_config(options)
    first = 2  # see `FIRST_STEP` in `instrument.record.unedited`, which loads torch
    if config.at_steps:
        return as_config(options, at_steps=sorted({max(first, step) for step in config.at_steps}))
    if config.at_steps is None and config.every_n_steps is None:
        idle = config.skip_first + config.wait
        return as_config(options, skip_first=config.skip_first + max(0, first - idle))
    return config


def _record(act: Callable[[], T], asked: Asked, spawned: int | None = None) -> T:
    """Call `act`, and record it: a script, or what a process runs that `mp.spawn` has started.

    `spawned` is the number that `mp.spawn` gave to the process.
    """
    from instrument.base import log

    preset, overrides, kind, changes, program = asked
    is_trial = TRIAL_VARIABLE in os.environ
    if version("torch").startswith(_TALKS):
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # as docs/troubleshooting.md says
    config = config_of(preset, overrides)
    if not (config.enabled or changes or is_trial):
        return act()
    may_move = not any(word.startswith(_SAY_WHEN) for word in overrides)
    speaks = not spawned and rank_info().rank == lowest_rank(config.ranks)
    log.logger.prints = _say_wrapped
    if not speaks:
        log.silenced.update({"DEBUG", "INFO"})
    watches: list[Watch] = []
    process, error = os.getpid(), None

    def begin() -> None:
        try:
            with own_modules():
                from instrument.record.unedited import Watch

                after_step = None
                if changes or is_trial:
                    from instrument.record.trial import begin as begin_trial

                    after_step = begin_trial(changes, observes=not config.enabled)
            # a new interpreter would import the script's modules instead of this package's
            follows = spawned is None and not doubles()
            run_spawned = partial(_run_spawned, asked) if follows else None
            watch = Watch(
                config, kind, may_move=may_move, run_spawned=run_spawned, after_step=after_step
            )
            watches.append(watch)
            watch.begin()
        except Exception as wrong:  # an error of ours must not end the script
            say(f"instrument: nothing is recorded: {reason_of(wrong)}.")

    when_torch_is_loaded(begin)
    try:
        return act()
    except BaseException as raised:
        if not isinstance(raised, SystemExit) or raised.code:
            error = raised
        raise
    finally:
        if os.getpid() == process:  # else a child that the script has forked
            try:
                _join_threads(watches)
                with own_modules():
                    _end(watches, error, speaks, kind or "optimizer", program)
            except KeyboardInterrupt:
                say("instrument: interrupted")


def _say_wrapped(text: str) -> None:
    """Print a sentence on stderr. One of few words stays a line, to copy its path or command."""
    from instrument.base.prose import PROSE_WIDTH

    width = PROSE_WIDTH if len(text.split()) > _FEW_WORDS else len(text)
    say(*textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False))


def _run_spawned(asked: Asked, function: Callable[..., Any], index: int, *args: Any) -> Any:
    """Run a function of the script in a process that `mp.spawn` has started."""
    return _record(partial(function, index, *args), asked, index)


def _end(
    watches: list[Watch],
    error: BaseException | None,
    speaks: bool,
    kind: StepKind,
    program: Sequence[str],
) -> None:
    """Stop recording, and say what slows the script; `error` has ended it, unless None."""
    try:
        for watch in watches:
            watch.end(None if isinstance(error, SystemExit) else error)
        if not speaks:
            return
        if not watches:
            say("instrument: nothing is recorded, because the script has not loaded torch.")
        elif watches[0].calls_no_parameters and watches[0].found_no_step:
            say(
                "instrument: nothing is recorded: the modules that the script has called have no "
                "parameters, so they may be transforms. With --step forward, their calls are steps."
            )
        elif watches[0].found_no_step:
            say(
                f"instrument: nothing is recorded, because no step was found: --step {kind} has "
                "counted less than two in this process. Others are optimizer, backward, forward."
            )
        elif captures := watches[0].wait(_LONGEST_WAIT_S, others=error is None):
            # without captures, the log says why there is no verdict
            say(*_verdict(captures, watches[0].times, program))
    except Exception as wrong:
        say(f"instrument: the verdict is not known: {reason_of(wrong)}.")


def _join_threads(watches: list[Watch]) -> None:
    """Wait for the script's threads, as Python does when a script has ended, while steps end.

    Not all of them can end before Python tells them to, such as those of an executor.
    """
    last, until = 0, time.monotonic() + _LONGEST_STEP_S
    executors = sys.modules.get("concurrent.futures.thread")
    others = {threading.current_thread(), *getattr(executors, "_threads_queues", ())}
    while running := {each for each in threading.enumerate() if not each.daemon} - others:
        running.pop().join(0.1)
        if (steps := sum(each.session.step_number for each in watches if each.session)) > last:
            last, until = steps, time.monotonic() + _LONGEST_STEP_S
        elif time.monotonic() > until:
            return


def _verdict(
    own: Sequence[Path], times: array[int] | None = None, program: Sequence[str] = ()
) -> list[str]:
    """Write the report page; return the verdict as lines, of which the last names the page.

    `own` are the captures of this rank; those of other ranks are in the same folder.
    """
    from instrument.base import files
    from instrument.read.advise.diagnose import Diagnosing
    from instrument.read.advise.diagnosis import below
    from instrument.read.advise.settings import read_settings
    from instrument.read.advise.verdict import causes, first_lines
    from instrument.read.capture import Capture
    from instrument.read.show.page.page import page, payload
    from instrument.read.views.find_captures import captures_at, of_newest_run
    from instrument.record.cpu_peak import cpu_peak
    from instrument.record.long_steps import long_steps, unlike_window

    every: list[Path | str] = [*own]
    if (Capture.load(own[-1]).about.world_size or 1) > 1:
        every = [each for each in captures_at(own[-1].parent) if each not in own] + every
    captures = of_newest_run(every).captures  # the page shows the last one
    seen = Diagnosing(settings=read_settings())
    shown = Capture.load(own[-1]).about
    has_peak = shown.devices or shown.config.peak_flops  # else that of this CPU
    load = partial(Capture.load, peak_flops=None if has_peak else {"float32": cpu_peak()})
    content = payload(map(load, captures), diagnosing=seen)
    target = own[-1] / "report.html"
    files.write(target, page(content).html)
    said = first_lines(seen.diagnosis)
    on_host = not seen.has_device_work  # else a step that waits for the device looks long
    found = causes(seen.diagnosis)
    costs = [each.saving.share if each.saving else each.share or 0 for each in found]
    long = sorted(long_steps(times) if times and on_host else ())
    is_busy = any(each.code == "busy-cpus" for each in seen.diagnosis.findings)
    for share, sentence, options in long:
        at = 0 if share > max(costs, default=0) else len(said)
        said.insert(at, [*wrapped(sentence), options])
    window = shown.window.first_step or 0, shown.window.steps or 0
    is_alike = bool(long) or is_busy  # a busy machine is reason enough for steps that differ
    if times and on_host and not is_alike and (unlike := unlike_window(times, *window)):
        said.append([*wrapped(unlike[0]), unlike[1]])
    said += [wrapped(each) for each in below(seen.diagnosis)]
    lines = [line for each in said for line in ("", *each)]
    if program and _could_be_tried(found) and shown.world_size in (None, 1):
        try_ = f"instrument try {shlex.join(program)}"
        lines += ["", f"To measure changes that need no edit: {try_}"]
    return [*lines, "", f"The report page is {target}."]


def _could_be_tried(found: Sequence[Finding]) -> bool:
    """Whether `instrument try` could make a change that a finding asks for."""
    from instrument.read.advise.verdict import is_large
    from instrument.record.changes import CHANGES

    codes = {code for change in CHANGES.values() for code in change.findings}
    return any(
        is_large(each) and {each.code, f"{each.code}:{each.variant}"} & codes for each in found
    )

"""`instrument run`: run a script that nobody edited, record some steps, and say what slows it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from functools import partial, wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any

from instrument.base.errors import ConfigError, reason_of
from instrument.base.rank_info import lowest_rank, rank_info
from instrument.cli.output import say
from instrument.cli.script import Script, when_torch_is_loaded

if TYPE_CHECKING:
    from instrument.config.schema import ProfilerConfig
    from instrument.record.unedited import StepKind, Watch

HELP = "run a script as it is, and say what slows it"

_PRESET = "summary"
# How long the end waits at most until all windows are finished, also those of other ranks.
_LONGEST_WAIT_S = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments and the text of its help."""
    options = "[PRESET] [profiler.OPTION=VALUE ...] [--step KIND]"
    parser.usage = (
        f"instrument run {options} [--] SCRIPT [ARGUMENTS ...]\n"
        f"       instrument run {options} -m MODULE [ARGUMENTS ...]"
    )
    parser.description = (
        "Run a script or a module like `python`, and record some of its steps. At its end, say on "
        "stderr what slows it and what to change, and write the page report.html into the folder "
        "for captures. The results, the output and the exit status of the script do not change. A "
        "step ends when an optimizer has stepped; without an optimizer, after a backward; in "
        "inference, after a call of the model. The first step is never recorded. profiler.OPTION "
        "is any option of the profiler. For several ranks: torchrun ... -m instrument run -- SCRIPT"
    )
    parser.set_defaults(options=[])
    add = parser.add_argument
    add("words", metavar="PRESET", nargs="*", help=f"what to record (default: {_PRESET})")
    kinds = ("optimizer", "backward", "forward")
    add("--step", metavar="KIND", choices=kinds, help=f"what ends a step: {', '.join(kinds)}")


def split(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Split the words after `instrument run` into the command's own and those of the script.

    The script begins after `--`, with `-m`, or with the first word that is no option or preset.
    """
    from instrument.config.presets import presets

    own, before = presets(), ""
    for number, word in enumerate(words):
        if word == "--":
            return words[:number], words[number + 1 :]
        is_option = word.startswith(("profiler.", "-")) and ("=" in word or word[0] == "-")
        if word == "-m" or not (is_option or word in own or before == "--step"):
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
    recording = Recording(preset, overrides, arguments.step)
    script = Script(arguments.program)
    return lambda: _record(script, recording)


def config_of(preset: str, overrides: Sequence[str]) -> ProfilerConfig:
    """The options of a preset with overrides, for a run whose step 0 cannot be recorded.

    Windows that would begin with step 0 begin with step 1. There is the trigger `file`, for
    `instrument trigger`, but not the preset's sink `table`, because the verdict replaces its log.
    """
    from instrument.config.instantiate import parse_options
    from instrument.config.presets import merged
    from instrument.config.presets import preset as options_of
    from instrument.config.schema import as_config

    options = options_of(preset)
    options.get("sinks", {}).pop("table", None)
    options = merged(options, {"triggers": {"file": {}}})
    options = merged(options, parse_options(overrides).get("profiler", {}))
    if options.get("at_steps"):
        options["at_steps"] = [max(1, step) for step in options["at_steps"]]
    elif all(options.get(name) is None for name in ("at_steps", "every_n_steps", "schedule")):
        waits = options.get("wait") and not options.get("skip_first_wait")
        options["skip_first"] = options.get("skip_first") or (0 if waits else 1)
    return as_config(options)


def _record(script: Script, recording: Recording) -> int:
    when_torch_is_loaded(recording.begin)
    process = os.getpid()
    status = script.run()
    if os.getpid() != process:
        return status  # a child that the script has forked
    recording.end(script.error)
    if isinstance(script.error, KeyboardInterrupt):
        raise script.error  # Python then ends as after Ctrl-C
    return status


class Recording:
    """Records this process: a script, or what a process that `mp.spawn` has started runs.

    Args:
        preset, overrides: what to record; see `config_of`.
        kind: what ends a step, if it is given.
        index: the number that `mp.spawn` gave to this process; 0 for a script.
    """

    def __init__(
        self, preset: str, overrides: Sequence[str], kind: StepKind | None, index: int = 0
    ) -> None:
        self._arguments = preset, overrides, kind
        self._config = config_of(preset, overrides)
        self._watch: Watch | None = None
        self._spawns = False
        self._speaks = index == 0 and rank_info().rank == lowest_rank(self._config.ranks)
        if not self._speaks:
            from instrument.base import log

            log.silenced.update({"DEBUG", "INFO"})

    def begin(self) -> None:
        """Begin to watch; torch is loaded."""
        if not self._config.enabled:
            return
        try:
            from instrument.record.unedited import Watch

            self._watch = Watch(self._config, self._arguments[-1])
            self._watch.begin()
            self._follow_spawned()
        except Exception as error:  # an error of ours must not end the script
            say(f"instrument: nothing is recorded: {reason_of(error)}.")

    def _follow_spawned(self) -> None:
        """Record the processes that `mp.spawn` starts, too: they train instead of this one."""
        # torch.multiprocessing.spawn is a function, and the module has the same name
        modules: list[Any] = [
            import_module(f"torch.multiprocessing{each}") for each in ("", ".spawn")
        ]
        start = modules[0].start_processes

        @wraps(start)
        def start_recorded(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self._spawns = True
            return start(partial(_run_spawned, self._arguments, fn), *args, **kwargs)

        for module in modules:
            module.start_processes = start_recorded

    def end(self, error: BaseException | None) -> None:
        """Stop recording, and say what slows the script; `error` has ended it, unless None."""
        if not self._config.enabled:
            return
        try:
            if self._watch is not None:
                self._watch.end(None if isinstance(error, SystemExit) else error)
            if self._speaks:
                say(*self._verdict(error))
        except KeyboardInterrupt:
            say("instrument: interrupted")
        except Exception as wrong:
            say(f"instrument: the verdict is not known: {reason_of(wrong)}.")

    def _verdict(self, error: BaseException | None) -> list[str]:
        """Write the report page; return the verdict as lines, of which the last names the page."""
        from instrument.analysis.find_captures import captures_at, of_newest_run
        from instrument.base import files
        from instrument.capture import Capture
        from instrument.findings.diagnose import Diagnosing
        from instrument.findings.verdict import first_lines
        from instrument.report.page.page import page, payload

        watch = self._watch
        if watch is None:
            return ["instrument: nothing is recorded, because the script has not loaded torch."]
        if watch.session is None and not watch.gave_up and not self._spawns:
            return [
                "instrument: nothing is recorded, because no step was found: no optimizer has "
                "stepped in this process. --step backward and --step forward count other steps."
            ]
        folder = watch.wait(_LONGEST_WAIT_S, others=error is None)
        if folder is None:  # the log says why
            return []
        captures, seen = of_newest_run(captures_at(folder)).captures, Diagnosing()
        content = payload(map(Capture.load, captures), diagnosing=seen)
        target = folder / "report.html"
        files.write(target, page(content).html)
        lines = [line for each in first_lines(seen.diagnosis) for line in ("", *each)]
        return [*lines, "", f"The report page is {target}."]


def _run_spawned(
    arguments: tuple[str, Sequence[str], StepKind | None],
    function: Callable[..., Any],
    index: int,
    *args: Any,
) -> Any:
    """Run a function of the script in a process that `mp.spawn` has started."""
    recording = Recording(*arguments, index)
    recording.begin()
    try:
        result = function(index, *args)
    except BaseException as error:
        recording.end(error)
        raise
    recording.end(None)
    return result

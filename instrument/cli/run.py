"""`instrument run`: run a script that nobody edited, record some steps, and say what slows it."""

from __future__ import annotations

import argparse
import builtins
import sys
import time
from collections.abc import Callable, Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from instrument.base.errors import ConfigError, reason_of
from instrument.cli.output import say

if TYPE_CHECKING:
    from instrument.config.schema import ProfilerConfig
    from instrument.record.unedited import StepKind, Watch

HELP = "run a script as it is, and say what slows it"

_PRESET = "summary"
# How long rank 0 waits at the end until the other ranks have saved their windows.
_RANKS_S = 30.0


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
    config = _config(preset, [word for word in words if "=" in word])
    script = Script(arguments.program)
    return lambda: _record(script, config, arguments.step)


def _config(preset: str, overrides: Sequence[str]) -> ProfilerConfig:
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


def _record(script: Script, config: ProfilerConfig, kind: StepKind | None) -> int:
    from instrument.base import log
    from instrument.base.rank_info import lowest_rank, rank_info

    watches: list[Watch] = []

    def watch() -> None:
        from instrument.record.unedited import Watch

        try:
            watches.append(Watch(config, kind))
            watches[0].begin()
        except Exception as error:  # an error of ours must not end the script
            say(f"instrument: the script cannot be watched: {reason_of(error)}")

    if config.enabled:
        if rank_info().rank != lowest_rank(config.ranks):
            log.silenced.update({"DEBUG", "INFO"})
        when_torch_is_loaded(watch)
    status = script.run()
    try:
        for each in watches:
            each.end(script.error)
            if rank_info().rank == lowest_rank(config.ranks):
                say(*_verdict(each, wait_s=0.0 if script.error else _RANKS_S))
        if config.enabled and not watches:
            say("instrument: the script has not loaded torch, so nothing is recorded.")
    except KeyboardInterrupt:
        say("instrument: interrupted")
    except Exception as error:
        say(f"instrument: {reason_of(error)}")
    if isinstance(script.error, KeyboardInterrupt):
        raise script.error  # Python then ends as after Ctrl-C
    return status


def when_torch_is_loaded(act: Callable[[], object]) -> None:
    """Call `act` now if torch is loaded, or else as soon as the script has loaded torch.

    A script may set variables such as OMP_NUM_THREADS before it loads torch.
    """
    if "torch" in sys.modules:
        act()
    else:
        sys.meta_path.insert(0, _WhenLoaded("torch", act))


class _WhenLoaded(MetaPathFinder):
    def __init__(self, name: str, act: Callable[[], object]) -> None:
        self._name, self._act, self._searches = name, act, False

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        """Let the other finders find the module, and act when their loader has loaded it."""
        if name != self._name or self._searches:
            return None
        try:
            self._searches = True
            spec = find_spec(name)
        finally:
            self._searches = False
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            load = loader.exec_module

            def load_and_act(module: ModuleType) -> None:
                load(module)
                del loader.exec_module
                sys.meta_path.remove(self)
                self._act()

            loader.exec_module = load_and_act
        return spec


class Script:
    """A script or a module, with its arguments, that `run` runs as `python` does.

    Attributes:
        error: what has ended the script, such as an exception or Ctrl-C; None if nothing has.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.error: BaseException | None = None
        self._as_module = words[:1] == ["-m"]
        self._words = [*words[1:]] if self._as_module else [*words]
        if not self._words:
            raise ConfigError("instrument run needs a script, or -m and a module, to run.")
        self._file = Path(self._words[0])
        if not self._as_module and not self._file.is_file():
            raise ConfigError(
                f"There is no script {self._words[0]}: give a file, or -m and a module."
            )

    def run(self) -> int:
        """Run the script in a new module `__main__`; print its traceback; return its exit status.

        The module stays, because exit handlers, pickle and multiprocessing use it.
        """
        main = sys.modules["__main__"] = ModuleType("__main__")
        vars(main)["__builtins__"] = builtins
        if not sys.flags.safe_path:
            folder = Path.cwd() if self._as_module else self._file.resolve().parent
            sys.path[0] = str(folder)
        sys.argv[:] = self._words
        try:
            exec(self._module_code(main) if self._as_module else self._file_code(main), vars(main))
        except SystemExit as ended:
            if ended.code is None or isinstance(ended.code, int):
                self.error = ended if ended.code else None
                return ended.code or 0
            print(ended.code, file=sys.stderr)
            self.error = ended
            return 1
        except BaseException as error:
            self.error = error
            error.__traceback__ = _of_script(error, main)
            sys.excepthook(type(error), error, error.__traceback__)
            sys.excepthook = lambda *_: None  # after Ctrl-C, Python would call it again
            return 1
        return 0

    def _file_code(self, main: ModuleType) -> CodeType:
        main.__file__ = file = str(self._file.absolute())
        main.__loader__ = loader = SourceFileLoader("__main__", file)
        vars(main)["__cached__"] = None
        return loader.source_to_code(loader.get_data(file), file)

    def _module_code(self, main: ModuleType) -> CodeType:
        name = self._words[0]
        spec = find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = find_spec(f"{name}.__main__")
        code = (
            spec.loader.get_code(spec.name)
            if spec and isinstance(spec.loader, InspectLoader)
            else None
        )
        if spec is None or code is None:
            sys.exit(f"instrument: there is no module {name} that can be run.")
        main.__spec__, main.__loader__, main.__package__ = spec, spec.loader, spec.parent
        main.__file__ = sys.argv[0] = str(spec.origin)
        return code


def _of_script(error: BaseException, main: ModuleType) -> Any:
    """The traceback without the frames before the script's own."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals is not vars(main):
        trace = trace.tb_next
    return trace if trace or isinstance(error, SyntaxError) else error.__traceback__


def _verdict(watch: Watch, wait_s: float) -> list[str]:
    """Write the report page, and return the verdict as lines, of which the last names the page."""
    session = watch.session
    if session is None or session.output_dir is None:
        return [
            "instrument: no step was found, so nothing is recorded: no optimizer has stepped in "
            "this process. If it trains in another way, give --step backward or --step forward."
        ]
    if not session.captures:  # the log has said why
        return []
    from instrument.analysis.find_captures import captures_at, of_newest_run
    from instrument.base import file_lock, files
    from instrument.capture import Capture
    from instrument.findings.diagnose import diagnose_all
    from instrument.findings.verdict import first_lines
    from instrument.report.page.page import page, payload

    folder, until = session.output_dir, time.monotonic() + wait_s
    while any(map(file_lock.is_held, folder.glob(".run-*.lock"))) and time.monotonic() < until:
        time.sleep(0.1)
    captures = [Capture.load(each) for each in of_newest_run(captures_at(folder)).captures]
    paragraphs = first_lines(diagnose_all(captures))
    target = folder / "report.html"
    files.write(target, page(payload(captures)).html)
    lines = [line for paragraph in paragraphs for line in ("", *paragraph)]
    return [*lines, "", f"The report page is {target}."]

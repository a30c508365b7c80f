"""Runs a script or a module like `python` does, and acts once the script has loaded torch."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from instrument.base.errors import ConfigError


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

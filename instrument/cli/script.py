"""Runs a script or a module like `python` does, and acts once the script has loaded torch."""

from __future__ import annotations

import builtins
import runpy
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
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
                with suppress(ValueError):  # the script has removed it
                    sys.meta_path.remove(self)
                self._act()

            loader.exec_module = load_and_act
        return spec


def prepared(words: Sequence[str]) -> Callable[[], None]:
    """Return a function that runs a script, or `-m` and a module, with arguments, as `python` does.

    The function raises what the script raises. Of errors it has then printed the traceback, which
    Python does not print again. The script's module `__main__` stays, because exit handlers, pickle
    and multiprocessing use it.

    Raises:
        ConfigError: there is no script.
    """
    as_module = words[:1] == ["-m"]
    words = [*words[as_module:]]
    if not words:
        raise ConfigError("instrument run needs a script, or -m and a module, to run.")
    file = Path(words[0])
    if not as_module and not file.is_file():
        raise ConfigError(f"There is no script {words[0]}: give a file, or -m and a module.")
    return lambda: _run(file, words, as_module)


def _run(file: Path, words: list[str], as_module: bool) -> None:
    main: Any = ModuleType("__main__")
    sys.modules["__main__"], main.__builtins__ = main, builtins
    if not sys.flags.safe_path:
        sys.path[0] = str(Path.cwd() if as_module else file.resolve().parent)
    sys.argv[:] = words
    try:
        if as_module:
            find: Any = runpy._get_module_details  # type: ignore[attr-defined]
            _, spec, code = find(words[0], SystemExit)
            main.__spec__, main.__loader__, main.__package__ = spec, spec.loader, spec.parent
            main.__file__ = sys.argv[0] = str(spec.origin)
        else:
            main.__file__ = name = str(file.absolute())
            main.__loader__ = loader = SourceFileLoader("__main__", name)
            main.__cached__ = None
            code = loader.source_to_code(loader.get_data(name), name)
        exec(code, vars(main))
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_globals is not vars(main):
            trace = trace.tb_next  # the frames before the script's own
        if trace is not None or isinstance(error, SyntaxError):
            error.__traceback__ = trace
        sys.excepthook(type(error), error, error.__traceback__)
        sys.excepthook = lambda *_: None  # Python would call it again
        raise

"""Runs a script or a module like `python` does, and acts once the script has loaded torch."""

from __future__ import annotations

import builtins
import pkgutil
import runpy
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader, SourcelessFileLoader
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, cast

from instrument.base.errors import ConfigError
from instrument.record.own_modules import put_first


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
        raise ConfigError("The command needs a script, or -m and a module, to run.")
    if not as_module and not Path(words[0]).exists():
        raise ConfigError(f"There is no script {words[0]}: give a file, or -m and a module.")
    return lambda: _run(words, as_module)


def _run(words: list[str], as_module: bool) -> None:
    main: Any = ModuleType("__main__")
    sys.modules["__main__"], main.__builtins__ = main, builtins
    file, is_file = Path(words[0]).absolute(), pkgutil.get_importer(words[0]) is None
    # a folder or a zip file is itself the place of its modules
    place = Path.cwd() if as_module else file.resolve().parent if is_file else file
    if not sys.flags.safe_path or place == file:
        sys.path[0] = str(place)
        put_first(sys.path[0])
    sys.argv[:] = words
    try:
        if as_module or not is_file:
            code = _code_of_module(words[0] if as_module else None, main)
        else:
            code = _code_of_file(str(file), main)
        exec(code, vars(main))
    except SystemExit:
        raise
    except BaseException as error:
        raised = error
    else:
        return
    trace = raised.__traceback__
    while trace is not None and trace.tb_frame.f_globals is not vars(main):
        trace = trace.tb_next  # the frames before the script's own
    if trace is not None or isinstance(raised, SyntaxError):
        raised.__traceback__ = trace
    _print(raised)
    raise raised


def _code_of_module(name: str | None, main: Any) -> CodeType:
    """The code of a module, or of the module `__main__` in the first place of `sys.path`."""
    run: Any = runpy
    found = run._get_main_module_details(SystemExit) if name is None else None
    _, spec, code = found or run._get_module_details(name, SystemExit)
    main.__spec__, main.__loader__, main.__package__ = spec, spec.loader, spec.parent
    main.__file__ = str(spec.origin)
    if name is not None:
        sys.argv[0] = main.__file__
    return cast(CodeType, code)


def _code_of_file(name: str, main: Any) -> CodeType:
    loader = SourceFileLoader("__main__", name)
    main.__file__, main.__loader__, main.__cached__ = name, loader, None
    content = loader.get_data(name)
    compiled = pkgutil.read_code(BytesIO(content))
    if compiled is not None:
        main.__loader__ = SourcelessFileLoader("__main__", name)
    return cast(CodeType, compiled or loader.source_to_code(content, name))


def _print(raised: BaseException) -> None:
    """Call `sys.excepthook` as Python does at its end, which then does not call it again."""
    sys.last_type, sys.last_value = type(raised), raised
    sys.last_traceback = raised.__traceback__
    if sys.version_info >= (3, 12):
        sys.last_exc = raised
    try:
        sys.excepthook(type(raised), raised, raised.__traceback__)
    except SystemExit:
        raise
    except BaseException as failed:
        failed.__traceback__ = failed.__traceback__ and failed.__traceback__.tb_next
        print("Error in sys.excepthook:", file=sys.stderr)
        sys.__excepthook__(type(failed), failed, failed.__traceback__)
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(type(raised), raised, raised.__traceback__)
    finally:
        sys.excepthook = lambda *_: None

"""Run a user's script as the main program, in the surroundings that `python script.py` gives."""

from __future__ import annotations

import io
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType


@contextmanager
def as_main(
    script: str | Path, arguments: list[str], *, module: bool = False
) -> Iterator[Callable[[], None]]:
    """Yield a function that does what `python script arguments` (`module`: `python -m`) does."""
    # python -m searches the current directory first, python script.py that of the script.
    folder = Path.cwd() if module else Path(script).resolve().parent
    with _surroundings(str(script), arguments, folder):
        if module:
            yield lambda: _run_module(str(script))
        else:
            yield lambda: _run_file(Path(script).resolve())


def _run_module(name: str) -> None:
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _run_file(path: Path) -> None:
    # Not runpy.run_path: it changes sys.argv[0] or leaves __file__ relative, unlike python.
    with io.open_code(str(path)) as file:
        code = compile(file.read(), str(path), "exec", dont_inherit=True)
    main = ModuleType("__main__")
    main.__file__ = str(path)
    main.__loader__ = SourceFileLoader("__main__", str(path))
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


@contextmanager
def _surroundings(name: str, arguments: list[str], folder: Path) -> Iterator[None]:
    argv = sys.argv
    search = list(sys.path)
    hook = sys.excepthook
    main = sys.modules["__main__"]
    sys.argv = [name, *arguments]
    sys.excepthook = sys.__excepthook__
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        sys.argv = argv
        sys.path[:] = search
        sys.excepthook = hook

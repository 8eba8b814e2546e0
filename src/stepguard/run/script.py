"""Running a user's script as its own main program: what it sees is what `python script.py` would
show it.
"""

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
    """Call what this gives: it does what `python script arguments` or, with `module`, `python -m
    script` does.
    """
    with _surroundings(str(script), arguments, None if module else Path(script).resolve().parent):
        if module:
            yield lambda: _run_module(str(script))
        else:
            yield lambda: _run_file(Path(script).resolve())


def _run_module(name: str) -> None:
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _run_file(path: Path) -> None:
    """Not runpy.run_path: that would change `sys.argv[0]` or leave `__file__` relative, which
    python does not.
    """
    with io.open_code(str(path)) as file:
        code = compile(file.read(), str(path), "exec", dont_inherit=True)
    main = ModuleType("__main__")
    main.__file__, main.__loader__ = str(path), SourceFileLoader("__main__", str(path))
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


@contextmanager
def _surroundings(name: str, arguments: list[str], folder: Path | None) -> Iterator[None]:
    argv, search, hook, main = sys.argv, list(sys.path), sys.excepthook, sys.modules["__main__"]
    sys.argv, sys.excepthook = [name, *arguments], sys.__excepthook__
    # python -m looks into the current directory first, python script.py beside the script
    sys.path.insert(0, str(folder if folder is not None else Path.cwd()))
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        sys.argv, sys.path[:], sys.excepthook = argv, search, hook

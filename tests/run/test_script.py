"""A script is run as the main program, and leaves the process as it was."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from stepguard.run.guarded_script import as_main

SCRIPT = """
import sys
from pathlib import Path
import beside
Path(sys.argv[1]).write_text(f"{__name__} {Path(__file__).is_absolute()} {sys.argv} {beside.x}")
sys.excepthook = print
sys.path.append("nowhere")
"""


def test_script_sees_what_python_would_show_it_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("x = 7")
    told = tmp_path / "told"
    before = (sys.argv, list(sys.path), sys.excepthook, sys.modules["__main__"])
    script = str(tmp_path / "train.py")
    with as_main(script, [str(told)]) as start:
        start()
    sys.modules.pop("beside")
    assert told.read_text() == f"__main__ True {[script, str(told)]} 7"
    assert (sys.argv, sys.path, sys.excepthook, sys.modules["__main__"]) == before


def test_surroundings_are_put_back_after_an_exception(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise KeyError('x')")
    before = (sys.argv, list(sys.path))
    with pytest.raises(KeyError), as_main(tmp_path / "train.py", []) as start:
        start()
    assert (sys.argv, sys.path) == before


def test_module_is_searched_in_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text("import sys; sys.exit(len(sys.argv))")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended, as_main("only_here", ["a"], module=True) as start:
        start()
    assert ended.value.code == 2

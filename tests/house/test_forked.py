"""A forked Python ends and says what a fresh one does."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import forked

SCRIPT = """
import atexit, sys
atexit.register(print, "at the end")
print(__name__, __file__, sys.argv, sys.path[0], sys.stdin.read())
"""
WORDS: dict[str, list[str]] = {
    "script": ["script.py", "one", "-x"],
    "module": ["-m", "script", "one"],
    "command": ["-c", "import sys; print(sys.argv, __name__, repr(sys.path[0]))", "one"],
    "exit": ["-c", "raise SystemExit(7)"],
    "message": ["-c", "import sys; sys.exit('said')"],
    "error": ["broken.py"],
    "killed": ["-c", "import os; os.kill(os.getpid(), 9)"],
    "interrupted": ["-c", "import os, signal; signal.raise_signal(signal.SIGTERM)"],
    "warning": ["-W", "error", "-c", "import warnings; warnings.warn('loud')"],
    "cause": ["-c", "import sys, atexit; atexit.register(lambda: print(sys.last_value)); 1 / 0"],
}


@pytest.mark.parametrize("name", WORDS)
def test_forked_python_ends_as_a_fresh_one(name: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "broken.py").write_text("def fail():\n    raise KeyError('x')\n\n\nfail()\n")
    ends = [
        forked.python(WORDS[name], folder=tmp_path, given="given", fresh=fresh)
        for fresh in (False, True)
    ]
    assert vars(ends[0]) == vars(ends[1])


def test_torch_is_there_before_the_first_line_and_a_fresh_one_starts_without() -> None:
    words = ["-c", "import sys; print('torch' in sys.modules)"]
    assert forked.python(words, fresh=True).stdout == "False\n"
    if not forked.FULL:
        assert forked.python(words).stdout == "True\n"


def test_process_that_takes_too_long_is_killed_and_the_next_one_is_served() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        forked.python(["-c", "import time; time.sleep(100)"], seconds=0.1)
    assert forked.python(["-c", "print(1)"]).stdout == "1\n"


def test_failing_rank_ends_the_others() -> None:
    code = "import os, time; os.environ['RANK'] == '1' and os._exit(3); time.sleep(100)"
    ended = forked.python(["-c", code], ranks=2)
    assert ended.returncode == 1
    if not forked.FULL:
        assert "rank 1 ended with exit code 3" in ended.stderr

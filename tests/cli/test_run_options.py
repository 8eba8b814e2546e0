"""`stepguard run`: the words before the script."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.scripts import guarded, plain_script, write


def test_a_script_is_guarded_by_the_policy_of_a_file(tmp_path: Path) -> None:
    write(tmp_path, plain_script(steps=8, bad="(3,)"))
    (tmp_path / "guard.toml").write_text('[policy]\nactions = ["stop"]\n')
    done = guarded(tmp_path, "--config", "guard.toml", "train.py")
    assert done.returncode == 3 and len(done.stdout.splitlines()) == 3, done.stderr


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--policy", "is not an option of `stepguard run`"),
        (".", "is a folder; give the Python script in it"),
    ],
)
def test_a_word_that_is_not_a_script_is_one_line_and_exit_code_2(
    tmp_path: Path, word: str, said: str
) -> None:
    write(tmp_path, "print('never')\n")
    done = guarded(tmp_path, word, "train.py")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert said in done.stderr

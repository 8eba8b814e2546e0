"""scripts/compare_script.py: the command behind "prints the same under the guard"."""

from __future__ import annotations

from pathlib import Path

from cli.scripts import plain_script, python, write

SCRIPT = str(Path(__file__).parents[2] / "scripts" / "compare_script.py")


def test_healthy_script_prints_the_same_and_a_bad_one_does_not(tmp_path: Path) -> None:
    write(tmp_path, plain_script() + "print('took 3.2 ms' if len(sys.argv) > 9 else 'took 4 s')\n")
    done = python(tmp_path, SCRIPT, "train.py")
    assert done.returncode == 0, done.stdout
    assert "7 lines bare, 7 guarded, 0 differ" in done.stdout
    write(tmp_path, plain_script(bad="(2,)"))
    done = python(tmp_path, SCRIPT, "--file", "w.pt", "train.py")
    assert done.returncode == 1 and "line 4" in done.stdout
    assert "w.pt: not the same (no file bare, no file guarded)" in done.stdout


def test_file_that_both_runs_write_is_compared_byte_by_byte(tmp_path: Path) -> None:
    write(tmp_path, plain_script() + "torch.save(model.state_dict(), 'w.pt')\n")
    done = python(tmp_path, SCRIPT, "--file", "w.pt", "train.py")
    assert done.returncode == 0, done.stdout
    assert "w.pt: the same bytes" in done.stdout

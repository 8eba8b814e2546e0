"""`stepguard run`: the words before the script."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.scripts import HEAD, NET, guarded, plain_script, python, write
from report.endpoint import listening
from stepguard.cli.app import app


def test_a_script_is_guarded_by_the_policy_of_a_file(tmp_path: Path) -> None:
    write(tmp_path, plain_script(steps=8, bad="(3,)"))
    (tmp_path / "guard.toml").write_text('[policy]\nactions = ["stop"]\n')
    done = guarded(tmp_path, "--config", "guard.toml", "train.py")
    assert done.returncode == 3 and len(done.stdout.splitlines()) == 3, done.stderr


def test_a_script_is_clipped_by_the_norm_of_a_file_as_if_it_clipped_itself(tmp_path: Path) -> None:
    script = plain_script(steps=6)
    assert "optimizer.step()" in script
    clips = "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)"
    line = next(line for line in script.splitlines() if line.strip() == "optimizer.step()")
    indent = line[: len(line) - len(line.lstrip())]
    write(tmp_path, script.replace(line, f"{indent}{clips}\n{line}"))
    bare = python(tmp_path, "train.py")
    write(tmp_path, script)
    (tmp_path / "guard.toml").write_text("clip_norm = 0.01\n")
    done = guarded(tmp_path, "--config", "guard.toml", "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == bare.stdout
    assert done.stdout != python(tmp_path, "train.py").stdout


# --- where settings come from


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    write(tmp_path, plain_script(steps=8, bad="(3,)"))
    (tmp_path / "guard.yaml").write_text("terminal: quiet\npolicy: {actions: [stop]}\n")
    done = guarded(tmp_path, "train.py", STEPGUARD_CONFIG="guard.yaml")
    assert done.returncode == 3 and "WHERE" not in done.stderr, done.stderr
    (tmp_path / "guard.yaml").write_text("terminals: quiet\n")
    done = guarded(tmp_path, "train.py", STEPGUARD_CONFIG="guard.yaml")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "STEPGUARD_CONFIG guard.yaml: terminals is not known. Did you mean terminal?" in (
        done.stderr
    )


def test_a_setting_that_a_watched_loop_cannot_have_is_refused_before_the_script_runs(
    tmp_path: Path,
) -> None:
    write(tmp_path, plain_script())
    (tmp_path / "guard.toml").write_text("loss_scale = 8.0\n")
    done = guarded(tmp_path, "--config", "guard.toml", "train.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert "loss_scale=8.0 scales inside guard.step only" in done.stderr


def test_incidents_of_a_script_are_posted_to_the_address_of_the_environment(
    tmp_path: Path,
) -> None:
    write(tmp_path, plain_script(steps=8, bad="(3,)"))
    with listening() as endpoint:
        done = guarded(tmp_path, "train.py", STEPGUARD_WEBHOOK=endpoint.url)
        assert done.returncode == 0, done.stderr
        (message,) = endpoint.got
    assert message["text"].startswith("train.py: step 3 ")
    assert endpoint.url not in done.stderr


# --- words in the wrong place

MISPLACED = [
    (("--policy", "train.py"), "is not an option of `stepguard run`"),
    ((".", "train.py"), "is a folder; give the Python script in it"),
    (("guard.toml", "train.py"), "is not a script; settings go before it: --config guard.toml"),
    (("python", "train.py"), "leave it out: stepguard run train.py"),
    (("--run-dir", "train.py"), "--run-dir has taken train.py for its value"),
    (("-m", "train.py"), "is a file; leave -m out"),
    (("--run-dir", "train.py", "train.py"), "--run-dir train.py is a file; give a folder"),
    (("--restore", "last-good", "train.py"), "needs the folder of the run; give --run-dir"),
    (("--restore", "newest", "--run-dir", "r", "train.py"), "finds no checkpoint in"),
    (("--restore", "nowhere", "--run-dir", "r", "train.py"), "nor a checkpoint folder"),
    ((), "no script is given. Write: stepguard run [options] train.py"),
]


@pytest.mark.parametrize(("words", "said"), MISPLACED, ids=[said for _, said in MISPLACED])
def test_a_word_in_the_wrong_place_is_one_line_that_says_where_it_belongs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "print('never')\n")
    done = CliRunner().invoke(app, ["run", *words])
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.output
    assert said in done.stderr


def test_an_option_behind_the_script_goes_to_the_script_and_is_explained_if_it_is_refused(
    tmp_path: Path,
) -> None:
    write(tmp_path, "import argparse\nargparse.ArgumentParser().parse_args()\n")
    done = guarded(tmp_path, "train.py", "--config=guard.toml")
    assert done.returncode == 2
    assert "unrecognized arguments: --config=guard.toml" in done.stderr
    assert "--config stands after the script and went to it" in done.stderr
    write(tmp_path, "import sys\nprint(sys.argv[1:])\n")
    done = guarded(tmp_path, "train.py", "--config", "theirs")
    assert (done.returncode, done.stdout) == (0, "['--config', 'theirs']\n")
    assert "stands after" not in done.stderr


# --- going on from a checkpoint

RESUMED = """
import signal
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
x, y = torch.randn(6, 4), torch.randint(3, (6,))
for step in range(STEPS):
    if step == INTERRUPTED:
        os.kill(os.getpid(), signal.SIGINT)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(CALL(x), y)
    loss.backward()
    optimizer.step()
    schedule.step()
    print(repr(loss.item()), flush=True)
"""


def resumed(steps: int, interrupted: int = -1, call: str = "model") -> str:
    text = HEAD + NET + RESUMED
    for name, value in (("STEPS", steps), ("INTERRUPTED", interrupted), ("CALL", call)):
        text = text.replace(name, str(value))
    return text


def test_a_checkpoint_sealed_at_ctrl_c_is_used_by_the_unmodified_script(tmp_path: Path) -> None:
    write(tmp_path, resumed(30))
    whole = python(tmp_path, "train.py").stdout.splitlines()
    write(tmp_path, resumed(30, interrupted=12))
    first = guarded(tmp_path, "--run-dir", "run", "--restore", "auto", "train.py")
    assert first.returncode == 130, first.stderr
    done = len(first.stdout.splitlines())
    assert first.stdout.splitlines() == whole[:done]
    write(tmp_path, resumed(8))
    second = guarded(tmp_path, "--run-dir", "run", "--restore", "auto", "train.py")
    assert second.returncode == 0, second.stderr
    sealed = int(second.stderr.split("goes on after ")[1].split()[0])
    assert sealed >= 12
    assert second.stdout.splitlines() == whole[sealed : sealed + 8]


def test_where_the_guard_comes_with_the_first_update_that_update_is_left_out(
    tmp_path: Path,
) -> None:
    loose = "model = nn.Module()\nmodel.w = nn.Parameter(torch.randn(4, 3))"
    script = resumed(20, interrupted=12, call="(lambda x: x @ model.w)")
    write(tmp_path, script.replace("model = Net()", loose))
    assert guarded(tmp_path, "--run-dir", "run", "train.py").returncode == 130
    script = resumed(1, call="(lambda x: x @ model.w)") + "print(optimizer.state[model.w]['step'])"
    write(tmp_path, script.replace("model = Net()", loose))
    second = guarded(tmp_path, "--run-dir", "run", "--restore", "last-good", "train.py")
    assert second.returncode == 0, second.stderr
    assert "goes on after 12 steps" in second.stderr
    assert second.stdout.splitlines()[-1] == "tensor(12.)"


def test_a_checkpoint_of_another_model_ends_the_run_before_its_first_step(tmp_path: Path) -> None:
    write(tmp_path, resumed(20, interrupted=12))
    assert guarded(tmp_path, "--run-dir", "run", "train.py").returncode == 130
    other = resumed(3).replace("Net()", "nn.Linear(4, 3)")
    write(
        tmp_path, "try:\n    " + other.replace("\n", "\n    ") + "\nexcept Exception:\n    pass\n"
    )
    done = guarded(tmp_path, "--run-dir", "run", "--restore", "last-good", "train.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert "stepguard: error: --restore last-good: the saved state does not fit" in done.stderr

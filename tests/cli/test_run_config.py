"""`stepguard run`: what it is given before the script, and what it says about it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cli.scripts import guarded, plain_script, write
from stepguard import ConfigError, GuardConfig, Policy
from stepguard.run import autoguard, guarded_script
from stepguard.run.config_file import read_config


def config(folder: Path, text: str, **given: str) -> GuardConfig:
    (folder / "guard.toml").write_text(text)
    return read_config(folder / "guard.toml", given)


def test_fields_of_both_are_taken_from_the_file(tmp_path: Path) -> None:
    text = (
        'anomalies = "act"\nprobation = 7\n[policy]\nactions = ["skip", "stop"]\nmax_lost_share '
        "= 0.1\n"
    )
    assert config(tmp_path, text) == GuardConfig(
        anomalies="act", probation=7, policy=Policy(actions=("skip", "stop"), max_lost_share=0.1)
    )
    assert read_config(None, {}) == GuardConfig()


def test_folders_are_absolute_and_the_command_line_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert config(tmp_path, 'run_dir = "a"\n').run_dir == str(tmp_path / "a")
    assert config(tmp_path, 'run_dir = "a"\n', run_dir="/b").run_dir == "/b"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("anomalys = 'act'\n", ("anomalys is not known", "Did you mean anomalies?")),
        (
            "[policy]\nmax_totl = 3\n",
            ("policy.max_totl is not known", "Did you mean policy.max_total?"),
        ),
        ("max_total = 3\n", ("max_total is not known", "field of [policy]")),
        ("zzz = 3\n", ("zzz is not known", "clip_norm, run_dir")),
        ("anomalies = 'no'\n", ("anomalies", "'no' is not known", "'act'")),
        ("probation = 'many'\n", ("probation='many'", "whole number")),
        ("policy = 'skip'\n", ("must be a table", "[policy]")),
        ("sinks = []\n", ("sinks is an object of Python",)),
        ("= 3\n", ("is not TOML",)),
        ("[policy]\nlr_factor = 'x'\n", ("Policy.lr_factor='x'", "must be a number")),
    ],
)
def test_wrong_file_is_one_clear_line(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        config(tmp_path, text)
    said = str(caught.value)
    assert "guard.toml" in said and "\n" not in said
    assert all(word in said for word in words), said


@pytest.mark.parametrize("path", ["nowhere.toml", "."])
def test_file_that_is_none_is_told(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="is not a file"):
        read_config(Path(path), {})


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
def test_a_word_that_is_no_script_is_one_line_and_exit_code_2(
    tmp_path: Path, word: str, said: str
) -> None:
    write(tmp_path, "print('never')\n")
    done = guarded(tmp_path, word, "train.py")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert said in done.stderr


def test_an_optimizer_that_cannot_be_guarded_is_told_once_and_truly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: object, **settings: object) -> None:
        raise TypeError("float() argument must be a number, not 'NoneType'")

    monkeypatch.setattr(autoguard, "watch", refuse)
    with autoguard.AutomaticGuards(GuardConfig(), guarded_script.tell) as several:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    guarded_script.tell_how_it_ended(several.guards, several.refused, 0)
    first, second = capsys.readouterr().err.splitlines()
    assert "SGD is not guarded: TypeError" in first
    assert "made none that stepped" not in second and "for the reason above" in second

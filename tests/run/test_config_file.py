"""Settings of a guard from a TOML file."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepguard import ConfigError, GuardConfig, Policy
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

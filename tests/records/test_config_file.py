"""Settings of a guard from a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepguard import ConfigError, GuardConfig, Policy, Probes, Snapshots


def config(folder: Path, text: str, **given: str) -> GuardConfig:
    (folder / "guard.toml").write_text(text)
    return GuardConfig.from_file(folder / "guard.toml", **given)


def test_fields_of_both_are_taken_from_the_file(tmp_path: Path) -> None:
    text = (
        '[probes]\nanomalies = "act"\n[snapshots]\nprobation = 7\n'
        '[policy]\nactions = ["skip", "stop"]\nmax_lost_share = 0.1\n'
    )
    assert config(tmp_path, text) == GuardConfig(
        probes=Probes(anomalies="act"),
        snapshots=Snapshots(probation=7),
        policy=Policy(actions=("skip", "stop"), max_lost_share=0.1),
    )
    assert config(tmp_path, "") == GuardConfig()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("guard.yaml", "terminal: quiet\npolicy:\n  actions: [skip, stop]\n"),
        ("guard.yml", "{terminal: quiet, policy: {actions: [skip, stop]}}\n"),
        ("guard.json", '{"terminal": "quiet", "policy": {"actions": ["skip", "stop"]}}'),
    ],
)
def test_yaml_and_json_say_the_same(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    wanted = GuardConfig(terminal="quiet", policy=Policy(actions=("skip", "stop")))
    assert GuardConfig.from_file(tmp_path / name) == wanted


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("g.yaml", "ranks:\n  timeout: 6e1\n", ("Ranks.timeout='6e1'", "with a point")),
        ("g.yaml", "a: [\n", ("is not YAML",)),
        ("g.yaml", "!!python/object/apply:os.getcwd []\n", ("is not YAML",)),
        ("g.json", "[1]", ("holds a list",)),
        ("g.json", "{", ("is not JSON",)),
        ("g.ini", "", ("is not a configuration by its name", ".toml, .yaml")),
        ("g.toml", b"\xff\xfe", ("is not text",)),
        ("g.toml", "a = 1\n" * 200_000, ("1,200,000 bytes",)),
    ],
)
def test_every_kind_of_file_is_told_what_is_wrong(
    tmp_path: Path, name: str, text: str | bytes, words: tuple[str, ...]
) -> None:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        GuardConfig.from_file(path)
    said = str(caught.value)
    assert "\n" not in said
    assert all(word in said for word in words), said


def test_folders_are_absolute_and_the_command_line_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert config(tmp_path, 'run_dir = "a"\n').run_dir == str(tmp_path / "a")
    assert config(tmp_path, 'run_dir = "a"\n', run_dir="/b").run_dir == "/b"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("anomalys = 'act'\n", ("anomalys is not known", "mean anomalies, in", "below [probes]?")),
        (
            "[policy]\nmax_totl = 3\n",
            ("policy.max_totl is not known", "Did you mean policy.max_total?"),
        ),
        ("max_total = 3\n", ("max_total is not known", "below [policy]")),
        ("[policy]\nkeep = 3\n", ("policy.keep is not known", "outside of every table")),
        ("zzz = 3\n", ("zzz is not known", "clip_norm, run_dir")),
        ("[probes]\nanomalies = 'no'\n", ("Probes.anomalies", "'no' is not known", "'act'")),
        ("[snapshots]\nprobation = 'many'\n", ("probation='many'", "whole number")),
        ("policy = 'skip'\n", ("must be a table", "[policy]")),
        ("sinks = []\n", ("sinks is an object of Python",)),
        ("= 3\n", ("is not TOML",)),
        ("[policy]\nmax_lost_share = 'x'\n", ("Policy.max_lost_share='x'", "must be a number")),
    ],
)
def test_wrong_file_is_one_clear_line(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        config(tmp_path, text)
    said = str(caught.value)
    assert "guard.toml" in said and "\n" not in said
    assert all(word in said for word in words), said


@pytest.mark.parametrize("path", ["nowhere.toml", "folder.toml"])
def test_file_that_is_none_is_told(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(ConfigError, match="is not a file"):
        GuardConfig.from_file(path)

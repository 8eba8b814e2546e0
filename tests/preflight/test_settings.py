"""Configuration and launcher files: read without running anything, and understood whatever the keys
are called.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from house.fresh import FRAMEWORKS, HEAVY, run_code
from stepguard import ConfigError
from stepguard.preflight.settings.files import read_settings
from stepguard.preflight.settings.keys import find, number
from stepguard.preflight.settings.launcher import launcher
from stepguard.preflight.settings.precision import Wanted, contradiction, wanted


def test_python_file_of_constants_is_parsed_and_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    path = tmp_path / "config.py"
    path.write_text(
        f"import os\nopen({str(marker)!r}, 'w').close()\nLEARNING_RATE = 1e-4\nWIDTH: int = 8\n"
        "STEPS = 10 * LEARNING_RATE\nclass Train:\n    accum_steps = 2\n"
    )
    assert read_settings(path) == {"LEARNING_RATE": 1e-4, "WIDTH": 8, "Train": {"accum_steps": 2}}
    assert not marker.exists()


def test_toml_and_json_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[trainer]\nlr = 1e-5\n")
    (tmp_path / "a.json").write_text('{"trainer": {"lr": 1e-5}}')
    assert (
        read_settings(tmp_path / "a.toml")
        == read_settings(tmp_path / "a.json")
        == {"trainer": {"lr": 1e-5}}
    )


def test_yaml_tags_that_would_run_code_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    path = tmp_path / "evil.yaml"
    path.write_text(f"a: !!python/object/apply:os.mkdir ['{tmp_path / 'made'}']\n")
    with pytest.raises(ConfigError, match="is no valid yaml"):
        read_settings(path)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", "{", "a.json is no valid json"),
        ("a.json", "[1, 2]", "holds a list; a configuration is a mapping"),
        ("a.toml", "a =", "a.toml is no valid toml"),
        ("a.py", "def (:", "a.py is no valid py"),
        (
            "a.ini",
            "",
            "a.ini: .ini is no configuration file; use one of .json, .toml, .yaml, .yml, .py",
        ),
        ("a.json", "\udcff", "cannot be read as a configuration"),
    ],
)
def test_unusable_file_is_one_clear_error(tmp_path: Path, name: str, text: str, said: str) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError) as error:
        read_settings(path)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"trainer": {"lr": 1e-5}}, "trainer.lr"),
        ({"LEARNING_RATE": 1e-5}, "LEARNING_RATE"),
        ({"a": {"b": {"lr": 1.0}}, "optim": {"lr": 1e-5}}, "optim.lr"),
        ({"lr": 1.0, "optimizer": {"learning_rate": 1e-5}}, "optimizer.learning_rate"),
        ({"optim": {"lr": "1e-5"}}, "optim.lr"),
    ],
)
def test_learning_rate_is_found_by_its_meaning(settings: dict[str, object], key: str) -> None:
    found = find(settings, "lr")
    assert found is not None
    assert (found.key, number(settings, "lr")) == (key, 1e-5)


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({"mixed_precision": "bf16"}, "bfloat16"),
        ({"precision": "16-mixed"}, "float16"),
        ({"trainer": {"fp16": True}}, "float16"),
        ({"bf16": True, "fp16": False}, "bfloat16"),
        ({"amp": True, "fp16": False}, None),
        ({"amp": False}, "float32"),
        ({"mixed_precision": "no"}, "float32"),
    ],
)
def test_precision_is_understood(settings: dict[str, object], dtype: str | None) -> None:
    found = wanted(settings)
    assert isinstance(found, Wanted)
    assert found.dtype == dtype


def test_silent_configuration_asks_for_nothing() -> None:
    assert wanted({"lr": 1.0, "precision": "high"}) is None


@pytest.mark.parametrize(
    "settings", [{"fp16": True, "bf16": True}, {"mixed_precision": "bf16", "fp16": True}]
)
def test_settings_that_exclude_each_other_are_told(settings: dict[str, object]) -> None:
    assert contradiction(settings).endswith("exclude each other")
    assert contradiction({"mixed_precision": "fp16", "fp16": True}) == ""


def test_environment_of_the_launcher_wins_and_the_conflict_is_told() -> None:
    environment = {"ACCELERATE_MIXED_PRECISION": "fp16", "WORLD_SIZE": "4"}
    found = launcher({"mixed_precision": "bf16"}, "launch.yaml", environment)
    assert (found.dtype, found.number("num_processes")) == ("float16", 4)
    assert found.conflicts == (
        "launch.yaml says mixed_precision=bf16, the environment ACCELERATE_MIXED_PRECISION=fp16",
    )


def test_reading_a_configuration_imports_no_torch(tmp_path: Path) -> None:
    seen = run_code(
        tmp_path,
        "from stepguard.preflight.settings.files import read_settings; import stepguard.preflight",
    )
    assert seen.modules & (FRAMEWORKS | HEAVY) == frozenset()

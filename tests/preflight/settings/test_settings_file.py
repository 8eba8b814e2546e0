"""Configuration files: read without running anything, with one clear error for what is unusable."""

from __future__ import annotations

from pathlib import Path

import pytest

from house.fresh import FRAMEWORKS, HEAVY, run_code
from stepguard import ConfigError
from stepguard.check.settings import read_settings


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
    path = tmp_path / "evil.yaml"
    path.write_text(f"a: !!python/object/apply:os.mkdir ['{tmp_path / 'made'}']\n")
    with pytest.raises(ConfigError, match="is not valid yaml"):
        read_settings(path)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", "{", "a.json is not valid json"),
        ("a.json", "[1, 2]", "holds a list; a configuration is a mapping"),
        ("a.toml", "a =", "a.toml is not valid toml"),
        ("a.py", "def (:", "a.py is not valid py"),
        (
            "a.ini",
            "",
            "a.ini: .ini is not a configuration file; use one of .json, .toml, .yaml, .yml, .py",
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


def test_reading_a_configuration_imports_no_torch(tmp_path: Path) -> None:
    seen = run_code(tmp_path, "import stepguard.check.settings")
    assert "yaml" in seen.modules
    assert seen.modules & (FRAMEWORKS | HEAVY) == frozenset()

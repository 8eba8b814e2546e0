"""Learning rates of a configuration file, of every kind that can be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepguard import ConfigError
from stepguard.check.settings import configured_rate, flat


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", '{"trainer": {"learning_rate": 1e-4}}'),
        ("a.toml", "[trainer]\nlearning_rate = 1e-4\n"),
        ("a.yaml", "trainer:\n  lr: 1e-4\n  steps: 10\n"),
        (
            "a.py",
            "import os\nclass Config:\n    LEARNING_RATE: float = 1e-4\n    PATH = os.getcwd()\n",
        ),
    ],
)
def test_learning_rate_is_found_in_every_kind_of_file(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert configured_rate(tmp_path / name) == pytest.approx(1e-4)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yaml", "steps: 10\n", "names no learning rate"),
        ("a.yaml", "lr: fast\n", "names no learning rate"),
        ("a.yaml", "lr: 1\nhead:\n  lr: 2\n", r"several learning rates \(lr=1, head.lr=2\)"),
        ("a.ini", "lr = 0.0001\n", ".ini is not a configuration file; use one of .json, .toml"),
    ],
)
def test_file_without_one_rate_is_refused(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=said):
        configured_rate(tmp_path / name)


def test_every_name_of_a_rate_is_known() -> None:
    settings = {"Trainer": {"init-lr": "x"}, "LEARNING_RATE": 1, "min_lr": 2}
    assert [leaf.key for leaf in flat(settings) if leaf.means("rate")] == [
        "Trainer.init-lr",
        "LEARNING_RATE",
    ]

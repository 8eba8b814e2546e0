"""An unknown framework gets one message with the versions that work."""

from __future__ import annotations

import subprocess
import sys

import pytest

from integrations.trainers import numbers, regression, trainer
from stepguard import ConfigError
from stepguard.integrations._parts import Framework
from stepguard.integrations.transformers import guard

KNOWN = Framework("transformers", first="5.0", before="6.0", tested="5.22.2", without=("5.3.1",))


@pytest.mark.parametrize(
    ("version", "works"),
    [
        ("5.0.0", True),
        ("5.22.2", True),
        ("5.0.0rc1", True),
        ("5.4+local", True),
        ("4.57.6", False),
        ("6.0", False),
        ("5.3.1", False),
    ],
)
def test_versions_that_work_are_known_by_their_numbers(version: str, works: bool) -> None:
    assert KNOWN.supports(version) is works


def test_a_framework_that_is_missing_is_named_with_the_versions_that_work() -> None:
    with pytest.raises(
        ConfigError, match=r"no-such-framework is not installed; .* 1\.0 up to, not including, 2\.0"
    ):
        Framework("no-such-framework", first="1.0", before="2.0", tested="1.1").require()


def test_an_unknown_version_is_named_with_the_versions_that_work() -> None:
    with pytest.raises(
        ConfigError,
        match=r"pytest \d.* is not known .* 0\.1 up to, not including, 0\.2 \(tested with 0\.1\)",
    ):
        Framework("pytest", first="0.1", before="0.2", tested="0.1").require()


def test_a_missing_method_is_a_clear_message_and_no_attribute_error(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    made = trainer(tmp_path, regression(), numbers(4))
    monkeypatch.delattr("transformers.Trainer._save_checkpoint")
    with pytest.raises(
        ConfigError, match=r"Trainer has no _save_checkpoint, .* works with transformers 5"
    ):
        guard(made)


def test_importing_an_integration_of_an_unknown_version_says_so_before_anything_else() -> None:
    code = """
import importlib.metadata as metadata
real = metadata.version
metadata.version = lambda name: "4.57.6" if name == "transformers" else real(name)
import stepguard.integrations.transformers
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 1
    last = ran.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "stepguard._errors.ConfigError: transformers 4.57.6 is not known to this guard"
    )
    assert "transformers 5" in last

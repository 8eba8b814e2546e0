"""Every place that states the version states the same one, and the recipes the same needs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import stepguard

ROOT = Path(__file__).resolve().parents[2]
CALLED = {"torch": "pytorch", "xxhash": "python-xxhash"}
"""Packages that have another name in conda."""


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def found(pattern: str, name: str) -> str:
    match = re.search(pattern, read(name), re.MULTILINE)
    assert match is not None, f"{name} says no version"
    return match[1]


def test_version_is_the_same_everywhere() -> None:
    assert found(r"^version: (\S+)", "CITATION.cff") == stepguard.__version__
    assert found(r'set version = "([^"]+)"', "conda/meta.yaml") == stepguard.__version__
    assert found(r"^## \[(\d[^]]*)\]", "CHANGELOG.md") == stepguard.__version__


def test_changelog_begins_with_what_is_not_released() -> None:
    head = read("CHANGELOG.md").partition("## [Unreleased]")[2]
    assert head.lstrip().startswith("### Added")
    dates = re.findall(r"^## \[\d[^]]*\] - (\S+)$", read("CHANGELOG.md"), re.MULTILINE)
    assert dates == sorted(dates, reverse=True)
    assert found(r"^date-released: (\S+)", "CITATION.cff") == dates[0]


def test_conda_recipe_needs_what_the_package_needs() -> None:
    needed = tomllib.loads(read("pyproject.toml"))["project"]["dependencies"]
    run = read("conda/meta.yaml").partition("  run:\n")[2].partition("\n\n")[0]
    listed = {line.strip(" -").replace(" ", "") for line in run.splitlines()}
    for requirement in needed:
        name, _, least = requirement.partition(">=")
        assert f"{CALLED.get(name, name)}>={least}" in listed


def test_readme_fits_two_screens() -> None:
    assert len(read("README.md").splitlines()) <= 80


def test_readme_states_the_supported_versions_and_the_licence() -> None:
    project = tomllib.loads(read("pyproject.toml"))["project"]
    versions = re.findall(r":: (3\.\d+)\"", read("pyproject.toml"))
    (torch,) = (need for need in project["dependencies"] if need.startswith("torch"))
    line = found(r"^(`Python .*)$", "README.md")
    assert f"`Python {versions[0]} - {versions[-1]}`" in line
    assert f"`{torch.replace('>=', ' >= ')}`" in line
    assert f"`{project['license']}`" in line
    assert (ROOT / "src" / "stepguard" / "py.typed").is_file()

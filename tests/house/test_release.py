"""What a release says of itself: one version everywhere, the recipes' needs, sites of several
versions beside each other, and workflows that run what they say.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from scripts import docs_versions

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


# --- sites of several versions lie beside each other, and the newest one is opened
# --------------------------------------------------------------------------------------------------


def built(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "index.html").write_text(text, encoding="utf-8")
    return folder


def test_a_version_is_added_beside_the_others(tmp_path: Path) -> None:
    public = tmp_path / "public"
    public.mkdir()
    docs_versions.add(built(tmp_path / "b", "ten"), public, "0.10.0")
    docs_versions.add(built(tmp_path / "a", "two"), public, "0.2.0")
    docs_versions.add(built(tmp_path / "c", "two, again"), public, "0.2.1")
    assert (public / "0.2" / "index.html").read_text() == "two, again"
    assert (public / "0.10" / "index.html").read_text() == "ten"
    assert "url=0.10/index.html" in (public / "index.html").read_text()
    assert json.loads((public / "versions.json").read_text()) == [
        {"version": "0.10", "title": "0.10.0", "aliases": ["latest"]},
        {"version": "0.2", "title": "0.2.1", "aliases": []},
    ]


def test_without_a_site_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="make docs"):
        docs_versions.add(tmp_path / "none", tmp_path, "0.2.0")
    assert list(tmp_path.iterdir()) == []


def test_the_version_is_the_package_s() -> None:
    assert docs_versions.source_version() == stepguard.__version__


# --- workflows
# --------------------------------------------------------------------------------------------------


def workflow(name: str) -> Any:
    return yaml.safe_load(read(f".github/workflows/{name}.yml"))["jobs"]


def test_every_command_of_the_workflows_is_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))
    run = [
        step["run"].split()
        for name in ("ci", "build")
        for job in workflow(name).values()
        for step in job["steps"]
        if "run" in step
    ]
    assert {words[0] for words in run} == {".ci/run", "make"}
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert {words[1] for words in run if words[0] == "make"} <= targets


def test_matrix_has_every_python_and_the_oldest_and_the_pinned_torch() -> None:
    project = tomllib.loads(read("pyproject.toml"))["project"]
    named = re.findall(r"Python :: (3\.\d+)$", "\n".join(project["classifiers"]), re.MULTILINE)
    (least,) = [one[7:] for one in project["dependencies"] if one.startswith("torch>=")]
    pinned = found(r"^torch==(\d+\.\d+)", "constraints.txt")
    matrix = workflow("ci")["versions"]["strategy"]["matrix"]
    assert matrix["python"] == named
    assert matrix["torch"] == [f"{least}.*", f"{pinned}.*"]

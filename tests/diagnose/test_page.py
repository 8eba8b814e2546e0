"""The pages of the findings: fixed headings, helpful errors, files up to date, no torch."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import typer
from typer.testing import CliRunner

from stepguard._errors import EXIT_USAGE, StepguardError
from stepguard.cli.runs import explain as explain_command
from stepguard.diagnose import Rule, UnknownCode, all_rules, explain

ROOT = Path(__file__).resolve().parents[2]
HEADINGS = ["What it means", "Why it happens", "How stepguard knows", "What to do", "Example"]
CODES = [
    "SG101",
    "SG102",
    "SG103",
    "SG104",
    "SG201",
    "SG202",
    "SG203",
    "SG204",
    "SG205",
    "SG206",
    "SG207",
    "SG208",
    "SG301",
    "SG302",
    "SG401",
    "SG402",
    "SG403",
    "SG501",
    "SG502",
    "SG503",
    "SG504",
    "SG505",
    "SG506",
    "SG601",
    "SG602",
    "SG603",
    "SG701",
    "SG702",
    "SG703",
    "SG704",
    "SG705",
    "SG801",
    "SG802",
    "SG803",
    "SG901",
    "SG902",
    "SG903",
    "SG904",
    "SG905",
    "SG906",
    "SG907",
    "SG908",
    "SG909",
    "SG910",
    "SG911",
    "SG912",
    "SG913",
    "SG914",
    "SG915",
    "SG916",
    "SG917",
    "SG918",
    "SG919",
    "SG920",
    "SG921",
    "SG922",
    "SG951",
    "SG952",
    "SG953",
    "SG954",
    "SG955",
    "SG956",
]


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "write_findings", ROOT / "scripts" / "write_findings.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def app() -> typer.Typer:
    application = typer.Typer()
    application.command("explain")(explain_command)
    application.command("other")(lambda: None)  # a lone command would swallow its own name
    return application


def test_every_code_of_the_design_has_exactly_one_rule() -> None:
    assert [rule.code for rule in all_rules()] == CODES


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.code)
def test_page_has_the_fixed_headings_in_order(rule: Rule) -> None:
    lines = explain(rule.code).splitlines()
    assert lines[0] == f"# {rule.code}: {rule.text.title}"
    assert [line[3:] for line in lines if line.startswith("## ")][:5] == HEADINGS


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.code)
def test_remedies_are_ordered_by_how_little_they_change(rule: Rule) -> None:
    order = ["safe", "changes-numbers", "changes-training"]
    ranks = [order.index(remedy.safety) for remedy in rule.ordered]
    assert ranks == sorted(ranks)


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.code)
def test_rule_names_public_evidence(rule: Rule) -> None:
    assert rule.text.see
    assert all(
        reference.startswith("https://") or "/" in reference.partition("#")[0]
        for reference in rule.text.see
    )


@pytest.mark.parametrize("spelling", ["SG204", "sg204", " Sg204 ", "204"])
def test_code_is_found_in_any_spelling(spelling: str) -> None:
    assert explain(spelling).startswith("# SG204")


def test_unknown_code_names_the_near_ones() -> None:
    with pytest.raises(UnknownCode, match=r"'SG209' is not a finding; near it: .*SG20\d") as raised:
        explain("SG209")
    assert isinstance(raised.value, StepguardError)


def test_nonsense_names_the_whole_range() -> None:
    with pytest.raises(UnknownCode, match="SG101 to SG956"):
        explain("why")


def test_committed_pages_are_up_to_date() -> None:
    assert script().stale() == [], "run python scripts/write_findings.py"


def test_check_names_a_page_that_lacks_its_rule(tmp_path: Path) -> None:
    writer = script()
    writer.write(tmp_path)
    (tmp_path / "SG999.md").write_text("gone")
    (tmp_path / "SG101.md").write_text("edited by hand")
    assert writer.stale(tmp_path) == ["SG101.md", "SG999.md"]
    writer.write(tmp_path)
    assert writer.stale(tmp_path) == []


def test_command_prints_the_page_as_plain_text_in_a_pipe() -> None:
    result = CliRunner().invoke(app(), ["explain", "sg401"])
    assert result.exit_code == 0
    assert result.output == explain("SG401")


def test_command_without_a_code_lists_all() -> None:
    result = CliRunner().invoke(app(), ["explain"])
    assert all(code in result.output for code in CODES)


def test_command_prints_json() -> None:
    result = CliRunner().invoke(app(), ["explain", "SG502", "--json"])
    said = json.loads(result.output)
    assert said["code"] == "SG502"
    assert said["remedies"][0]["safety"] == "changes-numbers"
    assert len(json.loads(CliRunner().invoke(app(), ["explain", "--json"]).output)) == len(CODES)


def test_command_rejects_an_unknown_code_as_wrong_usage() -> None:
    result = CliRunner().invoke(app(), ["explain", "SG999"])
    assert result.exit_code == EXIT_USAGE
    assert "is not a finding" in result.output


def test_diagnosing_and_explaining_import_no_torch() -> None:
    lines = (
        "import sys, stepguard.diagnose as d, stepguard.cli.runs\n"
        "d.explain('SG101')\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", lines], check=True)


def test_diagnose_imports_nothing_of_its_own_layer() -> None:
    siblings = ("judge", "report", "journal", "locate", "state", "guard")
    for path in (ROOT / "src" / "stepguard" / "diagnose").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not [name for name in siblings if f"stepguard.{name}" in text], path

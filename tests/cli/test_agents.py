"""`stepguard mcp` and `stepguard skill`: an agent works on run folders, and on nothing else."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from mcp import Client, StdioServerParameters, stdio_client
from typer.testing import CliRunner

import forked
from cli.scripts import SOURCE, python, write
from stepguard.cli import agents
from stepguard.cli.agents import AgentTools, agent_server
from stepguard.cli.app import COMMANDS, app
from stepguard.journal import Journal
from stepguard.records import Reading

TRAINING = '''"""A project."""
import torch
from torch import nn
import stepguard


def LINES


def build():
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), lambda x: loss(model(x))


def main():
    model, optimizer, loss_fn = build()
    config = stepguard.GuardConfig(
        run_dir="runs/NAME", terminal="quiet", build="NAME:build"
    )
    with stepguard.Guard(model, optimizer, config=config) as guard:
        for step in range(6):
            x = torch.randn(5, 4)
            x[2] *= step != 4
            guard.step(loss_fn, x)
        guard.save()


if __name__ == "__main__":
    main()
'''
BUGS = {
    "unit": "loss(y):\n    return (y / torch.sqrt((y * y).sum(-1, keepdim=True))).sum()",
    "logs": "loss(y):\n    return torch.log(y.abs().sum(-1)).sum()",
    "root": "loss(y):\n    return torch.sqrt((y * y).sum(-1)).sum()",
    "share": "loss(y):\n    return (y[:, 0] / y.abs().sum(-1)).sum()",
    "norms": "loss(y):\n    return (y / y.norm(dim=-1, keepdim=True)).sum()",
}
"""Each is fine until row 2 of a batch is all zeros."""


def plant(folder: Path, name: str) -> Path:
    """Write the project and train it; returns the run folder."""
    write(folder, TRAINING.replace("LINES", BUGS[name]).replace("NAME", name), f"{name}.py")
    python(folder, "-c", f"import {name}; {name}.main()").check_returncode()
    return folder / "runs" / name


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", SOURCE)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


@pytest.fixture
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the commands that the tools start; only `check` is a fresh process."""

    def run(command: list[str], *, timeout: float, **_: Any) -> subprocess.CompletedProcess[str]:
        return forked.python(command[2:], seconds=timeout, fresh="check" in command)

    kept = {"DEVNULL": subprocess.DEVNULL, "TimeoutExpired": subprocess.TimeoutExpired}
    monkeypatch.setattr(agents, "subprocess", SimpleNamespace(run=run, **kept))


class Agent:
    """An MCP client in the same process, with one call for each tool."""

    def __init__(self, *folders: Path, **settings: Any) -> None:
        self.server = agent_server(AgentTools(list(folders), **settings))

    def __call__(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """The structured answer; `{"error": text}` where the tool refuses."""

        async def call() -> Any:
            async with Client(self.server) as client:
                return await client.call_tool(tool, arguments)

        answer = asyncio.run(call())
        if answer.is_error:
            return {"error": answer.content[0].text}
        found: dict[str, Any] = answer.structured_content
        json.dumps(found, allow_nan=False)
        return found

    def tools(self) -> dict[str, Any]:
        async def listed() -> Any:
            async with Client(self.server) as client:
                return (await client.list_tools()).tools

        return {tool.name: tool for tool in asyncio.run(listed())}


TOOLS = ["runs", "incidents", "evidence", "explain", "verify", "replay", "whatif", "check", "fix"]


@pytest.mark.process
@pytest.mark.usefixtures("_forked")
def test_client_drives_every_tool(project: Path) -> None:
    run = plant(project, "unit")
    agent = Agent(project / "runs", build="unit:build")
    listed = agent.tools()
    assert list(listed) == TOOLS
    for tool in listed.values():
        assert tool.description and tool.input_schema["type"] == "object"
        assert all("description" in one for one in tool.input_schema["properties"].values())
        assert tool.annotations.read_only_hint is True

    (row,) = agent("runs")["runs"]
    assert (row["run"], row["path"], row["incidents"]) == ("unit", str(run), "1")
    found = agent("incidents", run=row["path"])
    (incident,) = found["incidents"]
    assert incident["step"] == 4 and incident["codes"][0] == "SG201"
    assert incident["proven_fix"] and incident["can_replay"]
    assert found["report"]["groups"][0]["code"] == "SG201"
    measured = agent("evidence", path=incident["path"])["incident"]
    assert measured["origin"]["source"].endswith("unit.py:8")
    assert agent("evidence", path=str(run), incident=incident["id"])["incident"] == measured
    assert agent("evidence", path=str(run))["incident"] == measured
    assert agent("explain", code="SG201")["remedies"]
    assert "SG204" in agent("explain")["codes"]
    whole = agent("verify", path=str(run / "checkpoints"))
    assert whole.get("ok") is True, whole

    again = agent("replay", path=str(run))
    assert again["reproduced"] and again["incident"]["findings"][0]["code"] == "SG201"
    assert agent("whatif", path=str(run))["outcomes"]
    before = (project / "unit.py").read_text()
    fixed = agent("fix", path=incident["path"])
    assert "+++ b/unit.py" in fixed["diff"] and fixed["after"]["loss"] is not None
    assert "read-only" in agent("fix", path=str(run), apply=True)["error"]
    assert (project / "unit.py").read_text() == before
    checked = agent("check")
    assert isinstance(checked["ok"], bool)


@pytest.mark.process
@pytest.mark.usefixtures("_forked")
@pytest.mark.parametrize("bug", BUGS if forked.FULL else list(BUGS)[:2])
def test_scripted_agent_fixes_a_planted_bug_through_tools_alone(project: Path, bug: str) -> None:
    """It never sees the file: it lists, reads, applies the proven fix and replays."""
    plant(project, bug)
    agent = Agent(project / "runs", allow_apply=True)
    assert agent.tools()["fix"].annotations.read_only_hint is False
    (row,) = [row for row in agent("runs")["runs"] if row["incidents"] != "0"]
    incident = agent("incidents", run=row["path"])["incidents"][0]
    assert agent("replay", path=incident["path"])["reproduced"]
    fixed = agent("fix", path=incident["path"], apply=True)
    assert fixed["applied"] == [str(project / f"{bug}.py")], fixed
    assert not agent("replay", path=incident["path"])["reproduced"]
    shutil.rmtree(project / "runs" / bug)
    python(project, f"{bug}.py").check_returncode()
    (row,) = agent("runs")["runs"]
    assert row["incidents"] == "0"


@pytest.mark.process
def test_command_serves_over_stdio(project: Path) -> None:
    (project / "runs").mkdir()
    words = ["-m", "stepguard", "mcp", "runs"]

    async def talk() -> Any:
        server = stdio_client(
            StdioServerParameters(command=sys.executable, args=words, env={"PYTHONPATH": SOURCE})
        )
        async with Client(server) as client:
            return await client.call_tool("runs", {})

    assert asyncio.run(talk()).structured_content == {"runs": []}


# --- Nothing outside of the folders, and no code that a capsule brings.


@pytest.fixture
def folders(project: Path) -> Path:
    """A server's folder `runs` with one file, and a secret beside it."""
    for run in ("runs/a", "secret"):
        journal = Journal(project / run)
        journal.write("run", {"stepguard": "0"})
        journal.step(Reading(step=0, loss=1.0, lr=(0.1,)), committed=True)
        journal.close()
    return project


@pytest.mark.parametrize(
    "path",
    ["secret", "runs/../secret", "/etc/passwd", "runs/link", "runs/link/journal.jsonl", "~", "\0"],
)
@pytest.mark.parametrize(
    ("tool", "argument"),
    [
        ("incidents", "run"),
        ("evidence", "path"),
        ("verify", "path"),
        ("replay", "path"),
        ("whatif", "path"),
        ("fix", "path"),
        ("check", "target"),
        ("check", "data"),
    ],
)
def test_path_outside_is_refused(folders: Path, path: str, tool: str, argument: str) -> None:
    (folders / "runs" / "link").symlink_to(folders / "secret")
    agent = Agent(folders / "runs", build="a:b")
    error = agent(tool, **{argument: path})["error"]
    assert "is refused: give a path inside" in error and str(folders / "runs") in error


def test_link_in_a_run_that_leads_out_is_refused_and_one_that_stays_is_not(folders: Path) -> None:
    agent = Agent(folders / "runs")
    run = folders / "runs" / "a"
    (run / "inner").symlink_to(run / "journal.jsonl")
    assert agent("incidents", run="runs/a")["total"] == 0
    (run / "incidents").symlink_to(folders / "secret")
    for tool, argument in (("incidents", "run"), ("evidence", "path"), ("verify", "path")):
        assert "is refused" in agent(tool, **{argument: "runs/a"})["error"]
    (row,) = agent("runs")["runs"]
    assert "is refused" in row["error"]


def test_incident_by_a_name_that_climbs_is_refused(folders: Path) -> None:
    agent = Agent(folders / "runs")
    error = agent("evidence", path="runs/a", incident="../../../secret")["error"]
    assert "is refused" in error


def test_folder_given_by_a_link_is_what_it_leads_to(folders: Path) -> None:
    (folders / "short").symlink_to(folders / "runs")
    agent = Agent(folders / "short")
    assert agent("incidents", run="short/a")["total"] == 0
    assert agent("incidents", run="runs/a")["total"] == 0


@pytest.mark.process
@pytest.mark.usefixtures("_forked")
def test_capsule_made_elsewhere_runs_nothing(project: Path, monkeypatch: Any) -> None:
    run = plant(project, "logs")
    ran = project / "ran"
    with (project / "logs.py").open("a") as program:
        program.write(f"\nopen({str(ran)!r}, 'w').close()\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(project / "another"))
    agent = Agent(project / "runs", allow_apply=True)
    for tool in ("replay", "whatif", "fix"):
        assert "was not made by you" in agent(tool, path=str(run))["error"]
        assert "yes" not in agent.tools()[tool].input_schema["properties"]
    assert not ran.exists()


def test_wrong_use_is_one_error(folders: Path) -> None:
    agent = Agent(folders / "runs")
    assert "does not exist" in agent("incidents", run="runs/b")["error"]
    assert "not the folder of an incident" in agent("evidence", path="runs/a")["error"]
    assert "SG999" in agent("explain", code="SG999")["error"]
    assert "--build" in agent("check")["error"]
    assert "field required" in agent("incidents")["error"].lower()
    done = CliRunner().invoke(app, ["mcp", "nowhere"])
    assert done.exit_code == 2 and "nowhere is not a folder" in done.stderr


# --- The skill.


def test_skill_has_front_matter_and_names_commands_that_exist() -> None:
    text = CliRunner().invoke(app, ["skill"]).stdout
    _, front, body = text.split("---\n", 2)
    head = yaml.safe_load(front)
    assert head["name"] == "stepguard" and len(head["description"]) < 1024
    known = {command.__name__ for command in COMMANDS}
    rows = [line.split("|") for line in body.splitlines() if line.startswith("| ") and "`" in line]
    assert sorted(row[3].strip(" `") for row in rows) == sorted(TOOLS)
    for row in rows:
        if "`stepguard " in row[2]:
            assert row[2].split("`stepguard ")[1].split()[0] in known

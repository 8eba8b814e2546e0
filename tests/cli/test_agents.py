"""`stepguard mcp` and `stepguard skill`: an agent works on run folders, and on nothing else."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from mcp import Client
from typer.testing import CliRunner

import forked
from cli.journals import invoke
from cli.scripts import SOURCE, line_of, python, stepguard_in, write
from stepguard.cli import agents
from stepguard.cli.agents import AgentTools, agent_server
from stepguard.cli.app import COMMANDS, app
from stepguard.cli.schemas import COMMANDS as PRINTED
from stepguard.cli.schemas import TOOLS as SCHEMAS
from stepguard.cli.schemas import schema_of
from stepguard.journal import Journal
from stepguard.records import Reading

HEAD = """
import os

import torch
from torch import nn
from torch.nn import functional as F

import stepguard

"""
TAIL = """

def build():
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, lambda batch: loss_of(model, *batch)


if __name__ == "__main__":
    model, optimizer, loss_fn = build()
    config = stepguard.GuardConfig(run_dir=os.environ.get("RUN_DIR", "runs"), terminal="quiet")
    with stepguard.Guard(model, optimizer, config=config) as guard:
        for step in range(8):
            guard.step(loss_fn, batch_of(step))
        guard.save()
"""
BUGS = {
    "pooling": """
class Net(nn.Module):
    # sentences, classified by the mean of their words; one of them is empty
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(50, 8), nn.Linear(8, 3)

    def forward(self, words, mask):
        summed = (self.words(words) * mask[..., None]).sum(1)
        return self.out(summed / mask.sum(1, keepdim=True))  # BUG


def batch_of(step):
    mask = (torch.arange(6) < torch.randint(1, 7, (16, 1))).float()
    mask[3] *= step != 5
    return torch.randint(50, (16, 6)), mask, torch.randint(3, (16,))


def loss_of(model, words, mask, labels):
    return F.cross_entropy(model(words, mask), labels)
""",
    "counts": """
class Net(nn.Module):
    # counts per hour as a Poisson process, whose rate may be 0
    def __init__(self):
        super().__init__()
        self.rate = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x):
        return self.rate(x).relu().squeeze(-1)


def batch_of(step):
    return torch.randn(32, 4), torch.randint(0, 5, (32,)).float()


def loss_of(model, x, counts):
    rate = model(x)
    return (rate - counts * torch.log(rate)).mean()  # BUG
""",
    "attention": """
class Net(nn.Module):
    # attention with a padding mask; one sentence is nothing but padding
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(50, 8), nn.Linear(8, 3)
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, words, keep):
        x = self.words(words)
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        scores = scores.masked_fill(~keep[:, None, :], float("-inf"))
        return self.out((torch.softmax(scores, dim=-1) @ self.value(x)).mean(1))  # BUG


def batch_of(step):
    keep = torch.arange(6) < torch.randint(1, 7, (16, 1))
    keep[3] &= step != 5
    return torch.randint(50, (16, 6)), keep, torch.randint(3, (16,))


def loss_of(model, words, keep, labels):
    return F.cross_entropy(model(words, keep), labels)
""",
    "metric": """
class Net(nn.Module):
    # pairs that should lie close to each other, or apart; one pair is twice the same
    def __init__(self):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, one, other):
        return torch.sqrt((self.embed(one) - self.embed(other)).pow(2).sum(-1))  # BUG


def batch_of(step):
    one, other = torch.randn(16, 6), torch.randn(16, 6)
    if step == 5:
        other[7] = one[7]
    return one, other, torch.randint(2, (16,)).float()


def loss_of(model, one, other, alike):
    apart = model(one, other)
    return (alike * apart + (1 - alike) * F.relu(1 - apart)).mean()
""",
    "half": """
class Net(nn.Module):
    # features that are normalised in half precision; one window is silent
    def __init__(self):
        super().__init__()
        self.first, self.out = nn.Linear(6, 8, bias=False), nn.Linear(8, 3)

    def forward(self, x):
        hidden = self.first(x).half()
        hidden = hidden / (hidden.pow(2).mean(-1, keepdim=True).sqrt() + 1e-8)  # BUG
        return self.out(hidden.float())


def batch_of(step):
    x = torch.randn(16, 6)
    x[2] *= step != 5
    return x, torch.randint(3, (16,))


def loss_of(model, x, labels):
    return F.cross_entropy(model(x), labels)
""",
}
CODES = {
    "pooling": "SG102",
    "counts": "SG202",
    "attention": "SG204",
    "metric": "SG401",
    "half": "SG302",
}


def train(folder: Path, name: str, run: str, **variables: str) -> None:
    done = python(folder, f"{name}.py", RUN_DIR=run, **variables)
    assert done.returncode == 0, done.stderr


def plant(folder: Path, name: str) -> Path:
    """Write the script and train it; returns the run folder."""
    write(folder, HEAD + BUGS[name] + TAIL, f"{name}.py")
    train(folder, name, f"runs/{name}")
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
        Draft202012Validator(schema_of(SCHEMAS[tool])).validate(found)
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
    run = plant(project, "pooling")
    agent = Agent(project / "runs", build="pooling:build")
    listed = agent.tools()
    assert list(listed) == TOOLS
    for tool in listed.values():
        assert tool.description and tool.input_schema["type"] == "object"
        assert all("description" in one for one in tool.input_schema["properties"].values())
        assert tool.annotations.read_only_hint is True
        Draft202012Validator.check_schema(tool.output_schema)
        assert tool.output_schema == {"type": "object", **schema_of(SCHEMAS[tool.name])}

    (row,) = agent("runs")["runs"]
    assert (row["run"], row["path"], row["incidents"]) == ("pooling", str(run), 1)
    assert (row["state"], row["steps"], row["last_step"]) == ("closed", 8, 7)
    found = agent("incidents", run=row["path"])
    (incident,) = found["incidents"]
    assert incident["step"] == 5 and incident["codes"][0] == "SG102"
    assert incident["proven_fix"] and incident["can_replay"]
    (group,) = found["report"]["groups"]
    assert group["code"] == "SG102"
    # what was tried on the step, and what to do next
    (proven,) = [one for one in group["incident"]["findings"][0]["remedies"] if one["proven"]]
    assert proven["tried"] == "tried on this step: loss and gradients finite"
    assert any(command.startswith("stepguard fix ") for command in group["commands"])
    measured = agent("evidence", path=incident["path"])["incident"]
    assert measured["origin"]["source"].endswith(f"pooling.py:{bug_line(project, 'pooling')}")
    assert agent("evidence", path=str(run), incident=incident["id"])["incident"] == measured
    assert agent("evidence", path=str(run))["incident"] == measured
    assert agent("explain", code="SG102")["remedies"]
    assert "SG204" in agent("explain")["codes"]
    whole = agent("verify", path=str(run / "checkpoints"))
    assert whole.get("ok") is True, whole

    again = agent("replay", path=str(run))
    assert again["reproduced"] and again["incident"]["findings"][0]["code"] == "SG102"
    assert agent("whatif", path=str(run))["outcomes"]
    before = (project / "pooling.py").read_text()
    fixed = agent("fix", path=incident["path"])
    assert "+++ b/pooling.py" in fixed["diff"] and fixed["after"]["loss"] is not None
    assert "read-only" in agent("fix", path=str(run), apply=True)["error"]
    assert (project / "pooling.py").read_text() == before
    checked = agent("check")
    assert isinstance(checked["ok"], bool)

    # what the commands print
    for words, holds in {
        ("report", "runs"): {"runs": [{"run": "pooling", "incidents": 1}]},
        ("report", str(run)): {"state": "closed", "incidents": 1},
        ("compare", str(run), str(run)): {"settings": {}},
        ("explain", "SG102"): {"code": "SG102"},
        ("replay", str(run), "--build", "pooling:build"): {"step": 5},
        ("fix", str(run), "--build", "pooling:build"): {"code": "SG102", "applied": []},
        ("verify", str(run / "checkpoints")): {"ok": True},
        ("check", "pooling:build", "--only", "precision"): {"target": "pooling:build"},
        ("diff", str(run), "--with", "dtype=float64", "--yes"): {"first": {"stage": "forward"}},
    }.items():
        done = stepguard_in(project, *words, "--json")
        printed = json.loads(done.stdout)
        Draft202012Validator(published(words[0])).validate(printed)
        assert within(holds, printed), done.stdout


def published(command: str) -> dict[str, Any]:
    """The schema that `stepguard schema COMMAND` prints."""
    found: dict[str, Any] = json.loads(invoke("schema", command).stdout)
    Draft202012Validator.check_schema(found)
    return found


def within(few: Any, whole: Any) -> bool:
    """Do these values stand in the answer?"""
    if isinstance(few, dict):
        return all(name in whole and within(few[name], whole[name]) for name in few)
    if isinstance(few, list):
        return len(few) == len(whole) and all(map(within, few, whole))
    return bool(few == whole)


@pytest.mark.parametrize("command", [*PRINTED, "diff"])
def test_schema_describes_every_record(command: str) -> None:
    found = published(command)
    records = [one for name, one in found["$defs"].items() if name != "Number"]
    assert all(one["description"] for one in records)


def test_schema_refuses_what_the_report_never_prints(tmp_path: Path) -> None:
    """NaN is null beside its kind, and a count is no text."""
    validator = Draft202012Validator(published("report"))
    run = tmp_path / "run"
    journal = Journal(run)
    journal.write("run", {"stepguard": "0"})
    journal.step(Reading(step=0, loss=float("nan"), lr=(0.1,)), committed=True)
    journal.close()
    printed = json.loads(invoke("report", str(run), "--json").stdout)
    validator.validate(printed)
    assert not validator.is_valid(printed | {"steps": "1"})
    assert not validator.is_valid(printed | {"state": "unknown"})
    assert not validator.is_valid({key: printed[key] for key in printed if key != "groups"})


def test_schema_of_an_unknown_command_names_those_there_are() -> None:
    assert invoke("schema").stdout.split() == [*PRINTED, "diff"]
    done = invoke("schema", "train")
    assert done.exit_code == 2 and "report, compare" in done.stderr


def bug_line(project: Path, bug: str) -> int:
    return line_of((project / f"{bug}.py").read_text(), "# BUG")


# --- A program mends five planted bugs over stdio, with no other means than the tools.


def scripted(project: Path, *options: str) -> list[dict[str, Any]]:
    """What `scripted_agent.py` did to the runs of the project."""
    program = str(Path(__file__).with_name("scripted_agent.py"))
    server = (sys.executable, "-m", "stepguard", "mcp", "runs", *options)
    done = python(project, program, *server, timeout=280, fresh=True)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def contents(project: Path) -> dict[str, bytes]:
    """Every file of the project but those of its runs, which commands may add to."""
    skipped = ("runs", "config", "__pycache__")
    files = [one for one in project.rglob("*") if one.is_file()]
    parts = {one: one.relative_to(project) for one in files}
    return {str(at): one.read_bytes() for one, at in parts.items() if at.parts[0] not in skipped}


@pytest.mark.process
@pytest.mark.parametrize("bug", BUGS)
def test_scripted_agent_fixes_a_planted_bug_through_the_tools_alone(
    project: Path, bug: str
) -> None:
    plant(project, bug)
    write(project, HEAD + BUGS[bug] + TAIL, "twin.py")  # the same bug in a file of another run
    before = contents(project)
    line = bug_line(project, bug)
    (done,) = scripted(project, "--allow-apply")
    assert done == {
        "run": bug,
        "code": CODES[bug],
        "source": f"{bug}.py:{line}",
        "applied": [str(project / f"{bug}.py")],
        "reproduced": False,
    }
    after = contents(project)
    assert {name for name in after if after[name] != before.get(name)} == {f"{bug}.py"}
    train(project, bug, f"again/{bug}")
    (row,) = Agent(project / "again")("runs")["runs"]
    assert (row["run"], row["steps"], row["incidents"]) == (bug, 8, 0)


@pytest.mark.process
def test_scripted_agent_without_allow_apply_gets_the_diff_and_changes_nothing(
    project: Path,
) -> None:
    plant(project, "metric")
    before = contents(project)
    (done,) = scripted(project)
    assert (done["code"], done["applied"]) == ("SG401", [])
    assert "+++ b/metric.py" in done["diff"] and "read-only" in done["refused"]
    assert contents(project) == before


@pytest.mark.process
def test_bug_of_a_library_outside_of_the_project_is_not_written(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither is a file that the run folder names: the replay finds the line anew."""
    library = "import torch\n\n\ndef root(x):\n    return torch.sqrt(x)\n"
    write(project / "elsewhere", library, "theirs.py")
    paths = os.pathsep.join((SOURCE, str(project / "elsewhere")))
    monkeypatch.setenv("PYTHONPATH", paths)
    training = (HEAD + BUGS["metric"] + TAIL).replace("torch.sqrt(", "theirs.root(")
    work = project / "work"
    write(work, training.replace("import os\n", "import os\nimport theirs\n"), "metric.py")
    write(work, library, "bystander.py")
    train(work, "metric", "runs/metric", PYTHONPATH=paths)
    monkeypatch.chdir(work)
    (record,) = (work / "runs").rglob("incident.json")
    text = record.read_text().replace("theirs.py", "bystander.py")
    record.write_text(text)
    before = contents(project)
    answer = Agent(work / "runs", allow_apply=True)("fix", path="runs/metric", apply=True)
    assert contents(project) == before, answer
    assert "error" in answer


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
    run = plant(project, "counts")
    ran = project / "ran"
    with (project / "counts.py").open("a") as program:
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

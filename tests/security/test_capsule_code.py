"""A capsule names code, it does not bring it, and it keeps no secrets."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import stepguard
from state.capsules import build, capsule_of, guarded, healthy
from stepguard._errors import CapsuleError
from stepguard.cli.app import app
from stepguard.state import capsule as capsules
from stepguard.state.capsule import read_capsule

PROJECT = """
import os
from pathlib import Path
from state.capsules import build as make
with Path(os.environ["XDG_CONFIG_HOME"], "ran").open("a") as file:
    file.write(__name__ + " ")
def build():
    return make()
if __name__ == "__main__":
    import stepguard, torch
    from state.capsules import healthy
    model, optimizer, loss_fn = make()
    stepguard.Guard(model, optimizer).step(loss_fn, healthy(-1.0))
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a script, the current directory; its run is below it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(PROJECT)
    monkeypatch.setattr(
        sys, "argv", [str(tmp_path / "train.py"), "--lr", "3", "--api-key", "S3CRET"]
    )
    _ran().unlink(missing_ok=True)
    return tmp_path


def _ran() -> Path:
    return Path(os.environ["XDG_CONFIG_HOME"], "ran")


def ran() -> list[str]:
    """The names under which code of the project, or of an attacker, was run."""
    return _ran().read_text().split() if _ran().exists() else []


@pytest.fixture
def capsule(project: Path) -> Path:
    return capsule_of(project / "run", guarded(project / "run", build(), [(healthy(-1.0),)]))


def edited(capsule: Path, **facts: Any) -> Path:
    path = capsule / "capsule.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))
    return capsule


def put(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(PROJECT)
    return path


def agreed(command: str) -> bool:
    return True


@pytest.mark.slow
def test_own_capsule_is_replayed_without_a_question(capsule: Path) -> None:
    assert stepguard.replay(capsule).origin is not None
    assert ran() == ["__main__"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [{"arguments": ["--lr", "4"]}, {"made": {}}, {"signature": "0" * 64}, {"signature": None}],
)
def test_changed_or_foreign_capsule_asks_before_it_runs(capsule: Path, change: Any) -> None:
    edited(capsule, **change)
    with pytest.raises(CapsuleError, match=r"not made by you.*python train\.py --lr"):
        stepguard.replay(capsule)
    assert ran() == []
    asked: list[str] = []
    with pytest.raises(CapsuleError):
        stepguard.replay(capsule, confirm=lambda command: bool(asked.append(command)))
    assert asked and ran() == []
    stepguard.replay(capsule, confirm=agreed)
    assert ran() == ["__main__"]


def test_capsule_of_another_folder_asks(
    capsule: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "train.py").write_text(PROJECT)
    monkeypatch.chdir(elsewhere)
    with pytest.raises(CapsuleError, match="not made by you"):
        stepguard.replay(capsule)
    assert ran() == []


@pytest.mark.slow
def test_named_script_is_run_whoever_made_the_capsule(capsule: Path) -> None:
    edited(capsule, script="evil.py")
    assert stepguard.replay(capsule, script="train.py").origin is not None
    assert ran() == ["__main__"]


@pytest.mark.parametrize(
    "place",
    [
        "run/evil.py",
        "run/incidents/evil.py",
        "CAPSULE/evil.py",
        "shared/evil.py",
        "shared/deep/evil.py",
        ".venv/lib/python3.11/site-packages/evil.py",
    ],
)
@pytest.mark.parametrize("how", ["script", "module", "build"])
def test_code_that_came_along_is_refused_even_when_confirmed(
    project: Path, capsule: Path, place: str, how: str
) -> None:
    (project / "shared").mkdir()
    (project / "shared" / "journal.jsonl").touch()
    path = put(project / place.replace("CAPSULE", str(capsule.relative_to(project))))
    relative = path.relative_to(project)
    dotted = ".".join(relative.with_suffix("").parts)
    if how == "build":
        edited(capsule, build=f"{dotted}:build")
    else:
        module = dotted if how == "module" else None
        edited(capsule, script=str(relative), module=module, build=None)
    with pytest.raises(CapsuleError):
        stepguard.replay(capsule, confirm=agreed)
    assert ran() == []


def test_link_to_code_elsewhere_is_refused(project: Path, capsule: Path) -> None:
    evil = put(project / "run" / "evil.py")
    (project / "innocent.py").symlink_to(evil)
    edited(capsule, script="innocent.py")
    with pytest.raises(CapsuleError, match="not code of your project"):
        stepguard.replay(capsule, confirm=agreed)
    assert ran() == []


def test_module_that_is_another_file_than_the_script_is_refused(
    project: Path, capsule: Path
) -> None:
    put(project / "other.py")
    edited(capsule, script="train.py", module="other")
    with pytest.raises(CapsuleError, match="which is another file"):
        stepguard.replay(capsule, confirm=agreed)
    edited(capsule, module="torch.distributed.run", arguments=["--no-python", "sh", "-c", "exit 9"])
    with pytest.raises(CapsuleError, match="outside the current directory"):
        stepguard.replay(capsule, confirm=agreed)
    assert ran() == []


@pytest.mark.slow
@pytest.mark.parametrize("command", ["replay", "whatif", "fix"])
def test_commands_print_what_they_would_run_and_do_not_without_a_yes(
    capsule: Path, command: str
) -> None:
    edited(capsule, arguments=["--steal", "\x1b[31mred"])
    refused = CliRunner().invoke(app, [command, str(capsule)])
    assert refused.exit_code == 2 and ran() == []
    assert "python train.py --steal" in refused.output and "\x1b" not in refused.output
    CliRunner().invoke(app, [command, str(capsule), "--yes"])
    assert ran() == ["__main__"]
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output
    assert "runs your training script" in shown


def test_secrets_of_the_command_line_are_not_kept(capsule: Path) -> None:
    text = (capsule / "capsule.json").read_text()
    assert "S3CRET" not in text
    assert read_capsule(capsule).arguments == ["--lr", "3", "--api-key", "***"]


@pytest.mark.slow
def test_capsule_and_journal_are_for_their_user_only(project: Path, capsule: Path) -> None:
    run = project / "run"
    private = [run / "journal.jsonl", *capsule.iterdir()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in private if path.is_file()} == {0o600}
    assert stat.S_IMODE(capsule.stat().st_mode) == 0o700
    assert stat.S_IMODE((run / "incidents").stat().st_mode) == 0o700
    key = Path(os.environ["XDG_CONFIG_HOME"]) / "stepguard" / "capsule-key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600


@pytest.mark.slow
def test_key_that_others_can_read_signs_nothing(
    project: Path, capsule: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(project / "config"))
    assert not read_capsule(capsule).made_here
    again = capsule_of(project / "two", guarded(project / "two", build(), [(healthy(-1.0),)]))
    assert read_capsule(again).made_here
    (project / "config" / "stepguard" / "capsule-key").chmod(0o644)
    assert not read_capsule(again).made_here


def test_capsule_is_written_where_no_key_can_be(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(project / "file"))
    capsule = capsule_of(project / "run", guarded(project / "run", build(), [(healthy(-1.0),)]))
    assert not read_capsule(capsule).made_here


def test_tensor_that_is_referred_to_many_times_takes_no_memory(capsule: Path) -> None:
    one = {"tensor": "batch/0/x", "requires_grad": False, "device": "cpu"}
    edited(capsule, micro_batches=[{"list": [one] * 2000}])
    with pytest.raises(CapsuleError, match="refers to its tensors so often"):
        read_capsule(capsule)


def test_capsule_json_is_read_up_to_a_limit(capsule: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capsules, "LARGEST_FACTS", 1000)
    with pytest.raises(CapsuleError, match="more than 1000"):
        read_capsule(capsule)


def test_no_process_is_started_to_describe_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.check_output", lambda *_, **__: pytest.fail("a process"))
    assert "torch" in capsules.environment() and torch.__version__


@pytest.mark.slow
def test_capsule_json_of_anything_is_a_capsule_or_one_error(capsule: Path) -> None:
    """Each fact in turn is replaced by what no capsule holds."""
    facts = json.loads((capsule / "capsule.json").read_text())
    for key in facts:
        for odd in (None, [], {}, -1, "x", [[{}]], 1e308, {"tensor": [1]}):
            (capsule / "capsule.json").write_text(json.dumps({**facts, key: odd}))
            try:
                read_capsule(capsule).decoded()
            except CapsuleError as error:
                assert "\n" not in str(error)

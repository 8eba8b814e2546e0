"""`stepguard check`: exit codes, the table, the JSON, and errors in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from check.asking import PROJECT
from stepguard.cli.app import app


def run(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["check", *words], env={"COLUMNS": "100"})
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture(autouse=True)
def _in_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROJECT)


@pytest.mark.slow
def test_healthy_project_is_ready(tmp_path: Path) -> None:
    code, out, _ = run(
        "tinychat.training:build", "--config", "config.json", "--run-dir", str(tmp_path)
    )
    assert code == 0
    assert "configuration is aligned" in out
    assert " ready: 0 failed, 0 warned" in out


@pytest.mark.slow
def test_failed_item_is_exit_code_5_with_evidence_and_fix() -> None:
    code, out, _ = run(
        "tinychat.faults:half_weights", "--config", "config.json", "--only", "optimizer.eps"
    )
    assert code == 5
    assert "FAIL optimizer.eps" in out
    assert "eps=1e-08 is 0 in float16" in out and "fix: " in out
    assert "not ready: 1 failed" in out


def test_warning_fails_only_when_strict() -> None:
    words = ("tinychat.faults:silence", "--config", "config.json", "--only", "data.constant")
    assert run(*words)[0] == 0
    assert run(*words, "--strict")[0] == 5


def test_json_is_one_object_even_if_the_program_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loud_build.py").write_text(
        "import torch\ndef build():\n    print('hello')\n    return torch.nn.Linear(2, 2), None\n"
    )
    monkeypatch.chdir(tmp_path)
    code, out, _ = run("loud_build:build", "--json", "--watch", "weight=1e-9", "--only", "scalars")
    found = json.loads(out)
    assert (code, found["ok"]) == (5, False)
    (outcome,) = found["outcomes"]
    assert (outcome["id"], outcome["status"]) == ("scalars.limit", "fail")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nothing",), "'nothing' is neither a file nor a folder here"),
        (("config.json", "--only", "lrr"), "'lrr' is not an item"),
        (("config.json", "--watch", "alpha"), "--watch 'alpha' must look like PATTERN=LIMIT"),
        (("config.json", "--watch", "alpha=-1"), "must look like PATTERN=LIMIT"),
        (("config.json", "--data", "nowhere"), "data nowhere does not exist"),
        (("config.json", "--checkpoint", "no.pt"), "no.pt does not exist"),
    ],
)
def test_wrong_use_is_exit_code_2_in_one_line(words: tuple[str, ...], said: str) -> None:
    code, _, err = run(*words)
    assert code == 2
    assert err.startswith("stepguard: error: ") and said in err
    assert err.count("\n") == 1

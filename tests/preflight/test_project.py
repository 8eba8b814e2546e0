"""The checklist's points about code, judged by the source of the program that is checked."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from preflight.asking import inside
from stepguard.check.inspection import CheckContext, Inspection
from stepguard.check.preflight import Subject, check, run_item
from stepguard.check.subject import files_below, read_source

ITEMS = ("checklist.loss_checked", "checklist.norms", "checklist.recovery")
GUARDED = ("pass", "pass", "pass")
UNGUARDED = ("warn", "warn", "warn")


def statuses(folder: Path, source: str, *, known: bool = True) -> tuple[str, ...]:
    script = folder / "train.py"
    script.write_text(source)
    context = CheckContext(folder, script=script if known else None)
    run = Inspection(Subject(model=nn.Linear(2, 2)), context)
    return tuple(run_item(item, run).status for item in ITEMS)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("loss.backward()\noptimizer.step()\n", UNGUARDED),
        ("if torch.isnan(loss):\n    pass\n", UNGUARDED),
        ("if not torch.isfinite(loss):\n    pass\n", ("pass", "warn", "warn")),
        ("bad = loss.isnan() or loss.isinf()\n", ("pass", "warn", "warn")),
        ("norm = clip_grad_norm_(p, 1.0)\n", ("warn", "pass", "warn")),
        # A norm that nobody looks at is not monitored.
        ("clip_grad_norm_(p, 1.0)\n", UNGUARDED),
        ("import stepguard\nguard = stepguard.watch(model, optimizer)\n", GUARDED),
        ("from stepguard import Guard\nguard = Guard(model, optimizer)\n", GUARDED),
        ("from stepguard import Guard as G\nwith G(model, optimizer):\n    pass\n", GUARDED),
        ("import stepguard as sg\nsg.watch(model, optimizer)\n", GUARDED),
        ("from stepguard.integrations.transformers import guard\nguard(trainer)\n", GUARDED),
        ("import stepguard.integrations.lightning as l\nl.GuardCallback()\n", GUARDED),
        ("from stepguard import *\nwatch(model, optimizer)\n", GUARDED),
        # A name of somebody else's, and an import that nothing uses.
        ("from mine import watch\nimport stepguard\nwatch(model)\n", UNGUARDED),
        ("from stepguard import Guard\nloss.backward()\n", UNGUARDED),
        ("import stepguard\nx = stepguard.numerics.safe_log(x)\n", UNGUARDED),
    ],
)
def test_points_about_code_follow_the_source(
    tmp_path: Path, source: str, expected: tuple[str, ...]
) -> None:
    assert statuses(tmp_path, source) == expected


@pytest.mark.parametrize(
    ("test", "is_of_the_loss"),
    [
        ("assert torch.isfinite(batch['image']).all()", False),
        ("keep = np.isfinite(rows)", False),
        ("torch.isfinite(loss_scale)", False),
        ("if not math.isfinite(loss.item()): raise", True),
        ("value = float(loss)\nif not math.isfinite(value): raise", True),
        ("total.backward()\nif not torch.isfinite(total): raise", True),
        ("scaler.scale(objective).backward()\ntorch.isfinite(objective)", True),
        ("accelerator.backward(out)\ntorch.isfinite(out)", True),
        ("torch.isfinite(outputs.loss)", True),
        ("torch.isfinite(parts['loss'])", True),
        ("def good(x):\n    return torch.isfinite(x).all()\ngood(loss)", True),
        ("def good(x):\n    return torch.isfinite(x).all()\ngood(batch)", False),
    ],
)
def test_only_a_test_of_the_loss_validates_the_loss(
    tmp_path: Path, test: str, is_of_the_loss: bool
) -> None:
    (tmp_path / "train.py").write_text(test.replace(": raise", ": print(1)"))
    program = read_source(tmp_path, [tmp_path / "train.py"])
    assert ("isfinite" in program.places) is is_of_the_loss


def test_another_script_of_the_folder_proves_nothing(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text(
        "import stepguard\nstepguard.watch(model, optimizer)\ntorch.isfinite(loss)\n"
        "clip_grad_norm_(p, 0.5)\n"
    )
    assert statuses(tmp_path, "loss.backward()\n") == UNGUARDED
    # With a configuration alone nobody can say which program it is for.
    assert set(statuses(tmp_path, "loss.backward()\n", known=False)) == {"not_checked"}


def test_modules_that_the_script_imports_belong_to_it(tmp_path: Path) -> None:
    package = tmp_path / "project" / "inner"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "loop.py").write_text("from . import guarding\n")
    (package / "guarding.py").write_text("import stepguard\nstepguard.Guard(model, opt)\n")
    source = "def main():\n    from project.inner.loop import train\n"
    assert statuses(tmp_path, source) == GUARDED


def test_installed_and_hidden_source_does_not_count(tmp_path: Path) -> None:
    for folder in ("site-packages", ".hidden", "env"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "other.py").write_text("config.hidden")
    (tmp_path / "env" / "pyvenv.cfg").touch()
    (tmp_path / "broken.py").write_text("def (:")
    (tmp_path / "mine.py").write_text("config.lr\n")
    project = read_source(tmp_path, files_below(tmp_path))
    assert (project.files, "hidden" in project.mentions) == (1, False)
    assert "lr" in project.mentions


@pytest.mark.parametrize(
    ("source", "status", "words"),
    [
        (
            "clip_grad_norm_(model.parameters(), 1.0)",
            "warn",
            "the program clips at train.py:1 to 1",
        ),
        ("clip_grad_norm_(model.parameters(), max_norm=0.5)", "pass", "train.py:1 to 0.5"),
        ("LIMIT = 0.3\nclip_grad_norm_(params, LIMIT)", "pass", "train.py:2 to 0.3"),
        ("clip_grad_norm_(params, args.clip)", "pass", "not written there as a number"),
        ("loss.backward()", "warn", "the program clips nowhere"),
    ],
)
def test_clipping_of_the_program_counts_and_the_fix_is_what_is_expected(
    tmp_path: Path, source: str, status: str, words: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(source)
    run = Inspection(Subject(model=nn.Linear(2, 2)), CheckContext(tmp_path, script=script))
    outcome = run_item("checklist.clip", run)
    assert outcome.status == status and words in outcome.evidence[0]
    if status == "warn":
        assert "0.5" in outcome.fix and "1.0" not in outcome.fix


def test_a_script_that_checks_itself_is_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("import stepguard\nstepguard.watch(model, opt)\n")
    monkeypatch.setattr(
        sys.modules["__main__"], "__file__", str(tmp_path / "train.py"), raising=False
    )
    with inside(tmp_path):
        result = check(Subject(model=nn.Linear(2, 2)), only=["checklist.norms"])
    assert result.outcome("checklist.norms").status == "pass"


SETTINGS = "import stepguard\ng = stepguard.Guard(m, o, config=stepguard.GuardConfig({}))\n"


@pytest.mark.parametrize(
    ("given", "clip", "checkpoints", "recovery"),
    [
        (
            'clip_norm=0.4, checkpoint_every=20, run_dir="runs"',
            "GuardConfig.clip_norm=0.4 at train.py:2",
            "GuardConfig.checkpoint_every=20 at train.py:2: a crash costs at most 20 steps",
            "skip, rewind, stop, checkpoints below runs",
        ),
        (
            "clip_norm=args.clip, checkpoint_every=args.every, run_dir=args.out",
            "the program clips at train.py:2, to a norm that is not written there as a number",
            "return `guard`: its checkpoint_every is not written as a number at train.py:2",
            "skip, rewind, stop, checkpoints below its run_dir (train.py:2)",
        ),
        (
            "clip_norm=None",
            "no clipping norm is configured, and the program clips nowhere",
            "give --config FILE, or return `guard`",
            "without a run_dir nothing survives the process",
        ),
        (
            'policy=stepguard.Policy(actions=("skip", "stop"))',
            "no clipping norm is configured, and the program clips nowhere",
            "give --config FILE, or return `guard`",
            "the policy is skip, stop, without rewind",
        ),
    ],
    ids=["numbers", "computed", "off", "policy"],
)
def test_settings_of_a_guard_are_those_that_the_program_writes(
    tmp_path: Path, given: str, clip: str, checkpoints: str, recovery: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SETTINGS.format(given))
    run = Inspection(Subject(model=nn.Linear(2, 2)), CheckContext(tmp_path, script=script))
    items = ("checklist.clip", "checklist.checkpoints", "checklist.recovery")
    said = [" ".join(run_item(item, run).evidence) for item in items]

    assert clip in said[0]
    assert checkpoints in said[1]
    assert recovery in said[2]


def test_precision_of_a_program_that_opens_autocast_is_not_guessed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("with torch.autocast('cpu'):\n    loss = f(x)\n")
    model, context = nn.Linear(2, 2), CheckContext(tmp_path, script=script)
    unseen = Inspection(Subject(model=model), context)
    assert run_item("precision.effective", unseen).status == "not_checked"
    assert run_item("scaler.missing", unseen).status == "not_checked"

    batch = torch.ones(1, 2)
    seen = Inspection(Subject(model=model, batch=batch, loss_fn=lambda x: model(x).sum()), context)
    (said,) = run_item("precision.effective", seen).evidence
    assert said.endswith("came out as float32; autocast at train.py:1 did not change it")

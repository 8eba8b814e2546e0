"""What is not imported, seen from a fresh interpreter: commands that only read start at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from house.fresh import FRAMEWORKS, HEAVY, run_cli, run_code
from stepguard.journal import Journal
from stepguard.records import Decision, Finding, Incident, Origin, Reading, Verdict


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with one incident in its journal."""
    reading = Reading(step=2, loss=float("nan"), micro_losses=(float("nan"),), lr=(0.1,))
    incident = Incident(
        id="i0",
        step=2,
        verdict=Verdict(kind="nonfinite_loss", severity="incident", summary="loss is nan"),
        reading=reading,
        origin=Origin(
            step=2, phase="forward", module="attn", op="aten._softmax", source="model.py:88"
        ),
        findings=(
            Finding(code="SG204", title="softmax over a fully masked row", certainty="certain"),
        ),
        decision=Decision(action="skip", consecutive=1, total=1),
    )
    journal = Journal(tmp_path / "run")
    journal.write("run", {"stepguard": "0"})
    for step in range(2):
        journal.step(Reading(step=step, loss=1.0 / (step + 1), lr=(0.1,)), committed=True)
    journal.step(reading, committed=False)
    journal.incident(incident)
    journal.close()
    return tmp_path / "run"


def test_import_brings_no_torch_and_no_framework(tmp_path: Path) -> None:
    seen = run_code(tmp_path, "import stepguard; stepguard.__version__; stepguard.TrainingHalted")
    assert "stepguard" in seen.modules
    assert seen.modules & (FRAMEWORKS | HEAVY) == frozenset()


def test_records_and_journal_bring_no_torch(tmp_path: Path) -> None:
    seen = run_code(
        tmp_path,
        "import stepguard.records, stepguard.judge.decide, stepguard.journal",
    )
    assert seen.modules & (FRAMEWORKS | HEAVY) == frozenset()


def test_guard_brings_torch_and_no_framework(tmp_path: Path) -> None:
    seen = run_code(tmp_path, "from stepguard import Guard, watch")
    assert "torch" in seen.modules
    assert seen.modules & FRAMEWORKS == frozenset()


def test_help_starts_without_torch(tmp_path: Path) -> None:
    seen = run_cli(tmp_path, "--help")
    assert seen.code == 0, seen.stderr
    assert "report" in seen.stdout and "explain" in seen.stdout
    assert seen.modules & (FRAMEWORKS | HEAVY) == frozenset()


def test_explain_starts_without_torch(tmp_path: Path) -> None:
    seen = run_cli(tmp_path, "explain", "SG204")
    assert seen.code == 0, seen.stderr
    assert "SG204" in seen.stdout
    assert seen.modules & (FRAMEWORKS | HEAVY) == frozenset()


def test_report_starts_without_torch(tmp_path: Path, run_dir: Path) -> None:
    seen = run_cli(tmp_path, "report", str(run_dir))
    assert seen.code == 0, seen.stderr
    assert "SG204" in seen.stdout
    assert "torch" not in seen.modules


def test_report_as_json_starts_without_torch(tmp_path: Path, run_dir: Path) -> None:
    seen = run_cli(tmp_path, "report", str(run_dir), "--json")
    assert seen.code == 0, seen.stderr
    assert "SG204" in seen.stdout
    # the columns of a story are numpy's
    assert seen.modules & (FRAMEWORKS | HEAVY) <= {"numpy"}


def test_import_of_torch_would_be_caught(tmp_path: Path) -> None:
    assert "torch" in run_code(tmp_path, "import torch").modules


def test_import_of_a_framework_would_be_caught_even_if_it_may_fail(tmp_path: Path) -> None:
    code = "try:\n    import transformers.trainer\nexcept ImportError:\n    pass"
    assert run_code(tmp_path, code).modules & FRAMEWORKS == {"transformers"}


def test_exit_code_of_the_program_is_seen(tmp_path: Path) -> None:
    assert run_code(tmp_path, "import sys; sys.exit(3)").code == 3


KINDS = {
    "guard": "stepguard.Guard(model, optimizer, config=config)",
    "watch": "stepguard.watch(model, optimizer, config=config)",
}
UNMOVED = """
import math, random
import numpy, torch
from torch import nn

model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters())


def states():
    kind, keys, position, *gauss = numpy.random.get_state()
    return random.getstate(), (keys.tolist(), position, gauss), torch.get_rng_state().tolist()


def moved(what):
    now = states()
    print(what, [name for name, a, b in zip(("random", "numpy", "torch"), before, now) if a != b])


before = states()
import stepguard
config = stepguard.GuardConfig({settings})
guard = {build}
moved("built")
for x in (torch.ones(4, 3), torch.full((4, 3), math.nan)):
    if {watched}:
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
    else:
        guard.step(lambda x: model(x).pow(2).mean(), x)
    moved("stepped")
moved(f"told of {{len(guard.incidents)}} incident")
guard.close()
moved("closed")
"""


@pytest.mark.parametrize(
    "settings", ["", "run_dir='run', human_log='log', checkpoint_every=1"], ids=["bare", "files"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_guard_draws_from_no_random_generator_of_the_program(
    tmp_path: Path, kind: str, settings: str
) -> None:
    code = UNMOVED.format(build=KINDS[kind], watched=kind == "watch", settings=settings)
    (tmp_path / "train.py").write_text(code)
    seen = run_code(tmp_path, "import runpy; runpy.run_path('train.py')")
    assert "stepguard" in seen.stderr  # a panel was printed
    words = ["built", "stepped", "stepped", "told of 1 incident", "closed"]
    assert seen.stdout.splitlines() == [f"{word} []" for word in words]


WARNING = """
import math, warnings
import torch
from torch import nn
import stepguard

model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def loss(x):
    warnings.warn("said once a run")
    return model(x).pow(2).mean()


with stepguard.Guard(model, optimizer) as guard:
    for step in range(6):
        guard.step(loss, torch.full((4, 3), math.nan if step % 2 else 1.0))
print(len(guard.incidents))
"""


def test_a_warning_shown_once_is_not_shown_again_after_an_incident(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WARNING)
    seen = run_code(tmp_path, "import runpy; runpy.run_path('train.py')")
    assert seen.stderr.count("UserWarning: said once a run") == 1
    assert seen.stdout.split() == ["3"]

"""A fresh interpreter and a notebook's kernel: what is not imported, and that a guard draws from no
generator of the program.
"""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

import forked
import stepguard
from forked import FULL
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
    names = "import stepguard.records, stepguard.judge.decide, stepguard.journal"
    seen = run_code(tmp_path, f"{names}; stepguard.__version__; stepguard.TrainingHalted")
    assert "stepguard" in seen.modules
    assert seen.modules & (FRAMEWORKS | HEAVY) == frozenset()


def test_guard_brings_torch_and_no_framework(tmp_path: Path) -> None:
    seen = run_code(tmp_path, "from stepguard import Guard, watch")
    assert "torch" in seen.modules
    assert seen.modules & FRAMEWORKS == frozenset()


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--help"], "report"), (["explain", "SG204"], "SG204")],
    ids=["help", "explain"],
)
def test_command_that_reads_no_run_starts_without_torch(
    tmp_path: Path, words: list[str], said: str
) -> None:
    seen = run_cli(tmp_path, *words)
    assert seen.code == 0, seen.stderr
    assert said in seen.stdout
    assert seen.modules & (FRAMEWORKS | HEAVY) == frozenset()


@pytest.mark.parametrize("words", [[], ["--json"]], ids=["text", "json"])
def test_report_starts_without_torch(tmp_path: Path, run_dir: Path, words: list[str]) -> None:
    seen = run_cli(tmp_path, "report", str(run_dir), *words)
    assert seen.code == 0, seen.stderr
    assert "SG204" in seen.stdout
    # the columns of a story are numpy's
    assert not words or seen.modules & (FRAMEWORKS | HEAVY) <= {"numpy"}
    assert "torch" not in seen.modules


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


FILES = "run_dir='run', human_log='log', checkpoint_every=1"


@pytest.mark.parametrize(
    ("kind", "settings"),
    [*product(KINDS, ("", FILES))] if FULL else [("watch", FILES)],
    ids=lambda value: value if value in KINDS else "files" if value else "bare",
)
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
    seen = forked.python(["train.py"], folder=tmp_path)
    assert seen.stderr.count("UserWarning: said once a run") == 1
    assert seen.stdout.split() == ["3"]


SETUP = """
import torch, stepguard
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
"""
WATCH = """
none = stepguard.Snapshots(count=0)
guard = stepguard.watch(
    model, optimizer, config=stepguard.GuardConfig(run_dir="run_cells", snapshots=none)
)
"""
LOOP = """
def loss_fn(batch):
    ratio = model(batch).square() / batch[:, :1]
    return ratio.mean()

for step in range(4):
    batch = torch.ones(4, 3)
    if step == 2:
        batch[1, 0] = 0.0
    optimizer.zero_grad()
    guard.loss(loss_fn, batch).backward()
    optimizer.step()
"""
HOOKS = "print(len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks))"


def run_cells(folder: Path, *cells: str) -> list[Any]:
    """The outputs of each cell."""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    os.environ["PYTHONPATH"] = str(Path(stepguard.__file__).parents[1])
    client = NotebookClient(
        book, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    nbformat.write(book, folder / "executed.ipynb")
    return [cell.outputs for cell in book.cells]


def texts(outputs: Any) -> str:
    return "".join(output.get("text", "") for output in outputs)


@pytest.fixture
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.process
@pytest.mark.usefixtures("_environment")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore:Proactor event loop:RuntimeWarning")
def test_a_notebook_names_its_cells_shows_records_and_replaces_the_guard_of_a_cell_run_again(
    tmp_path: Path,
) -> None:
    cells = [SETUP, WATCH, HOOKS, WATCH, HOOKS, LOOP]
    shown = ["guard", "guard.incidents[0]", "guard.incidents[0].origin", "print(guard)"]
    outputs = run_cells(tmp_path, *cells, *shown)
    first, second = texts(outputs[2]), texts(outputs[4])
    assert first == second != "", "a cell that runs again puts no second pair of hooks"
    assert "a new one was built" in texts(outputs[3])
    panel = texts(outputs[5])
    assert "cell [6], line 2" in panel
    assert "ipykernel" not in panel
    assert "stepguard explain SG201" in panel
    assert "stepguard replay" not in panel, "nothing names a program to run_cells the capsule with"
    for number, words in ((6, "1 incident"), (7, "cell [6], line 2"), (8, "batch[:, :1]")):
        data = outputs[number][0]["data"]
        assert words in data["text/html"], data
        assert len(data["text/plain"]) < 400
    assert texts(outputs[9]).startswith("<Guard of ")


@pytest.mark.process
@pytest.mark.documented
@pytest.mark.usefixtures("_environment")
def test_the_quickstart_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    book = nbformat.read(Path(__file__).parents[2] / "examples" / "quickstart.ipynb", 4)
    shown = run_cells(tmp_path, *(cell.source for cell in book.cells if cell.cell_type == "code"))
    assert "unguarded: nan" in texts(shown[2])
    assert "guarded: 1." in texts(shown[3])
    assert "aten.div" in texts(shown[5])
    assert "SG201" in texts(shown[5])
    assert "tensor([0., 0., 0.," in shown[6][0]["data"]["text/plain"]
    assert "1 skipped" in texts(shown[7])

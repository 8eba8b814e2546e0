"""stepguard in a notebook, run headless by a real kernel."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

import stepguard

pytestmark = pytest.mark.process

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
    model, optimizer, config=stepguard.GuardConfig(run_dir="run", snapshots=none)
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


def run(folder: Path, *cells: str) -> list[Any]:
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


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore:Proactor event loop:RuntimeWarning")
def test_a_notebook_names_its_cells_shows_records_and_replaces_the_guard_of_a_cell_run_again(
    tmp_path: Path,
) -> None:
    cells = [SETUP, WATCH, HOOKS, WATCH, HOOKS, LOOP]
    shown = ["guard", "guard.incidents[0]", "guard.incidents[0].origin", "print(guard)"]
    outputs = run(tmp_path, *cells, *shown)
    first, second = texts(outputs[2]), texts(outputs[4])
    assert first == second != "", "a cell that runs again puts no second pair of hooks"
    assert "this guard ends here" in texts(outputs[3])
    panel = texts(outputs[5])
    assert "cell [6], line 2" in panel
    assert "ipykernel" not in panel
    assert "stepguard explain SG201" in panel
    assert "stepguard replay" not in panel, "nothing names a program to run the capsule with"
    for number, words in ((6, "1 incident"), (7, "cell [6], line 2"), (8, "batch[:, :1]")):
        data = outputs[number][0]["data"]
        assert words in data["text/html"], data
        assert len(data["text/plain"]) < 400
    assert texts(outputs[9]).startswith("<Guard of ")


def test_the_quickstart_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    book = nbformat.read(Path(__file__).parents[2] / "examples" / "quickstart.ipynb", 4)
    shown = run(tmp_path, *(cell.source for cell in book.cells if cell.cell_type == "code"))
    assert "unguarded: nan" in texts(shown[2])
    assert "guarded: 1." in texts(shown[3])
    assert "aten.div" in texts(shown[5])
    assert "SG201" in texts(shown[5])
    assert "tensor([0., 0., 0.," in shown[6][0]["data"]["text/plain"]
    assert "1 skipped" in texts(shown[7])

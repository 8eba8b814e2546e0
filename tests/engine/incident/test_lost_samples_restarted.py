"""Bad samples of fused and watched loops, of runs that are started again, and of batches that
cannot be cut.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import stepguard
from engine.incident.test_lost_samples import (
    BAD_SHARD,
    BATCH,
    LOOPS,
    ROWS,
    Rows,
    built,
    config,
    loader,
    moved,
    train,
)
from stepguard import Guard, Policy
from stepguard.engine.incident.samples import known_bad
from stepguard.ledger import ledger_path

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("loop", LOOPS)
def test_fused_step_that_is_read_one_step_late_names_its_own_rows(
    loop: str, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    with Guard(model, optimizer, loader=loader(17), config=config(tmp_path)) as guard:
        train(guard, lambda batch: (model(batch["x"]) - batch["y"]).pow(2).mean(), LOOPS[loop])
        (incident,) = guard.incidents
    (entry,) = known_bad(tmp_path)
    assert entry.indices == (17,) and entry.batch == incident.step


def test_watched_loop_that_moves_its_batches_has_its_losses_on_record(tmp_path: Path) -> None:
    guard, loss_fn = built(loader(17, shuffle=False), config(tmp_path), stepguard.watch)
    with guard:
        for batch in guard.loader:
            guard.optimizer.zero_grad()
            loss_fn(moved(batch)[0]).backward()
            guard.optimizer.step()
    (entry,) = known_bad(tmp_path)
    assert entry.batch == 2 and entry.indices is not None and 17 in entry.indices


def test_run_that_stops_at_bad_data_gets_past_it_when_started_again(tmp_path: Path) -> None:
    ends = []
    for start in range(3):
        guard, loss_fn = built(
            loader(*BAD_SHARD, shuffle=False),
            config(tmp_path, policy=Policy(actions=("stop",)), checkpoint_every=1),
        )
        with guard:
            if start:
                guard.restore(next((tmp_path / "checkpoints").glob("step-*1")))
            try:
                for batch in guard.loader:
                    guard.step(loss_fn, batch)
                    if guard.steps == 1 and not start:
                        guard.save()
                ends.append("end")
            except stepguard.TrainingHalted:
                ends.append(f"batch {guard.loader.delivered - 1}")
    assert ends == ["batch 2", "batch 3", "end"]


def test_stored_damage_is_not_held_against_the_batch(tmp_path: Path) -> None:
    guard, loss_fn = built(loader(shuffle=False), config(tmp_path))
    with guard:
        for batch in guard.loader:
            guard.step(loss_fn, batch)
            if guard.steps == 5:
                with torch.no_grad():
                    next(guard.model.parameters())[0, 0] = math.nan
        assert guard.incidents
    assert not ledger_path(tmp_path).exists()


def test_node_of_a_graph_is_not_cut_out_of_it() -> None:
    """Without one node all edges behind it would join others: the whole step is left out."""
    torch.manual_seed(1)
    model = nn.Linear(2, 1)
    x, edges = torch.randn(6, 2), torch.tensor([[0, 1, 2, 0], [1, 2, 0, 2]])
    x[4, 0] = math.nan
    weights = {name: value.clone() for name, value in model.state_dict().items()}

    def loss_fn(graph: dict[str, Tensor]) -> Tensor:
        hidden = model(graph["x"])
        return (hidden[graph["edges"][0]] - hidden[graph["edges"][1]]).pow(2).mean() + hidden.pow(
            2
        ).mean()

    with Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), config=config(None)) as guard:
        result = guard.step(loss_fn, {"x": x, "edges": edges, "y": torch.randn(6, 1)})
        assert result.incident is not None and result.incident.decision is not None
        assert not result.committed and result.incident.decision.action == "skip"
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_loop_that_trains_on_other_samples_gets_no_rows_named(tmp_path: Path) -> None:
    """A replay buffer, say: as many batches and as many rows as the loader delivers, but others."""
    guard, loss_fn = built(loader(shuffle=False), config(tmp_path))
    other = Rows((5,))
    with guard:
        for number, _ in enumerate(guard.loader):
            rows = slice(BATCH * number, BATCH * (number + 1))
            guard.step(loss_fn, {"x": other.x[rows] + 0.5, "y": other.y[rows] - 1})
        (incident,) = guard.incidents
    assert (
        incident.origin is not None
        and incident.origin.samples == (5,)
        and incident.origin.rows == ()
    )
    assert known_bad(tmp_path)[0].indices is None and known_bad(tmp_path)[0].batch is None


SHUFFLED: dict[str, Callable[[], Any]] = {
    "plain": lambda: DataLoader(Rows((17,)), BATCH, shuffle=True),
    "workers": lambda: DataLoader(Rows((17,)), BATCH, shuffle=True, num_workers=2),
    "generator": lambda: DataLoader(
        Rows((17,)), BATCH, shuffle=True, generator=torch.Generator().manual_seed(8)
    ),
    "stateful": lambda: StatefulDataLoader(Rows((17,)), BATCH, shuffle=True),
    "stateful, workers": lambda: StatefulDataLoader(
        Rows((17,)), BATCH, shuffle=True, num_workers=2
    ),
}


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@pytest.mark.parametrize("kind", SHUFFLED)
def test_shuffled_batch_is_known_again_after_a_restart(kind: str, tmp_path: Path) -> None:
    seen: list[str] = []
    for start in range(2):
        guard, loss_fn = built(
            SHUFFLED[kind](), config(tmp_path, policy=Policy(actions=("skip", "stop")))
        )
        torch.manual_seed(6 + start)
        with guard:
            if start:
                guard.restore()
            for batch in guard.loader:
                seen += batch["file"] if start else []
                guard.step(loss_fn, batch)
                if guard.steps == 1 and not start:
                    assert guard.save() is not None
            assert len(guard.incidents) == 1 - start
    del guard
    gc.collect()  # workers end with their loader
    (entry,) = known_bad(tmp_path)
    assert entry.batch and "images/17.png" not in seen and len(seen) == ROWS - 2 * BATCH

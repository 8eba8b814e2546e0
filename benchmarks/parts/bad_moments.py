"""Moments in which a training goes wrong: bad batches, divergence, damaged state, a bad shard, a
full disk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from zoo.healthy.data import CLASSES, FEATURES, Clouds

STEPS, AT = 600, 300
"""Batches of a run, and the one at which something happens."""
ROWS, LR = 32, 3e-3
BAD_SHARD = 150
"""Batches of a shard that is bad from end to end: more than half of what a guard looks back on."""

Kind = Literal["plain", "batchnorm", "running tensor"]
Batch = tuple[Tensor, Tensor, Tensor]
"""Points, classes, and how much each row counts."""


class Net(nn.Module):
    """Two layers; on demand BatchNorm between them, or a running mean of the inputs as a plain
    tensor, no buffer.
    """

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 24), nn.Linear(24, CLASSES)
        self.norm = nn.BatchNorm1d(24) if kind == "batchnorm" else nn.Identity()
        self.kind, self.usual = kind, torch.zeros(FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "running tensor":
            if self.training:
                self.usual = 0.99 * self.usual + 0.01 * x.detach().mean(0)
            x = x - self.usual
        return self.last(torch.relu(self.norm(self.first(x))))


class Normed(Optimizer):
    """LARS in small: an update as long as the weights, in the direction of the gradient. Without
    one it is 0 / 0.
    """

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                trust = (weight.norm() + 0.1) / weight.grad.norm()
                weight.add_(weight.grad * trust, alpha=-group["lr"])


@dataclass(slots=True)
class Run:
    """One training with its data; every strategy sees the same batches in the same order."""

    seed: int
    model: Net
    optimizer: Optimizer
    clouds: Clouds
    moment: Moment
    batches: list[Batch] = field(default_factory=list)

    def loss(self, batch: Batch) -> Tensor:
        x, y, counts = batch
        each = F.cross_entropy(self.model(x), y, reduction="none")
        return (each * counts).sum() / counts.sum().clamp(min=1)

    def batch(self, step: int) -> Batch:
        """A copy: what a loop does to its batch stays with it."""
        x, y, counts = (part.clone() for part in self.batches[step])
        return self.moment.spoil((x, y, counts), step)

    @torch.no_grad()
    def held_out(self) -> float:
        """The loss on the same fresh points for everybody; infinite where it is not a number."""
        fresh = Clouds(self.seed, noise=NOISE)
        fresh.generator.manual_seed(self.seed + 5000)
        self.model.eval()
        found = float(self.loss((*fresh.batch(2048), torch.ones(2048))))
        self.model.train()
        return found if found == found else float("inf")


NOISE = 2.0
"""So much that the classes overlap: what is left of the loss at the end is theirs, not the run's.
"""


def _unspoiled(batch: Batch, step: int) -> Batch:
    return batch


def _no_harm(run: Run) -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What goes wrong, and whether the guard is asked to act on finite anomalies."""

    name: str
    spoil: Callable[[Batch, int], Batch] = _unspoiled
    """Of a batch and its step: the batch as it comes from the disk."""
    harm: Callable[[Run], None] = _no_harm
    """Happens once, before step `AT`."""
    acts: bool = False
    """Needs `Probes(anomalies="act")`: everything stays finite."""
    optimizer: Callable[[Any], Optimizer] = lambda params: torch.optim.AdamW(params, lr=LR)
    kind: Kind = "plain"
    """What the model has besides its two layers."""
    restarts: int = 0
    """How often the launcher starts a run again that ended, from its newest checkpoint."""
    full_disk: bool = False
    """The folder of the run takes nothing more from step `AT` on."""


def begin(moment: Moment, seed: int, steps: int) -> Run:
    torch.manual_seed(seed)
    model, clouds = Net(moment.kind), Clouds(seed, noise=NOISE)
    run = Run(seed, model, moment.optimizer(model.parameters()), clouds, moment)
    run.batches = [(*clouds.batch(ROWS), torch.ones(ROWS)) for _ in range(steps)]
    return run


# --- the moments
# --------------------------------------------------------------------------------------------------


def _bad_from(first: int, count: int) -> Callable[[Batch, int], Batch]:
    def spoil(batch: Batch, step: int) -> Batch:
        if first <= step < first + count:
            batch[0].fill_(torch.nan)
        return batch

    return spoil


def _scattered(batch: Batch, step: int) -> Batch:
    if step % 20 == 7:
        batch[0][step % ROWS, 3] = torch.nan
    return batch


def _enormous(batch: Batch, step: int) -> Batch:
    """One batch of other units: finite, and one update from it is enough."""
    if step == AT:
        batch[2].fill_(1.0)
        batch[0].mul_(1e4)
    return batch


def _nothing_counts(batch: Batch, step: int) -> Batch:
    if step == AT:
        batch[2].zero_()
    return batch


def _rate_jumps(run: Run) -> None:
    for group in run.optimizer.param_groups:
        group["lr"] *= 1000


@torch.no_grad()
def _weight(value: float, run: Run) -> None:
    run.model.last.weight[3, 5] = value


@torch.no_grad()
def _moment_lost(run: Run) -> None:
    run.optimizer.state[run.model.first.weight]["exp_avg_sq"][2, 2] = torch.nan


@torch.no_grad()
def _moments_zero(run: Run) -> None:
    for state in run.optimizer.state.values():
        state["exp_avg_sq"].zero_()


@torch.no_grad()
def _statistics(run: Run) -> None:
    run.model.get_buffer("norm.running_var")[1] = torch.nan


def _attribute(run: Run) -> None:
    run.model.usual[2] = torch.nan


def _sgd(params: Any) -> Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


MOMENTS: tuple[Moment, ...] = (
    *(
        Moment(name=f"{count} bad batches in a row", spoil=_bad_from(AT, count))
        for count in (1, 4, 16, 64)
    ),
    Moment(name="5 % of the batches bad", spoil=_scattered),
    Moment(name="bad batches through BatchNorm", spoil=_bad_from(AT, 4), kind="batchnorm"),
    Moment(
        name="bad batch through a running tensor", spoil=_bad_from(AT, 1), kind="running tensor"
    ),
    Moment(name="learning rate x1000", harm=_rate_jumps, acts=True),
    Moment(name="one batch ruins the weights", spoil=_enormous, optimizer=_sgd, acts=True),
    Moment(name="Adam's second moments lost", harm=_moments_zero, acts=True),
    Moment(name="NaN in a weight", harm=lambda run: _weight(float("nan"), run)),
    Moment(name="huge weight", harm=lambda run: _weight(1e20, run), acts=True),
    Moment(name="NaN in an Adam moment", harm=_moment_lost),
    Moment(name="NaN in a running variance", harm=_statistics, kind="batchnorm"),
    Moment(name="NaN in a tensor that is no buffer", harm=_attribute, kind="running tensor"),
    Moment(
        name="NaN made by the optimizer",
        spoil=_nothing_counts,
        optimizer=lambda p: Normed(p, lr=0.01),
    ),
    Moment(name="bad shard, restarted", spoil=_bad_from(AT, BAD_SHARD), restarts=5),
    Moment(name="disk full, then bad batches", spoil=_bad_from(AT + 20, 4), full_disk=True),
)

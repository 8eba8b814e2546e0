"""Trainings that are healthy for 40 steps and then fail in a way whose cure is known beforehand.

`right` are the candidates of `guard.whatif()` that take the planted cause away; they were written
down before any trial was run. The order of the candidates was corrected after a first run of
`PLANTED`; `FRESH` was written after that, and nothing was changed by what it showed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import stepguard

FAILS = 40
STEPS = 60
RATES = frozenset({"keep lr", "lr x0.1"})

Batch = dict[str, Any]
Loss = Callable[[Batch], Tensor]


@dataclass(slots=True)
class Training:
    """One run, ready for `guard.step`."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Loss
    batch: Callable[[int], Batch]
    before_step: Callable[[int], None] = lambda step: None


@dataclass(frozen=True, slots=True)
class Planted:
    """A cause, and what cures it."""

    name: str
    right: frozenset[str]
    build: Callable[[int], Training]
    incidents: int = 1
    """After how many the run is asked: a cause that stays shows itself by the second."""


def regression(seed: int, *, wide: int = 16) -> tuple[nn.Module, Callable[[int], Batch]]:
    """A net that learns a linear map, and its batches."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, wide), nn.ReLU(), nn.Linear(wide, 3))
    target = torch.randn(6, 3)

    def batch(step: int) -> Batch:
        source = torch.Generator().manual_seed(1000 * seed + step)
        x = torch.randn(8, 6, generator=source)
        return {"x": x, "y": x @ target, "w": torch.ones(8), "step": step}

    return model, batch


def squared(model: nn.Module) -> Loss:
    return lambda batch: (model(batch["x"]) - batch["y"]).square().mean()


def nan_in_a_sample(seed: int) -> Training:
    model, clean = regression(seed)

    def batch(step: int) -> Batch:
        given = clean(step)
        if step == FAILS:
            given["x"][3, 2] = float("nan")
        return given

    return Training(model, torch.optim.Adam(model.parameters(), lr=0.01), squared(model), batch)


def weight_of_zero(seed: int) -> Training:
    """A sample whose weight is 0 divides the loss by 0."""
    model, clean = regression(seed)

    def batch(step: int) -> Batch:
        given = clean(step)
        if step == FAILS:
            given["w"][5] = 0.0
        return given

    def loss(given: Batch) -> Tensor:
        each = (model(given["x"]) - given["y"]).square().mean(dim=1)
        return (each / given["w"]).mean()

    return Training(model, torch.optim.AdamW(model.parameters(), lr=0.01), loss, batch)


def rate_jumps(seed: int) -> Training:
    """The loop sets eight times the learning rate, as a schedule of a wrong resume does."""
    model, batch = regression(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def before(step: int) -> None:
        if step == FAILS:
            optimizer.param_groups[0]["lr"] = 0.6

    return Training(model, optimizer, squared(model), batch, before)


def warmup_never_ends(seed: int) -> Training:
    """The rate grows by a third in each step."""
    model, batch = regression(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)

    def before(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 0.02 * 1.33 ** max(0, step - 24)

    return Training(model, optimizer, squared(model), batch, before)


def epsilon_of_zero(seed: int) -> Training:
    """A head that joins later has gradients of 0 in places, and Adam divides by their root."""
    model, clean = regression(seed)
    head = nn.Linear(6, 3, bias=False)
    both = nn.ModuleDict({"body": model, "head": head})
    optimizer = torch.optim.Adam(both.parameters(), lr=0.01, eps=0.0)

    def loss(given: Batch) -> Tensor:
        out = model(given["x"])
        if given["step"] >= FAILS:
            seen = given["x"].clone()
            seen[:, 4:] = 0.0
            out = out + 0.01 * head(seen)
        return (out - given["y"]).square().mean()

    return Training(both, optimizer, loss, clean)


class Squash(nn.Module):
    """Divides by what it has multiplied with: harmless, but for the range of float16."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.gain = 1.0

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs) * self.gain / self.gain


def half_precision_overflows(seed: int) -> Training:
    model, batch = regression(seed)
    assert isinstance(model, nn.Sequential)
    squash = Squash()
    model.insert(2, squash)

    def loss(given: Batch) -> Tensor:
        squash.gain = 1.0 if given["step"] < FAILS else 6e5
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(given["x"])
        return (out.float() - given["y"]).square().mean()

    return Training(model, torch.optim.Adam(model.parameters(), lr=0.01), loss, batch)


def one_huge_batch(seed: int) -> Training:
    """One batch in another unit makes one update that the weights do not recover from."""
    model, clean = regression(seed)

    def batch(step: int) -> Batch:
        given = clean(step)
        if step == FAILS:
            given["y"] = given["y"] * 1e5
        return given

    return Training(model, torch.optim.SGD(model.parameters(), lr=0.05), squared(model), batch)


def happens_once(seed: int) -> Training:
    """A fault of the machine: the same step is fine when it is run again."""
    model, batch = regression(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    fired: list[int] = []

    def loss(given: Batch) -> Tensor:
        value = squared(model)(given)
        if given["step"] == FAILS and not _once.get(id(fired)):
            _once[id(fired)] = True
            return value * float("nan")
        return value

    return Training(model, optimizer, loss, batch)


_once: dict[int, bool] = {}
"""Out of reach of what a replay puts back, as the state of a machine is."""

PLANTED = (
    Planted("NaN in one sample", frozenset({"leave out"}), nan_in_a_sample),
    Planted("one sample weighs 0", frozenset({"leave out"}), weight_of_zero),
    Planted("learning rate jumps", RATES, rate_jumps),
    Planted("warm-up never ends", RATES, warmup_never_ends),
    Planted("Adam with eps 0", frozenset({"eps"}), epsilon_of_zero, 2),
    Planted(
        "float16 overflows in a module",
        frozenset({"wider module", "float32"}),
        half_precision_overflows,
        2,
    ),
    Planted("one huge batch", frozenset({"clip", "skip", "leave out"}), one_huge_batch),
    Planted("happens once", frozenset({"nothing"}), happens_once),
)


def negative_count(seed: int) -> Training:
    """One sample's target is negative, and the loss takes its logarithm."""
    model, clean = regression(seed)

    def batch(step: int) -> Batch:
        given = clean(step)
        given["y"] = given["y"].abs()
        if step == FAILS:
            given["y"][2, 1] = -3.0
        return given

    def loss(given: Batch) -> Tensor:
        return (model(given["x"]) - torch.log1p(given["y"])).square().mean()

    return Training(model, torch.optim.Adam(model.parameters(), lr=0.01), loss, batch)


def adam_rate_a_thousandfold(seed: int) -> Training:
    model, batch = regression(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)

    def before(step: int) -> None:
        if step == FAILS:
            optimizer.param_groups[0]["lr"] = 3.0

    return Training(model, optimizer, squared(model), batch, before)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(9, 3)
        with torch.no_grad():
            self.cell.weight.mul_(0.5)

    def forward(self, inputs: Tensor, length: int) -> Tensor:
        state = inputs.new_zeros(len(inputs), 3)
        for _ in range(length):
            state = state + self.cell(torch.cat([inputs, state], dim=1))
        return state


def long_sequence(seed: int) -> Training:
    """One batch of sequences six times as long has gradients that explode."""
    model, clean = regression(seed)
    model = Recurrent()

    def loss(given: Batch) -> Tensor:
        length = 24 if given["step"] == FAILS else 4
        return (model(given["x"], length) - given["y"]).square().mean()

    return Training(model, torch.optim.SGD(model.parameters(), lr=0.01), loss, clean)


def rmsprop_without_epsilon(seed: int) -> Training:
    """An embedding is used from step 40 on, and most of its rows have a gradient of 0."""
    model, clean = regression(seed)
    table = nn.Embedding(10, 6)
    both = nn.ModuleDict({"body": model, "table": table})
    optimizer = torch.optim.RMSprop(both.parameters(), lr=0.003, eps=0.0)

    def loss(given: Batch) -> Tensor:
        inputs = given["x"]
        if given["step"] >= FAILS:
            inputs = inputs + 0.1 * table(torch.arange(8) % 4)
        return (model(inputs) - given["y"]).square().mean()

    return Training(both, optimizer, loss, clean)


class Exponential(nn.Module):
    """Its exponentials pass the range of float16 once the inputs grow a little."""

    def forward(self, inputs: Tensor, shift: float) -> Tensor:
        grown = torch.exp(inputs.half() * 0.1 + shift)
        return torch.log(grown + 1.0)


def exponentials_in_half(seed: int) -> Training:
    model, clean = regression(seed)
    squeeze = Exponential()
    both = nn.ModuleDict({"body": model, "squeeze": squeeze})

    def loss(given: Batch) -> Tensor:
        shift = 1.0 if given["step"] < FAILS else 12.0
        out = model(given["x"])
        return (squeeze(out, shift).float() - shift - given["y"]).square().mean()

    return Training(both, torch.optim.Adam(both.parameters(), lr=0.01), loss, clean)


FRESH = (
    Planted("a negative count", frozenset({"leave out"}), negative_count),
    Planted("Adam's rate x1000", RATES, adam_rate_a_thousandfold),
    Planted("one long sequence", frozenset({"clip", "skip"}), long_sequence),
    Planted("RMSprop with eps 0", frozenset({"eps"}), rmsprop_without_epsilon, 2),
    Planted(
        "exponentials in float16",
        frozenset({"wider module", "float32"}),
        exponentials_in_half,
        2,
    ),
)


def run(training: Training, incidents: int, later: int = 0) -> stepguard.Guard:
    """Train until there were so many incidents and `later` steps after them, or to the end."""
    config = stepguard.GuardConfig(terminal="quiet", probes=stepguard.Probes(look_every=None))
    guard = stepguard.Guard(training.model, training.optimizer, config=config)
    try:
        for step in range(STEPS):
            training.before_step(step)
            guard.step(training.loss, training.batch(step))
            if len(guard.incidents) >= incidents:
                later -= 1
                if later < 0:
                    break
    except stepguard.TrainingHalted:
        pass
    return guard

"""When a silent failure is told that no look can see."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn

import stepguard
from engine.parts import each
from stepguard import GuardConfig, Probes
from stepguard.diagnose.rules.sg900 import SG912_IN_A_ROW
from stepguard.journal import read_run

Schedule = torch.optim.lr_scheduler.LRScheduler


def told(
    folder: Path, loop: Callable[[Schedule, int], None], steps: int = SG912_IN_A_ROW
) -> list[str]:
    """Codes that a watched run with a schedule was told; `loop` is called after every update."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    config = GuardConfig(run_dir=folder, probes=Probes(look_every=None), terminal="quiet")
    with stepguard.watch(model, optimizer, scheduler=schedule, config=config):
        for step in range(steps):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            loop(schedule, step)
    notes = read_run(folder).notes
    return [str(note["code"]) for note in notes if note.get("kind") == "silent"]


def test_run_that_an_exception_ends_is_not_told(tmp_path: Path) -> None:
    def interrupt(schedule: Schedule, step: int) -> None:
        if step == SG912_IN_A_ROW:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        told(tmp_path, interrupt, steps=SG912_IN_A_ROW + 2)
    assert [n for n in read_run(tmp_path).notes if n.get("kind") == "silent"] == []


def healthy(
    folder: Path, model: nn.Module, step: Callable[[int], None], **given: object
) -> list[str]:
    """Codes that a watched run was told; `step` is one step of the loop."""
    config = GuardConfig(run_dir=folder, terminal="quiet")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with stepguard.watch(model, optimizer, config=config, **given):  # type: ignore[arg-type]
        for number in range(80):
            optimizer.zero_grad()
            step(number)
            optimizer.step()
    record = read_run(folder)
    assert len(record.looks) >= 6
    return [str(note["code"]) for note in record.notes if note.get("kind") == "silent"]


Step = Callable[[nn.Module, torch.optim.Optimizer], None]


def mistaken(
    folder: Path, step: Step, model: nn.Module | None = None, steps: int = 14
) -> list[str]:
    """Codes that a short watched run was told; `step` is one step of the loop."""
    torch.manual_seed(0)
    model = model or nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with stepguard.watch(model, optimizer, config=GuardConfig(run_dir=folder, terminal="quiet")):
        for _ in range(steps):
            step(model, optimizer)
    return [str(n["code"]) for n in read_run(folder).notes if n.get("kind") == "silent"]


def loss_of(model: nn.Module) -> torch.Tensor:
    return (model(torch.randn(16, 8)) - 1.0).square().mean()


def zeroed_inside_accumulation(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(model).backward()
    optimizer.step()


def thrown_away_before_the_update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss_of(model).backward()
    optimizer.zero_grad()
    optimizer.step()


def attacked_inputs(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    inputs = torch.randn(16, 8, requires_grad=True)
    model(inputs).square().mean().backward()
    assert inputs.grad is not None
    optimizer.zero_grad()
    model((inputs + 0.1 * inputs.grad.sign()).detach()).square().mean().backward()
    optimizer.step()


def gradients_of_two_tasks_combined(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    kept = []
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model).backward()
        kept.append([parameter.grad for parameter in model.parameters()])
    for parameter, one, other in zip(model.parameters(), *kept, strict=True):
        assert one is not None and other is not None
        parameter.grad = one + other
    optimizer.step()


def ordinary(
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> Step:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        inputs = torch.randn(64, 8)
        loss(model(inputs), inputs).backward()
        optimizer.step()

    return step


TEMPERATURE = nn.Parameter(torch.ones(1))
F = nn.functional
MISTAKES = {
    "nll of probabilities": (lambda z, x: F.nll_loss(z.softmax(1), x[:, :4].argmax(1)), "SG914"),
    "nll of logits": (lambda z, x: F.nll_loss(z, x[:, :4].argmax(1)), "SG914"),
    "nll over the batch": (lambda z, x: F.nll_loss(z.log_softmax(0), x[:, :4].argmax(1)), "SG914"),
    "sigmoid twice": (
        lambda z, x: F.binary_cross_entropy_with_logits(z.sigmoid(), (x[:, :4] > 0).float()),
        "SG914",
    ),
    "kl_div of probabilities": (
        lambda z, x: F.kl_div(z.softmax(1), x[:, :4].softmax(1), reduction="batchmean"),
        "SG914",
    ),
    "(n, 1) beside (n,)": (lambda z, x: (z[:, :1] - x[:, 0]).abs().mean(), "SG915"),
    "sigmoid and wide targets": (lambda z, x: F.mse_loss(z.sigmoid(), 5 * x[:, :4]), "SG916"),
    "a thresholded term": (lambda z, x: z.square().mean() + (z > 0).float().mean(), "SG908"),
    "a temperature": (lambda z, x: (z * TEMPERATURE - 1.0).square().mean(), "SG903"),
}
HEALTHY = {
    "nll of a logarithm": lambda z, x: F.nll_loss(z.softmax(1).log(), x[:, :4].argmax(1)),
    "kl_div": lambda z, x: F.kl_div(z.log_softmax(1), x[:, :4].softmax(1), reduction="batchmean"),
    "all pairs": lambda z, x: (z[:, 0][:, None] - x[:, 0][None]).square().mean(),
    "targets in range": lambda z, x: F.mse_loss(z.tanh(), x[:, :4].clamp(-1, 1)),
    "a detached weight": lambda z, x: z.square().mean() * (1.0 + z.detach().square().mean()),
    "a squared difference": lambda z, x: (z.mean() - z.detach().mean() - 1.0).square(),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_loss_that_is_given_what_it_does_not_take(name: str, tmp_path: Path) -> None:
    loss, code = MISTAKES[name]
    assert mistaken(tmp_path, ordinary(loss)) == [code]


@pytest.mark.parametrize("name", HEALTHY)
def test_loss_that_looks_like_a_mistake_is_not_told(name: str, tmp_path: Path) -> None:
    assert mistaken(tmp_path, ordinary(HEALTHY[name])) == []


Batch = tuple[torch.Tensor, torch.Tensor]


def without_looks(
    folder: Path,
    driver: str,
    batch_of: Callable[[int], Batch],
    model: nn.Module | None = None,
    parameters: list[nn.Parameter] | None = None,
    *,
    change: Callable[[int], None] = lambda step: None,
    steps: int = 130,
    micro_batches: int = 1,
) -> list[str]:
    """Codes reported to a run with `look_every=None`, driven by `guard.step` or `watch`."""
    torch.manual_seed(0)
    model = model or nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(parameters or list(model.parameters()), lr=1e-3)
    config = GuardConfig(run_dir=folder, probes=Probes(look_every=None), terminal="quiet")

    def loss(batch: Batch) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1]) / micro_batches

    made = stepguard.Guard if driver == "step" else stepguard.watch
    with made(model, optimizer, config=config) as guard:
        for step in range(steps):
            change(step)
            batches = [batch_of(micro_batches * step + n) for n in range(micro_batches)]
            if driver == "step":
                guard.step(loss, *batches)
                continue
            optimizer.zero_grad()
            for batch in batches:
                loss(batch).backward()
            optimizer.step()
    return [str(n["code"]) for n in read_run(folder).notes if n.get("kind") == "silent"]


def fresh(step: int) -> Batch:
    return torch.randn(8, 4), torch.randn(8, 1)


def loader_of(
    rows: int, batch_size: int = 8, *, shuffle: bool = False
) -> torch.utils.data.DataLoader[Batch]:
    data = torch.utils.data.TensorDataset(torch.randn(rows, 4), torch.randn(rows, 1))
    return torch.utils.data.DataLoader(data, batch_size=batch_size, shuffle=shuffle)


def again(loader: torch.utils.data.DataLoader[Batch]) -> Callable[[int], Batch]:
    source = (tuple(batch) for _ in range(1000) for batch in loader)
    return lambda step: next(source)


KEPT = fresh(0)
HEALTHY_BATCHES: dict[str, Callable[[], Callable[[int], Batch]]] = {
    "all data in one tensor": lambda: lambda step: KEPT,
    "a view of all data": lambda: lambda step: (KEPT[0][:6], KEPT[1][:6]),
    "all data through a loader": lambda: again(loader_of(8)),
    "shuffled first batches": lambda: lambda step: tuple(next(iter(loader_of(64, shuffle=True)))),
    "two batches in turns": lambda: again(loader_of(16)),
    "every batch three times": lambda: (
        lambda parts: lambda step: tuple(part.clone() for part in parts[step // 3 % 5])
    )([fresh(n) for n in range(5)]),
    "eight batches twice each": lambda: (
        lambda parts: lambda step: tuple(part.clone() for part in parts[step // 2 % 8])
    )([fresh(n) for n in range(8)]),
}


class Parts(nn.Module):
    """A backbone, a head, an unused part and two experts of which one is used."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())
        self.head = nn.Linear(4, 1)
        self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.place = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.token = nn.Parameter(torch.zeros(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.experts[0](self.body(inputs + self.token + self.place)))
        return out


class Unused(Parts):
    def __init__(self) -> None:
        super().__init__()
        self.pooler = nn.Linear(4, 4)


def test_tensors_on_a_device_are_not_read(tmp_path: Path) -> None:
    """A meta tensor cannot be read: the attempt would raise."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = loader_of(64)
    config = GuardConfig(run_dir=tmp_path, probes=Probes(look_every=None), terminal="quiet")
    with stepguard.Guard(model, optimizer, config=config) as guard:
        for _ in range(30):
            kept = next(iter(loader))[0]
            guard.step(lambda _, kept=kept: model(kept).square().mean(), kept.to("meta"))
    assert [n for n in read_run(tmp_path).notes if n["type"] != "end"] == []


@pytest.mark.parametrize(
    ("steps", "stepped_at", "codes"),
    [
        (SG912_IN_A_ROW, None, ["SG912"]),
        (SG912_IN_A_ROW - 1, None, []),
        (SG912_IN_A_ROW, SG912_IN_A_ROW - 1, []),
    ],
    ids=["never", "short run", "once an epoch"],
)
def test_schedule_that_is_never_stepped_is_told_at_the_end(
    steps: int, stepped_at: int | None, codes: list[str], tmp_path: Path
) -> None:
    def loop(schedule: Schedule, step: int) -> None:
        if step == stepped_at:
            schedule.step()

    assert told(tmp_path, loop, steps) == codes


@pytest.mark.parametrize(("every", "codes"), [(40, []), (1000, ["SG913"])])
def test_average_that_never_follows_is_told_at_the_end(
    every: int, codes: list[str], tmp_path: Path
) -> None:
    model = nn.Linear(4, 1)
    ema = torch.optim.swa_utils.AveragedModel(model)

    def step(number: int) -> None:
        model(torch.randn(8, 4)).square().mean().backward()
        if number % every == every - 1:
            ema.update_parameters(model)

    assert healthy(tmp_path, model, step, state={"ema": ema}) == codes


def forgotten(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss_of(model).backward()
    optimizer.step()


def forgotten_with_autograd(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.autograd.backward(loss_of(model))
    optimizer.step()


def zeroed_with_autograd(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    torch.autograd.backward([loss_of(model)])
    optimizer.step()


def at_the_same_places(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """As a physical model does, whose inputs take part in the differentiation."""
    optimizer.zero_grad()
    model(torch.cat([PLACE, PLACE], 1)).square().mean().backward()
    optimizer.step()


PLACE = torch.rand(16, 4, requires_grad=True)


@pytest.mark.filterwarnings("ignore::stepguard.engine.wiring.WiringWarning")
@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (forgotten, ["SG902"]),
        (forgotten_with_autograd, ["SG902"]),
        (zeroed_inside_accumulation, ["SG902"]),
        (thrown_away_before_the_update, ["SG902"]),
        (zeroed_with_autograd, []),
        (attacked_inputs, []),
        (gradients_of_two_tasks_combined, []),
        (at_the_same_places, []),
    ],
)
def test_gradients_zeroed_at_the_wrong_time(
    step: Step, expected: list[str], tmp_path: Path
) -> None:
    assert mistaken(tmp_path, step, steps=40) == expected
    assert all(line["loss"] is not None for line in read_run(tmp_path).steps)


def test_gradients_left_by_the_loss_of_another_optimizer(tmp_path: Path) -> None:
    other = nn.Linear(8, 8)
    theirs = torch.optim.SGD(other.parameters(), lr=1e-3)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        theirs.zero_grad()
        model(other(torch.randn(16, 8))).mean().backward()
        theirs.step()
        loss_of(model).backward()
        optimizer.step()

    assert mistaken(tmp_path, step) == ["SG902"]


def drawn_alike(step: int) -> Batch:
    rows = torch.randint(8, (4,), generator=torch.Generator().manual_seed(0))
    return KEPT[0][rows], KEPT[1][rows]


def first_batches() -> Callable[[int], Batch]:
    loader = loader_of(64)
    return lambda step: tuple(next(iter(loader)))


SAME: dict[str, Callable[[], Callable[[int], Batch]]] = {
    "first batch of a new iterator": first_batches,
    "generator seeded in every step": lambda: drawn_alike,
}
BATCHES = [*product(SAME, [1, 3], [["SG907"]]), *product(HEALTHY_BATCHES, [1], [[]])]


@pytest.mark.parametrize(
    ("name", "micro_batches", "codes", "driver"),
    [(*row, driver) for row, driver in each(BATCHES, ["step", "watch"])],
)
def test_same_batch_in_every_step_is_told_and_what_only_looks_so_is_not(
    name: str, micro_batches: int, codes: list[str], driver: str, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    source = {**SAME, **HEALTHY_BATCHES}[name]()
    steps = 130 if codes else 200
    found = without_looks(tmp_path, driver, source, steps=steps, micro_batches=micro_batches)
    assert found == codes


FROZEN: dict[str, list[str]] = {
    "weight beside its bias": ["SG903"],
    "unused": ["SG904"],
    **{name: [] for name in ("backbone", "outside", "biases", "unfrozen", "turns")},
}


@pytest.mark.parametrize(("name", "driver"), each(FROZEN, ["step", "watch"]))
def test_parameters_that_learn_nothing_are_told_unless_it_is_on_purpose(
    name: str, driver: str, tmp_path: Path
) -> None:
    model = Unused() if name == "unused" else Parts()
    parameters = list(model.parameters())
    if name == "weight beside its bias":
        model.body[2].weight.requires_grad_(False)
    if name in ("backbone", "outside", "unfrozen"):
        model.body.requires_grad_(False)
    if name == "outside":
        parameters = [*model.head.parameters()]
    if name == "biases":
        for key, parameter in model.named_parameters():
            parameter.requires_grad_(key.endswith("bias"))

    def change(step: int) -> None:
        if name == "unfrozen":
            model.body[2].requires_grad_(step >= 40)
            model.body[0].requires_grad_(step >= 80)
        if name == "turns":
            model.body.requires_grad_(step % 3 == 0)

    assert without_looks(tmp_path, driver, fresh, model, parameters, change=change) == FROZEN[name]


def test_policy_that_has_solved_its_task_is_not_told(tmp_path: Path) -> None:
    """Its advantages are 0, so loss and gradients are: the task has nothing left to teach."""
    torch.manual_seed(0)
    policy = nn.Linear(1, 2)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.1)
    with stepguard.watch(policy, optimizer, config=GuardConfig(run_dir=tmp_path, terminal="quiet")):
        for _ in range(400):
            choice = torch.distributions.Categorical(logits=policy(torch.ones(32, 1)))
            taken = choice.sample()
            reward = (taken == 1).float()
            optimizer.zero_grad()
            (-(choice.log_prob(taken) * (reward - reward.mean())).mean()).backward()
            optimizer.step()
    assert [n["code"] for n in read_run(tmp_path).notes if n.get("kind") == "silent"] == []

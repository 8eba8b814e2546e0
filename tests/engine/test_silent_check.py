"""When a silent failure is told that no look can see."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import stepguard
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


def test_schedule_that_is_never_stepped_is_told_at_the_end(tmp_path: Path) -> None:
    assert told(tmp_path, lambda schedule, step: None) == ["SG912"]


def test_schedule_stepped_once_an_epoch_is_not_told(tmp_path: Path) -> None:
    def once(schedule: Schedule, step: int) -> None:
        if step == SG912_IN_A_ROW - 1:
            schedule.step()

    assert told(tmp_path, once) == []


def test_short_run_is_not_told(tmp_path: Path) -> None:
    assert told(tmp_path, lambda schedule, step: None, steps=SG912_IN_A_ROW - 1) == []


def test_run_that_an_exception_ends_is_not_told(tmp_path: Path) -> None:
    def interrupt(schedule: Schedule, step: int) -> None:
        if step == SG912_IN_A_ROW:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        told(tmp_path, interrupt, steps=SG912_IN_A_ROW + 2)
    assert [n for n in read_run(tmp_path).notes if n.get("kind") == "silent"] == []


# --- healthy trainings that look like a mistake, with default settings ------------------------


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


def test_answers_of_one_token_are_not_told(tmp_path: Path) -> None:
    model = nn.Embedding(200, 50)

    def step(number: int) -> None:
        tokens = torch.randint(0, 200, (8, 160))
        labels = torch.full_like(tokens, -100)
        labels[:, -1] = torch.randint(0, 50, (8,))
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()

    assert healthy(tmp_path, model, step) == []


def test_all_of_the_data_in_a_batch_of_a_loader_is_not_told(tmp_path: Path) -> None:
    data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=32)
    model = nn.Linear(4, 1)

    def step(number: int) -> None:
        for inputs, targets in loader:
            nn.functional.mse_loss(model(inputs), targets).backward()

    assert healthy(tmp_path, model, step) == []


def test_average_that_follows_once_an_epoch_is_not_told(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    ema = torch.optim.swa_utils.AveragedModel(model)

    def step(number: int) -> None:
        model(torch.randn(8, 4)).square().mean().backward()
        if number % 40 == 39:
            ema.update_parameters(model)

    assert healthy(tmp_path, model, step, state={"ema": ema}) == []


def test_average_that_never_follows_is_told_at_the_end(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    ema = torch.optim.swa_utils.AveragedModel(model)

    def step(number: int) -> None:
        model(torch.randn(8, 4)).square().mean().backward()

    assert healthy(tmp_path, model, step, state={"ema": ema}) == ["SG913"]


def test_forgotten_zero_grad_is_told_with_default_settings(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    config = GuardConfig(run_dir=tmp_path, terminal="quiet")
    with stepguard.watch(model, optimizer, config=config):
        for _ in range(12):
            model(torch.randn(32, 10)).square().mean().backward()
            optimizer.step()
    notes = read_run(tmp_path).notes
    assert [note["code"] for note in notes if note.get("kind") == "silent"] == ["SG902"]


# --- mistakes that are told with default settings ---------------------------------------------


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


@pytest.mark.filterwarnings("ignore::stepguard.engine.wiring.WiringWarning")
@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (zeroed_inside_accumulation, ["SG902"]),
        (thrown_away_before_the_update, ["SG902"]),
        (attacked_inputs, []),
        (gradients_of_two_tasks_combined, []),
    ],
)
def test_gradients_zeroed_at_the_wrong_time(
    step: Step, expected: list[str], tmp_path: Path
) -> None:
    assert mistaken(tmp_path, step) == expected


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


def test_inputs_of_a_physical_model_are_not_the_same_batch_again(tmp_path: Path) -> None:
    place = torch.rand(16, 4, requires_grad=True)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.cat([place, place], 1)).square().mean().backward()
        optimizer.step()

    assert mistaken(tmp_path, step) == []


def test_loss_that_was_0_at_the_look_is_not_told(tmp_path: Path) -> None:
    """As of a policy without a reward: the newest loss says nothing of the step looked at."""
    steps = iter(range(100))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        rewarded = next(steps) not in (2, 4, 8, 13)
        (float(rewarded) * loss_of(model)).backward()
        optimizer.step()

    assert mistaken(tmp_path, step) == []


# --- what needs no look: the same batch, frozen and unreached parameters ----------------------


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
        return nn.functional.mse_loss(model(batch[0]), batch[1])

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


def cycle(loader: torch.utils.data.DataLoader[Batch]) -> Callable[[int], Batch]:
    source = (tuple(batch) for _ in range(1000) for batch in loader)
    return lambda step: next(source)


DRIVERS = pytest.mark.parametrize("driver", ["step", "watch"])


@DRIVERS
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_first_batch_of_a_new_iterator_in_every_step(
    driver: str, micro_batches: int, tmp_path: Path
) -> None:
    loader = loader_of(64)
    codes = without_looks(
        tmp_path, driver, lambda step: tuple(next(iter(loader))), micro_batches=micro_batches
    )
    assert codes == ["SG907"]


@DRIVERS
def test_generator_seeded_in_every_step(driver: str, tmp_path: Path) -> None:
    data = fresh(0)

    def drawn(step: int) -> Batch:
        rows = torch.randint(8, (4,), generator=torch.Generator().manual_seed(0))
        return data[0][rows], data[1][rows]

    assert without_looks(tmp_path, driver, drawn) == ["SG907"]


KEPT = fresh(0)
HEALTHY_BATCHES: dict[str, Callable[[], Callable[[int], Batch]]] = {
    "all data in one tensor": lambda: lambda step: KEPT,
    "a view of all data": lambda: lambda step: (KEPT[0][:6], KEPT[1][:6]),
    "all data through a loader": lambda: cycle(loader_of(8)),
    "shuffled first batches": lambda: lambda step: tuple(next(iter(loader_of(64, shuffle=True)))),
    "two batches in turns": lambda: cycle(loader_of(16)),
    "every batch three times": lambda: (
        lambda parts: lambda step: tuple(part.clone() for part in parts[step // 3 % 5])
    )([fresh(n) for n in range(5)]),
    "eight batches twice each": lambda: (
        lambda parts: lambda step: tuple(part.clone() for part in parts[step // 2 % 8])
    )([fresh(n) for n in range(8)]),
}


@DRIVERS
@pytest.mark.parametrize("name", HEALTHY_BATCHES)
def test_batches_that_look_the_same_are_not_reported(
    name: str, driver: str, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    source = HEALTHY_BATCHES[name]()
    assert without_looks(tmp_path, driver, source, steps=200) == []


def test_closure_called_several_times_with_one_batch_is_not_reported(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    config = GuardConfig(run_dir=tmp_path, probes=Probes(look_every=None), terminal="quiet")
    with stepguard.watch(model, optimizer, config=config):
        for _ in range(100):
            inputs, targets = fresh(0)

            def closure(
                inputs: torch.Tensor = inputs, targets: torch.Tensor = targets
            ) -> torch.Tensor:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(inputs.clone()), targets)
                loss.backward()
                return loss

            optimizer.step(closure)
    assert [n for n in read_run(tmp_path).notes if n.get("kind") == "silent"] == []


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


@DRIVERS
def test_weight_frozen_beside_its_bias(driver: str, tmp_path: Path) -> None:
    model = Parts()
    model.body[2].weight.requires_grad_(False)
    assert without_looks(tmp_path, driver, fresh, model) == ["SG903"]


@DRIVERS
def test_part_that_the_loss_never_reaches(driver: str, tmp_path: Path) -> None:
    assert without_looks(tmp_path, driver, fresh, Unused()) == ["SG904"]


@DRIVERS
@pytest.mark.parametrize("name", ["parts", "backbone", "outside", "biases", "unfrozen", "turns"])
def test_parameters_frozen_on_purpose_are_not_reported(
    name: str, driver: str, tmp_path: Path
) -> None:
    model = Parts()
    parameters = list(model.parameters())
    change = lambda step: None  # noqa: E731
    if name in ("backbone", "outside", "unfrozen"):
        model.body.requires_grad_(False)
    if name == "outside":
        parameters = [*model.head.parameters()]
    if name == "biases":
        for key, parameter in model.named_parameters():
            parameter.requires_grad_(key.endswith("bias"))
    if name == "unfrozen":

        def change(step: int) -> None:
            if step >= 40:
                model.body[2].requires_grad_(True)
            if step >= 80:
                model.body[0].requires_grad_(True)

    if name == "turns":

        def change(step: int) -> None:
            model.body.requires_grad_(step % 3 == 0)

    codes = without_looks(tmp_path, driver, fresh, model, parameters, change=change)
    assert codes == []


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


# --- torch.autograd.backward ------------------------------------------------------------------


def forgotten_with_autograd(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.autograd.backward(loss_of(model))
    optimizer.step()


def zeroed_with_autograd(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    torch.autograd.backward([loss_of(model)])
    optimizer.step()


@pytest.mark.parametrize(
    ("step", "expected"), [(forgotten_with_autograd, ["SG902"]), (zeroed_with_autograd, [])]
)
def test_backward_called_as_a_function(step: Step, expected: list[str], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    config = GuardConfig(run_dir=tmp_path, probes=Probes(look_every=None), terminal="quiet")
    with stepguard.watch(model, optimizer, config=config):
        for _ in range(70):
            step(model, optimizer)
    record = read_run(tmp_path)
    assert [n["code"] for n in record.notes if n.get("kind") == "silent"] == expected
    assert all(one["loss"] is not None for one in record.steps)

"""What would help is tried on the run's own steps before it is offered; the run stays as it was."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stepguard
from scenes import (
    NAN,
    Batch,
    Scene,
    batches,
    difference,
    generators,
    noisy_net,
    plain_net,
    poisoned,
    quiet,
    state_of,
)
from stepguard import ConfigError, Guard, GuardConfig, Policy
from stepguard.engine.incident import trials
from stepguard.engine.incident.trials import FINITE, MODEL_FINITE
from stepguard.journal import read_run
from stepguard.records import Incident, Remedy
from stepguard.records.probes import TrialOutcome, WhatIf

TRIED = "tried on this step: loss and gradients finite"


class Net(nn.Module):
    """Without a bias: a sample of zeros stays exactly 0."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


def root_in_the_line(net: Net, x: Tensor) -> Tensor:
    y = net(x)
    return (y / torch.sqrt((y * y).sum(-1, keepdim=True))).sum()


def root_in_another_line(net: Net, x: Tensor) -> Tensor:
    y = net(x)
    rms = (y * y).mean(-1, keepdim=True).sqrt()
    z = y / rms
    return z.sum()


def root_of_variance(net: Net, x: Tensor) -> Tensor:
    y = net(x)
    centred = y - y.mean(-1, keepdim=True)
    return (centred / y.var(-1, keepdim=True).sqrt()).pow(2).sum()


def deviation(net: Net, x: Tensor) -> Tensor:
    y = net(x)
    return ((y - y.mean(-1, keepdim=True)) / y.std(-1, keepdim=True)).pow(2).sum()


def norm(net: Net, x: Tensor) -> Tensor:
    y = net(x)
    return (y / y.norm(dim=-1, keepdim=True)).pow(2).sum()


def inverse_root(net: Net, x: Tensor) -> Tensor:
    y = net(x)
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True))).sum()


def negative_power(net: Net, x: Tensor) -> Tensor:
    y = net(x)
    return (y * y.pow(2).mean(-1, keepdim=True) ** -0.5).sum()


def statement_of_two_lines(net: Net, x: Tensor) -> Tensor:
    y = net(x)
    return (
        y
        / torch.sqrt(
            (y * y).sum(-1, keepdim=True)  # a comment
        )
    ).sum()


def lambda_in_a_closure(net: Net, x: Tensor) -> Tensor:
    def inner(q: Tensor) -> Tensor:
        scaled = lambda v: q / v  # noqa: E731
        return scaled(q.abs().amax(-1, keepdim=True))

    return inner(net(x)).sum()


def second_of_two_logs(net: Net, x: Tensor) -> Tensor:
    y = net(x)
    return (torch.log(y.pow(2) + 1) - torch.log(y.pow(2))).sum()


def saturated_sigmoid(net: Net, x: Tensor) -> Tensor:
    z = net(x) * 1e4
    return -torch.log(1 - torch.sigmoid(z)).mean()


def slope_of_root(net: Net, x: Tensor) -> Tensor:
    return torch.sqrt(net(x).pow(2).sum(-1)).sum()


def softplus_by_hand(net: Net, x: Tensor) -> Tensor:
    z = net(x) * 1e3
    return torch.log(1 + z.exp()).mean()


def logsumexp_by_hand(net: Net, x: Tensor) -> Tensor:
    z = net(x) * 1e3
    return (torch.exp(z).sum(dim=-1).log() - z[:, 0]).mean()


def softmax_by_hand(net: Net, x: Tensor) -> Tensor:
    z = net(x) * 1e3
    return (torch.exp(z) / torch.exp(z).sum(-1, keepdim=True)).pow(2).mean()


def sigmoid_by_hand(net: Net, x: Tensor) -> Tensor:
    z = net(x) * 1e3
    return (1 / (1 + torch.exp(-z)) - 0.5).pow(2).mean()


def named_operands(net: Net, x: Tensor) -> Tensor:
    return torch.pow(input=net(x).square().sum(-1), exponent=0.5).mean()


def divided_in_place(net: Net, x: Tensor) -> Tensor:
    y = net(x) * 1.0
    size = x.abs().sum(-1, keepdim=True)
    y /= size
    return y.pow(2).mean()


def logarithm_in_place(net: Net, x: Tensor) -> Tensor:
    return net(x).abs().add_(0.0).log_().mean()


def logarithm_of_one_more(net: Net, x: Tensor) -> Tensor:
    return -torch.log1p(-torch.tanh(net(x) * 1e2)).mean()


def angle_of_itself(net: Net, x: Tensor) -> Tensor:
    y = net(x + 1)
    cosine = (y * y).sum(-1) / (y * y).sum(-1).detach()
    return torch.acos(cosine).mean()


def too_short_for_its_target(net: Net, x: Tensor) -> Tensor:
    scores = torch.log_softmax(net(x), -1)[:, None]
    target = torch.ones(1, 5, dtype=torch.long)
    sizes = torch.tensor([6]), torch.tensor([5])
    return torch.nn.functional.ctc_loss(scores, target, *sizes)


CASES: list[tuple[Callable[[Net, Tensor], Tensor], str]] = [
    (root_in_the_line, "safe_div(y, safe_sqrt((y * y).sum(-1, keepdim=True)))"),
    (root_in_another_line, "rms = safe_sqrt((y * y).mean(-1, keepdim=True))\nz = safe_div(y, rms)"),
    (root_of_variance, "safe_div(centred, safe_sqrt(y.var(-1, keepdim=True)))"),
    (deviation, "safe_sqrt(y.var(-1, keepdim=True))"),
    (norm, "safe_div(y, y.norm(dim=-1, keepdim=True))"),
    (inverse_root, "safe_div(1.0, safe_sqrt(y.pow(2).mean(-1, keepdim=True)))"),
    (negative_power, "safe_div(1.0, safe_pow(y.pow(2).mean(-1, keepdim=True), 0.5))"),
    (statement_of_two_lines, "safe_div(y, safe_sqrt((y * y).sum(-1, keepdim=True)))"),
    (lambda_in_a_closure, "lambda v: safe_div(q, v)"),
    (second_of_two_logs, "torch.log(y.pow(2) + 1) - safe_log(y.pow(2))"),
    (saturated_sigmoid, "-torch.nn.functional.logsigmoid(-z).mean()"),
    (slope_of_root, "safe_sqrt(net(x).pow(2).sum(-1))"),
    (softplus_by_hand, "return torch.nn.functional.softplus(z).mean()"),
    (logsumexp_by_hand, "(torch.logsumexp(z, dim=-1) - z[:, 0]).mean()"),
    (softmax_by_hand, "(torch.softmax(z, -1)).pow(2).mean()"),
    (sigmoid_by_hand, "(torch.sigmoid(z) - 0.5).pow(2).mean()"),
    (named_operands, "safe_pow(net(x).square().sum(-1), 0.5).mean()"),
    (divided_in_place, "y /= torch.where(size == 0, 1, size)"),
    (logarithm_in_place, ".clamp_(min=1e-12).log_().mean()"),
    (logarithm_of_one_more, ".clamp_min(-1 + 1e-6).log1p().mean()"),
    (angle_of_itself, "safe_acos(cosine).mean()"),
    (too_short_for_its_target, "ctc_loss(scores, target, *sizes, zero_infinity=True)"),
]


def batch() -> Tensor:
    torch.manual_seed(0)
    x = torch.randn(6, 4)
    x[3] = 0
    return x


def incident_of(loss_of: Callable[[Net, Tensor], Tensor], x: Tensor | None = None) -> Incident:
    torch.manual_seed(1)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    config = GuardConfig(terminal="quiet", policy=stepguard.Policy(actions=("skip",)))
    with Guard(net, optimizer, config=config) as guard:
        result = guard.step(lambda given: loss_of(net, given), batch() if x is None else x)
    assert result.incident is not None
    return result.incident


def fix_of(incident: Incident) -> Remedy:
    return next(one for one in incident.findings[0].remedies if one.edits)


@pytest.mark.parametrize(("loss_of", "line"), CASES, ids=[case[0].__name__ for case in CASES])
def test_fix_that_is_offered_was_run(loss_of: Callable[[Net, Tensor], Tensor], line: str) -> None:
    remedy = fix_of(incident_of(loss_of))
    assert remedy.tried.partition("; healthy values")[0] == TRIED == FINITE
    assert remedy.proven and remedy.loss is not None and math.isfinite(remedy.loss)
    assert line in remedy.snippet
    for function in remedy.needs:
        assert function in remedy.snippet.splitlines()[0]


def test_divisor_that_is_a_python_number_gets_a_floor() -> None:
    def annealed(net: Net, x: Tensor) -> Tensor:
        temperature = 0.1 * (3 - min(int(x.shape[0]), 3))
        return torch.softmax(net(x) / temperature, -1).sum()

    remedy = fix_of(incident_of(annealed))
    assert "net(x) / max(temperature, 1e-3)" in remedy.snippet
    assert remedy.proven


def test_fix_whose_update_would_throw_the_weights_away_is_not_called_proven() -> None:
    class Weighted(Net):
        def __init__(self) -> None:
            super().__init__()
            self.log_var = nn.Parameter(torch.tensor(-90.0))

    net = Weighted()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    with Guard(net, optimizer, config=GuardConfig(terminal="quiet")) as guard:
        guard.step(lambda x: (torch.exp(-net.log_var) * net(x).pow(2)).mean(), batch())
    remedy = fix_of(guard.incidents[0])
    assert remedy.tried.endswith("not verified beyond this step") and not remedy.proven


def test_program_is_as_before_after_the_trials() -> None:
    code = root_in_the_line.__code__
    globals_before = dict(root_in_the_line.__globals__)
    state = copy.deepcopy(incident_of(root_in_the_line).origin)
    assert root_in_the_line.__code__ is code
    assert root_in_the_line.__globals__ == globals_before
    assert state is not None and state.statement is not None
    others = [one for one in gc.get_objects() if type(one) is FunctionType]
    assert not any("_stepguard_seen" in one.__code__.co_names for one in others)


def test_run_goes_on_as_without_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, random numbers and gradients are the same to the last bit."""

    def train() -> tuple[Tensor, Tensor]:
        torch.manual_seed(2)
        net = nn.Sequential(Net(), nn.Dropout(0.3), nn.Linear(4, 2))
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        with Guard(net, optimizer, config=GuardConfig(terminal="quiet")) as guard:
            for step in range(6):
                x = torch.randn(5, 4)
                x[1] *= step != 3
                guard.step(
                    lambda given: (1 / net[0](given).norm(dim=-1)).mean() + net(given).mean(), x
                )
        return torch.cat([p.detach().flatten() for p in net.parameters()]), torch.rand(3)

    with_trials = train()
    monkeypatch.setattr(trials, "_why_not", lambda incident, step: "not wanted")
    without = train()
    assert all(torch.equal(one, other) for one, other in zip(with_trials, without, strict=True))


def test_module_of_a_watched_loop_is_tried_without_its_loss() -> None:
    class Unit(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x)
            return y / torch.sqrt((y * y).sum(-1, keepdim=True))

    net = Unit()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with stepguard.watch(net, optimizer, config=GuardConfig(terminal="quiet")) as guard:
        net(batch()).sum().backward()
        optimizer.step()
    assert fix_of(guard.incidents[0]).tried == MODEL_FINITE


def test_no_time_left_is_said() -> None:
    class Never(stepguard.locate.replay.LocateBudget):
        def affords(self, steps: float) -> bool:
            return False

    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    guard = Guard(net, optimizer, config=GuardConfig(terminal="quiet"))
    guard._context.memory.effort = Never()
    with guard:
        guard.step(lambda x: second_of_two_logs(net, x), batch())
    assert fix_of(guard.incidents[0]).tried == f"not tried: {trials.NO_TIME}"


# --- guard.whatif()


DATA = batches(48)
BAD = 40


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def by_name(found: WhatIf) -> dict[str, TrialOutcome]:
    return {one.name: one for one in found.outcomes}


def run_to_the_end(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch], **settings: Any
) -> Guard:
    guard = Guard(model, optimizer, config=quiet(locate=True, **settings))
    for batch in data:
        guard.step(lambda given: loss_of(model, given), batch)
    return guard


def with_bad_sample(index: int = BAD) -> list[Batch]:
    return [*DATA[:index], poisoned(DATA[index], NAN), *DATA[index + 1 :]]


def noisy_scene() -> Scene:
    model = noisy_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10)
    return Scene(model, optimizer, schedule, scaler, clip_norm=0.5)


def test_run_goes_on_bit_for_bit_as_if_nothing_had_been_tried(tmp_path: Path) -> None:
    ended = []
    for name in ("tried", "not tried"):
        torch.manual_seed(3)
        scene = noisy_scene()
        config = quiet(locate=True, clip_norm=0.5, run_dir=tmp_path / name)
        with Guard(scene.model, scene.optimizer, config=config, **scene.close_over()) as guard:
            for index, batch in enumerate(with_bad_sample()):
                guard.step(scene.loss_fn, batch)
                if name == "tried" and index in (BAD, BAD + 3):
                    with torch.no_grad():
                        found = guard.whatif()
        ended.append((state_of(scene), generators(), len(read_run(tmp_path / name).steps)))
    assert found.best is not None
    assert found.remarks == ()
    assert difference(ended[0], ended[1]) == ""


def test_bad_sample_is_best_left_out_and_nothing_else_but_skipping_helps() -> None:
    model = plain_net()
    guard = run_to_the_end(
        model, torch.optim.Adam(model.parameters(), lr=0.01), with_bad_sample()[: BAD + 1]
    )
    found = guard.whatif()
    guard.close()
    assert [one.name for one in found.outcomes if one.works] == ["leave out", "skip"]
    assert found.best is not None and found.best.answers == ("SG101",)
    assert by_name(found)["nothing"].bad_step == BAD
    assert by_name(found)["lr x0.1"].bad_value == "loss is nan"
    assert found.window > 0 and found.held_out > 0


def test_own_fix_is_tried_beside_the_others_and_leaves_nothing_behind() -> None:
    model = plain_net()

    def own(given: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        given[0].register_forward_pre_hook(lambda module, args: (args[0].nan_to_num(),))
        optimizer.param_groups[0]["lr"] *= 0.5

    guard = run_to_the_end(
        model, torch.optim.Adam(model.parameters(), lr=0.01), with_bad_sample()[: BAD + 1]
    )
    tried = by_name(guard.whatif(own))["own"]
    guard.close()
    assert tried.works and tried.label == "your own: own", tried
    assert not model[0]._forward_pre_hooks
    assert guard.optimizer.param_groups[0]["lr"] == 0.01


def test_own_fix_that_fails_costs_only_itself() -> None:
    def own(*_: Any) -> None:
        raise ValueError("not today")

    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = run_to_the_end(model, optimizer, with_bad_sample(5)[:6])
    found = guard.whatif(own)
    guard.close()
    assert by_name(found)["own"].why_not == "ValueError: not today"
    assert found.best is not None


def test_halted_run_can_still_be_asked() -> None:
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = quiet(locate=True, policy=stepguard.Policy(actions=("stop",)))
    guard = Guard(model, optimizer, config=config)
    with pytest.raises(stepguard.TrainingHalted):
        for batch in with_bad_sample(12):
            guard.step(lambda given: loss_of(model, given), batch)
    guard.close()
    found = guard.whatif()
    assert found.best is not None and found.best.name == "leave out"


def test_what_cannot_be_tried_is_said_in_one_sentence() -> None:
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, config=quiet())
    with pytest.raises(ConfigError, match="no incident yet"):
        guard.whatif()
    guard.close()
    with stepguard.watch(model, optimizer, config=quiet()) as guard:
        loss_of(model, poisoned(DATA[0])).backward()
        optimizer.step()
        with pytest.raises(ConfigError, match=r"guard.loss\(loss_fn, batch\)"):
            guard.whatif()
    lbfgs = torch.optim.LBFGS(model.parameters())
    with Guard(model, lbfgs, config=quiet()) as guard:
        guard.step(lambda given: loss_of(model, given), poisoned(DATA[0]))
        with pytest.raises(ConfigError, match="update of LBFGS"):
            guard.whatif()
    compiled: Any = torch.compile(plain_net(), backend="eager")
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    with Guard(compiled, optimizer, config=quiet()) as guard:
        guard.step(lambda given: loss_of(compiled, given), poisoned(DATA[0]))
        with pytest.raises(ConfigError, match="compiled"):
            guard.whatif()


def test_panels_fix_is_the_first_candidate() -> None:
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, config=quiet(locate=True))
    code = loss_with_a_log.__code__
    for step, batch in enumerate(DATA[: BAD + 1]):
        guard.step(lambda given, step=step: loss_with_a_log(model, given, step), batch)
    found = guard.whatif()
    assert found.outcomes[0].name == "fix" and found.outcomes[0].works
    assert "safe_log" in found.outcomes[0].change
    assert loss_with_a_log.__code__ is code


def loss_with_a_log(model: nn.Module, batch: Batch, step: int) -> Tensor:
    level = batch[0].abs().mean() * (step != BAD)
    return loss_of(model, batch) + 0.01 * torch.log(level * model(batch[0]).abs().mean())


# --- Policy(on_incident="whatif")


LONGER = batches(60)
TRIES = Policy(on_incident="whatif")


def test_answer_to_an_incident_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="on_incident"):
        Policy(on_incident="guess")  # type: ignore[arg-type]


def decided_run(data: list[Batch], policy: Policy, **settings: Any) -> tuple[Guard, nn.Module]:
    model = plain_net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    config = quiet(locate=True, policy=policy, **settings)
    with Guard(model, optimizer, config=config) as guard:
        for batch in data:
            guard.step(lambda given: loss_of(model, given), batch)
    return guard, model


def test_bad_sample_is_left_out_as_without_trials_and_the_journal_says_why(tmp_path: Path) -> None:
    data = [*LONGER[:BAD], poisoned(LONGER[BAD], NAN), *LONGER[BAD + 1 :]]
    plain = decided_run(data, Policy())[1]
    guard, tried = decided_run(data, TRIES, run_dir=tmp_path)
    assert difference(dict(tried.state_dict()), dict(plain.state_dict())) == ""
    decision = guard.incidents[0].decision
    assert decision is not None and decision.action == "leave_out"
    assert decision.reason.startswith("whatif: leave out")
    notes = [note for note in read_run(tmp_path).notes if note.get("kind") == "whatif"]
    assert [trial["name"] for trial in notes[0]["trials"]][:2] == ["leave out", "skip"]


class DividesByMoment(torch.optim.Optimizer):
    """Without epsilon, an update whose second moment is 0 is 0 / 0."""

    def __init__(self, parameters: Any, lr: float = 0.01, eps: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    square = parameter.grad.square()
                    update = parameter.grad / (square.sqrt() + group["eps"])
                    parameter.sub_(update * group["lr"])


def test_update_that_divides_by_zero_again_and_again_gets_an_epsilon() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = DividesByMoment(model.parameters())

    def loss_fn(batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    # from step 30 on, two features are 0 in every batch, and so are their gradients
    data = [(x * (torch.arange(6) < 4) if n >= 30 else x, y) for n, (x, y) in enumerate(LONGER)]
    config = quiet(locate=True, policy=TRIES)
    with Guard(model, optimizer, config=config) as guard:
        for batch in data:
            guard.step(loss_fn, batch)
        decisions = [one.decision for one in guard.incidents]
    # the first of them is alone among good steps, so that skipping is enough; the second is not
    first, second = [one for one in decisions if one is not None]
    assert (first.action, first.new_eps) == ("undo", None)
    assert (second.action, second.new_eps) == ("undo", 1e-6)
    assert "these do not: leave out, skip" in second.reason or "these do not: skip" in second.reason
    assert optimizer.param_groups[0]["eps"] == 1e-6
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_rewind_that_would_end_the_same_way_lowers_the_rate() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def loss_fn(batch: Batch) -> Tensor:
        return (model(batch[0]) - 2.0 * batch[0]).square().mean()

    config = quiet(locate=True, policy=TRIES, anomalies="act")
    with Guard(model, optimizer, config=config) as guard:
        for index, batch in enumerate(batches(90, seed=1)):
            if index == 40:
                optimizer.param_groups[0]["lr"] = 0.4
            guard.step(loss_fn, batch)
        decisions = [one.decision for one in guard.incidents]
    rewinds = [one for one in decisions if one is not None and one.action == "rewind"]
    assert rewinds, [one.summary for one in guard.incidents]
    assert rewinds[0].lr_factor in (0.5, 0.1)
    assert rewinds[0].data == "skip"


@pytest.mark.parametrize(
    "wrong", [torch.log, lambda x: torch.log(x.clamp_min(0.5))], ids=["no help", "other values"]
)
def test_fix_that_does_not_mend_the_step_or_changes_other_values_is_not_offered(
    wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stepguard.numerics, "safe_log", wrong)
    finding = incident_of(second_of_two_logs).findings[0]
    assert finding.code == "SG202" and finding.remedies
    assert not any(one.snippet or one.edits for one in finding.remedies)

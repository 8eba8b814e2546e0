"""Code fixes are run on the bad step before they are offered: only true ones are printed."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable
from types import FunctionType

import pytest
import torch
from torch import Tensor, nn

import stepguard
from stepguard import Guard, GuardConfig
from stepguard.engine.incident import trials
from stepguard.engine.incident.trials import FINITE, MODEL_FINITE
from stepguard.records import Incident, Remedy

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
    assert remedy.tried.partition("; values")[0] == TRIED == FINITE
    assert remedy.proven and remedy.loss is not None and math.isfinite(remedy.loss)
    assert line in remedy.snippet
    for function in remedy.needs:
        assert function in remedy.snippet.splitlines()[0]


def test_fix_that_does_not_mend_the_step_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepguard.numerics, "safe_log", torch.log)
    incident = incident_of(second_of_two_logs)
    assert incident.findings[0].code == "SG202"
    assert incident.findings[0].remedies
    assert not any(one.snippet or one.edits for one in incident.findings[0].remedies)


def test_fix_that_changes_other_values_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(x: Tensor) -> Tensor:
        return torch.log(x.clamp_min(0.5))

    monkeypatch.setattr(stepguard.numerics, "safe_log", wrong)
    assert not any(one.edits for one in incident_of(second_of_two_logs).findings[0].remedies)


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


def test_loss_of_a_watched_loop_is_not_tried() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with stepguard.watch(net, optimizer, config=GuardConfig(terminal="quiet")) as guard:
        for _ in range(2):
            optimizer.zero_grad()
            loss = torch.log(net(batch()).pow(2)).sum()
            loss.backward()
            optimizer.step()
    remedies = [
        one for incident in guard.incidents for f in incident.findings for one in f.remedies
    ]
    code = [one for one in remedies if one.edits]
    assert code and all(one.tried.startswith("not tried: ") for one in code)


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

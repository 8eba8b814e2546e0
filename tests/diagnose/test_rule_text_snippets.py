"""Every example of a rule fails as its page says, and every remedy with a snippet cures it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from stepguard.diagnose import Rule
from stepguard.diagnose import all_rules as every_rule
from stepguard.diagnose.engine import HEALTHY_SERIES

Names = dict[str, Any]


def all_rules() -> tuple[Rule, ...]:
    """Those of bad values; tests/diagnose/test_silent.py and test_forecast.py run the others."""
    return tuple(rule for rule in every_rule() if not rule.code.startswith(HEALTHY_SERIES))


def run(rule: Rule, lines: str) -> Names:
    """The example with these lines in the place of the bad ones, and backward where the lines leave
    it to us.
    """
    names: Names = {"__name__": "example"}
    torch.manual_seed(0)
    exec(compile(rule.text.setup, f"{rule.code} setup", "exec"), names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(lines, f"{rule.code} lines", "exec"), names)
        loss = names.get("loss")
        if (
            isinstance(loss, torch.Tensor)
            and loss.requires_grad
            and ".backward()" not in rule.text.setup + lines
        ):
            loss.backward()
    return names


def tensors(names: Names) -> Iterator[torch.Tensor]:
    """What a training run keeps: the loss, leaves and their gradients, module state, optimizer
    state.
    """
    for value in list(names.values()):
        if isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad:
            yield value
            yield from () if value.grad is None else (value.grad,)
        elif isinstance(value, torch.nn.Module):
            yield from value.state_dict().values()
            yield from (p.grad for p in value.parameters() if p.grad is not None)
        elif isinstance(value, torch.optim.Optimizer):
            yield from (
                s
                for slots in value.state.values()
                for s in slots.values()
                if isinstance(s, torch.Tensor)
            )
    if isinstance(names.get("loss"), torch.Tensor):
        yield names["loss"].detach()


def is_finite(names: Names) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in tensors(names) if t.is_floating_point())


def learns(names: Names) -> bool:
    """Finite, and some gradient is not 0."""
    leaves = [v for v in names.values() if isinstance(v, torch.Tensor) and v.is_leaf]
    leaves += [p for v in names.values() if isinstance(v, torch.nn.Module) for p in v.parameters()]
    grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
    return is_finite(names) and any(bool(grad.abs().max() > 0) for grad in grads)


def is_small(names: Names) -> bool:
    loss = float(names["loss"].detach())
    return math.isfinite(loss) and loss < 10


def runs_as_configured(names: Names) -> bool:
    return all(group["lr"] == names["configured"] for group in names["optimizer"].param_groups)


def are_copies(names: Names) -> bool:
    first, second = names["ranks"]
    return torch.equal(first.weight, second.weight)


def share_nothing(names: Names) -> bool:
    first, second = names["read"]
    return not set(first) & set(second)


HEALTHY: dict[str, Callable[[Names], bool]] = {
    "SG501": learns,
    "SG504": is_small,
    "SG505": is_small,
    "SG704": are_copies,
    "SG705": share_nothing,
    "SG801": learns,
    "SG802": runs_as_configured,
    "SG803": learns,
}
"""What healthy means where finite is not the question."""

SNIPPETS = [
    pytest.param(rule, remedy.snippet, id=f"{rule.code}-{i}")
    for rule in all_rules()
    for i, remedy in enumerate(rule.ordered)
    if remedy.snippet
]


@pytest.fixture(autouse=True)
def _restore_global_torch_state() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.code)
def test_bad_example_reproduces_the_failure(rule: Rule) -> None:
    assert not HEALTHY.get(rule.code, is_finite)(run(rule, rule.text.bad))


@pytest.mark.parametrize(("rule", "snippet"), SNIPPETS)
def test_remedy_cures_the_example(rule: Rule, snippet: str) -> None:
    assert HEALTHY.get(rule.code, is_finite)(run(rule, snippet))


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.code)
def test_every_rule_has_a_remedy_that_is_code(rule: Rule) -> None:
    assert rule.fixed
    assert rule.fixed == next(remedy.snippet for remedy in rule.ordered if remedy.snippet)


def test_lowering_the_learning_rate_is_never_the_first_advice() -> None:
    for rule in all_rules():
        first = rule.ordered[0]
        assert "lower" not in first.title.lower()
        assert "learning rate" not in first.title.lower()

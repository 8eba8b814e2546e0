"""A look at one step: rows by module, direction and dtype, parameters, layers and facts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stepguard.probes.deep_look import DeepLook, Observer
from stepguard.probes.statistics import (
    SAMPLE,
    SeenBatch,
    digest_of,
    sampled,
    statistics_of,
)
from stepguard.records.probes import Look, ParameterLook, TensorLook
from stepguard.tensors.torch_private import dispatch_mode_stack


def look_at(
    model: nn.Module,
    loss: Callable[[Any], Tensor],
    batch: Any,
    optimizer: torch.optim.Optimizer | None = None,
) -> Look:
    """Run one step of this loss under a look."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    optimizer.zero_grad()
    look = DeepLook(0, {"": model}, optimizer, owned)
    look.begin()
    look.batch.add(batch)
    loss(batch).backward()
    look.observer.stop()
    look.before_update()
    optimizer.step()
    found = look.finish(committed=True)
    assert not look.observer.faults
    return found


class Squares(nn.Module):
    """Squares in float16, which overflows from 256 on, under a root that absorbs the infinity."""

    def forward(self, x: Tensor) -> Tensor:
        squared = (x.half() * x.half()).float()
        return x / torch.sqrt(1 + squared)


def row(look: Look, module: str, stage: str, dtype: str) -> TensorLook:
    return next(
        one for one in look.tensors if (one.module, one.stage, one.dtype) == (module, stage, dtype)
    )


def test_rows_name_module_direction_and_dtype() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    look = look_at(model, lambda x: model(x).square().mean(), torch.randn(8, 4))
    assert row(look, "0", "forward", "float32").largest > 0
    assert row(look, "0", "backward", "float32").largest > 0
    assert row(look, "param:0.weight", "stored", "float32").elements == 16
    headrooms = [one.headroom for one in look.tensors if one.headroom is not None]
    assert headrooms == sorted(headrooms)


def test_headroom_of_half_precision_is_told_in_bits() -> None:
    model = Squares()
    scale = nn.Parameter(torch.tensor(100.0))
    optimizer = torch.optim.SGD([scale], lr=0.1)
    look = look_at(model, lambda x: model(x * scale).sum(), torch.ones(8), optimizer)
    found = row(look, "", "forward", "float16")
    assert found.largest == 10_000.0
    assert found.headroom == pytest.approx(2.71, abs=0.01)
    assert found.infinities == 0


def test_infinity_that_the_step_absorbs_is_counted_where_it_was_born() -> None:
    model = Squares()
    scale = nn.Parameter(torch.tensor(1000.0))
    optimizer = torch.optim.SGD([scale], lr=0.1)
    look = look_at(model, lambda x: model(x * scale).sum(), torch.ones(8), optimizer)
    assert row(look, "", "forward", "float16").infinities == 8
    # the conversion to float32 has them from there
    assert row(look, "", "forward", "float32").infinities == 0


def test_mask_of_minus_infinity_is_not_a_born_infinity() -> None:
    model = nn.Linear(4, 4)
    mask = torch.ones(4, 4).tril() == 0
    look = look_at(
        model,
        lambda x: model(x).masked_fill(mask, -torch.inf).softmax(-1)[:, 0].sum(),
        torch.randn(4, 4),
    )
    assert sum(one.infinities for one in look.tensors) == 0


def test_dropout_and_norms_in_evaluation_mode_are_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
    model.eval()
    look = look_at(model, lambda x: model(x).square().mean(), torch.randn(8, 4))
    facts = look.facts
    assert (facts.training, facts.dropout, facts.norms_in_eval) == (False, ("1",), ("2",))


def kept_gradients(passes: int, *, zero: bool) -> bool:
    """What a look says of gradients that are there before the first of several passes."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    look = DeepLook(0, {"": model}, optimizer, set())
    look.begin()
    for number in range(passes):
        loss = model(torch.ones(1, 2)).square().sum()
        if zero and number == 0:
            optimizer.zero_grad()
        torch.autograd.backward(loss)
    look.before_update()
    return look.finish(committed=True).facts.kept_gradients


def test_gradients_of_the_step_before_are_noticed() -> None:
    assert kept_gradients(1, zero=False)
    assert kept_gradients(2, zero=False)
    assert not kept_gradients(1, zero=True)
    # the second backward pass of an accumulated step
    assert not kept_gradients(2, zero=True)


# --- attention, norms, activations and losses


class Attention(nn.Module):
    """One head, with torch's fused attention or by hand."""

    def __init__(self, scale: float, *, fused: bool, causal: bool = False) -> None:
        super().__init__()
        self.query = nn.Linear(8, 8)
        self.scale = scale
        self.fused = fused
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x) * self.scale
        if self.fused:
            return nn.functional.scaled_dot_product_attention(query, x, x, is_causal=self.causal)
        logits = query @ x.transpose(-2, -1) / 8**0.5
        if self.causal:
            hidden = torch.ones(logits.shape[-2:]).tril() == 0
            logits = logits.masked_fill(hidden, -torch.inf)
        return logits.softmax(-1) @ x


@pytest.mark.parametrize("causal", [False, True])
def test_fused_attention_shows_what_the_same_by_hand_shows(causal: bool) -> None:
    seen = []
    for fused in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(Attention(1.0, fused=fused, causal=causal))
        batch = torch.randn(1, 2, 16, 8)
        look = look_at(model, lambda x, model=model: model(x).square().mean(), batch)
        (found,) = look.attention
        assert found.module == "0"
        seen.append((found.largest_logit, found.entropy, found.collapsed))
    assert seen[0] == pytest.approx(seen[1], rel=1e-4)
    assert 0.5 < seen[0][1] < 1.0


def test_collapsed_attention_has_no_entropy() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Attention(500.0, fused=True))
    (found,) = look_at(model, lambda x: model(x).sum(), torch.randn(1, 2, 16, 8)).attention
    assert found.collapsed > 0.8
    assert found.entropy < 0.2
    assert found.largest_logit > 100


def test_norm_shows_the_scale_of_its_input() -> None:
    model = nn.Sequential(nn.LayerNorm(16))
    batch = 50 * torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    (found,) = look_at(model, lambda x: model(x).square().sum(), batch).norms
    assert found.module == "0"
    assert found.scale == pytest.approx(50, rel=0.1)


def test_dead_and_saturated_units_are_counted() -> None:
    model = nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Tanh())
    with torch.no_grad():
        model[0].bias[:3] = -100.0
        model[0].bias[3:5] = 100.0
    relu, tanh = look_at(model, lambda x: model(x).sum(), torch.randn(64, 4)).units
    assert (relu.module, relu.units, relu.positions) == ("1", 10, 64)
    assert relu.dead == pytest.approx(0.3)
    assert 0.2 <= tanh.saturated < 0.9


def test_softmax_before_a_cross_entropy_is_seen() -> None:
    model = nn.Linear(4, 3)
    target = torch.tensor([0, 1, -100, 2])
    loss = nn.functional.cross_entropy
    once = look_at(model, lambda x: loss(model(x), target), torch.randn(4, 4))
    twice = look_at(model, lambda x: loss(model(x).softmax(-1), target), torch.randn(4, 4))
    assert (once.facts.softmax_twice, twice.facts.softmax_twice) == (False, True)
    assert (once.facts.labels, once.facts.ignored) == (4, 1)


# --- parameters and updates


def parameter(look: Look, name: str) -> ParameterLook:
    return next(one for one in look.parameters if one.name == name)


def test_size_of_an_update_beside_the_weight() -> None:
    model = nn.Linear(4, 4, bias=False)
    nn.init.constant_(model.weight, 2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    look = look_at(model, lambda x: model(x).sum(), torch.ones(1, 4), optimizer)
    found = parameter(look, "weight")
    assert found.gradient == pytest.approx(1.0)
    assert found.ratio == pytest.approx(0.05)
    assert found.lost == 0.0


def test_updates_that_bfloat16_rounds_away_are_lost() -> None:
    model = nn.Linear(4, 4, bias=False).bfloat16()
    nn.init.constant_(model.weight, 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    look = look_at(model, lambda x: model(x).sum(), torch.ones(1, 4).bfloat16(), optimizer)
    found = parameter(look, "weight")
    assert (found.lost, found.update, found.dtype) == (1.0, 0.0, "bfloat16")


def test_what_no_optimizer_holds_and_what_is_frozen_is_told() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    look = look_at(model, lambda x: model(x).sum(), torch.ones(1, 2), optimizer)
    assert not parameter(look, "0.weight").trainable
    assert parameter(look, "0.weight").gradient is None
    assert not parameter(look, "1.weight").owned


def test_second_moments_of_adam_that_underflow_are_counted() -> None:
    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    tiny = look_at(model, lambda x: 1e-30 * model(x).sum(), torch.ones(1, 4), optimizer)
    assert parameter(tiny, "weight").variance_zeros == 1.0
    fresh = torch.optim.Adam(model.parameters(), lr=1e-3)
    plain = look_at(model, lambda x: model(x).sum(), torch.ones(1, 4), fresh)
    assert parameter(plain, "weight").variance_zeros == 0.0
    assert parameter(plain, "weight").variance == pytest.approx(1e-3)


# --- the observer


def run(observer: Observer | None) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 1))
    if observer is not None:
        observer.start()
    model(torch.randn(16, 4)).square().mean().backward()
    if observer is not None:
        observer.stop()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [*gradients, *model.buffers(), torch.get_rng_state()]


def test_watched_step_is_bit_identical() -> None:
    observer = Observer({})
    bare = run(None)
    assert all(map(torch.equal, bare, run(observer)))
    assert observer.results
    assert not dispatch_mode_stack()


def test_a_fault_of_its_own_ends_the_look_and_not_the_step() -> None:
    observer = Observer({})
    observer.notes = None  # type: ignore[assignment]
    observer.start()
    total = torch.ones(3).add(1)
    observer.stop()
    assert total.tolist() == [2.0, 2.0, 2.0]
    assert isinstance(observer.faults["probe"], AttributeError)


def test_stop_inside_a_backward_leaves_the_stack_later() -> None:
    observer = Observer({})
    weight = torch.ones(3, requires_grad=True)
    weight.register_hook(lambda grad: observer.stop())
    observer.start()
    (weight * 2).sum().backward()
    assert observer.on_the_stack
    observer.stop()
    assert not dispatch_mode_stack()


# --- statistics of single tensors


def numbers_of(tensor: Tensor) -> dict[str, float]:
    return {name: float(value) for name, value in statistics_of(tensor).items()}


def test_extremes_and_shares_are_counted() -> None:
    found = numbers_of(torch.tensor([0.0, -4.0, 0.5, 1e-40]))
    assert found["largest"] == 4.0
    assert (found["zeros"], found["subnormal"], found["infinities"]) == (1.0, 1.0, 0.0)
    assert found["smallest"] == pytest.approx(1e-40, rel=1e-4)


def test_infinity_is_counted_and_the_largest_finite_value_kept() -> None:
    found = numbers_of(torch.tensor([torch.inf, 3.0, -torch.inf]))
    assert (found["largest"], found["infinities"]) == (3.0, 2.0)


def test_the_largest_value_of_a_long_tensor_is_found_wherever_it_is() -> None:
    values = torch.ones(5 * SAMPLE)
    values[3] = 1000.0
    assert sampled(values).numel() <= SAMPLE
    assert numbers_of(values)["largest"] == 1000.0


# --- batches told apart


def seen(batch: Any) -> SeenBatch:
    found = SeenBatch()
    found.add(batch)
    return found


def test_digest_is_that_of_the_values() -> None:
    batch = {"x": torch.arange(4.0), "name": "a"}
    assert digest_of(batch) == digest_of({"x": torch.arange(4.0), "name": "b"})
    assert digest_of(batch) != digest_of({"x": torch.arange(1.0, 5.0), "name": "a"})


def test_constant_tells_nothing() -> None:
    assert digest_of([torch.ones(4), torch.zeros(3, dtype=torch.long), torch.tensor(7.0)]) == ""


def test_kept_tensor_is_told_from_an_equal_one() -> None:
    kept = torch.arange(6.0)
    first = seen(kept)
    assert first.compared(seen(kept)) == "same"
    assert first.compared(seen(kept.view(2, 3))) == "same"
    assert first.compared(seen(kept.clone())) == "equal"
    assert first.compared(seen(kept + 1)) == "other"
    assert first.compared(SeenBatch()) == "unknown"

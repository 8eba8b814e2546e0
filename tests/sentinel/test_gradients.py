"""What a step's numbers are read from: gradients, stored tensors, and wrapped torch functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn import functional as F
from torch.nn.utils import clip_grad
from torch.optim import Adam, Optimizer
from torch.optim.swa_utils import AveragedModel

import stepguard
from scenes import quiet
from stepguard.judge.history import LR_JUMP
from stepguard.records import Incident
from stepguard.sentinel import torch_patches
from stepguard.sentinel.gradients import (
    CHEAP_COPY,
    MOST_MODULES,
    SCANNED_EACH_STEP,
    STEPS,
    STEPS_A_ROUND,
    GradientMark,
    GradientNorms,
    Packet,
    RotatingScan,
    bad_buffers,
    bad_parameters,
    bad_slots,
    clip,
    extremes,
    gradient_norm,
    is_custom,
    largest,
    norm_statistics,
    risky_update,
    state_tensors,
)


def parameters(*dtypes: torch.dtype, size: float = 3.0) -> list[Tensor]:
    torch.manual_seed(0)
    made: list[Tensor] = []
    for dtype in dtypes:
        parameter = nn.Parameter(torch.zeros(5, dtype=dtype))
        parameter.grad = (torch.randn(5) * size).to(dtype)
        made.append(parameter)
    return made


def grads(made: list[Tensor]) -> list[Tensor]:
    return [p.grad for p in made if p.grad is not None]


KINDS = [
    (torch.float32, torch.float32),
    (torch.float64, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float16, torch.float32),
]


@pytest.mark.parametrize("dtypes", KINDS)
@pytest.mark.parametrize("max_norm", [0.1, 1.0, 1000.0])
def test_clipping_is_bit_identical_to_torch(
    dtypes: tuple[torch.dtype, ...], max_norm: float
) -> None:
    ours = parameters(*dtypes)
    theirs = parameters(*dtypes)
    norm = gradient_norm(grads(ours))
    assert norm is not None
    clip(ours, max_norm, norm, known=float(norm.total))
    torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    for mine, wanted in zip(grads(ours), grads(theirs), strict=True):
        assert torch.equal(mine, wanted)


def test_a_norm_that_overflows_half_precision_is_finite_in_float32() -> None:
    made = parameters(torch.float16, torch.float16, size=0.0)
    for parameter in made:
        parameter.grad = torch.full((5,), 30000.0, dtype=torch.float16)
    norm = gradient_norm(grads(made))
    assert norm is not None
    assert math.isfinite(norm.total)
    assert math.isinf(norm.clip)
    clip(made, 1.0, norm)
    after = gradient_norm(grads(made))
    assert after is not None
    assert float(after.total) == pytest.approx(1.0, rel=1e-2)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_bad_element_makes_the_norm_bad(bad: float) -> None:
    made = parameters(torch.float32, torch.float32)
    grads(made)[1][2] = bad
    norm = gradient_norm(grads(made), each=True)
    assert norm is not None
    assert not math.isfinite(norm.total)


def test_each_tells_the_smallest_norm_and_leaves_the_total_as_it_is() -> None:
    made = parameters(torch.float32, torch.float32)
    grads(made)[1].zero_()
    plain = gradient_norm(grads(made))
    each = gradient_norm(grads(made), each=True)
    assert plain is not None
    assert each is not None
    assert torch.equal(plain.total, each.total)
    assert each.least is not None
    assert float(each.least) == 0.0


def test_a_mark_sees_gradients_dropped_replaced_or_written() -> None:
    for change in ("drop", "replace", "write"):
        parameter = parameters(torch.float32)[0]
        mark = GradientMark([parameter])
        assert not mark.gone()
        assert parameter.grad is not None
        if change == "drop":
            parameter.grad = None
        elif change == "replace":
            parameter.grad = parameter.grad.clone()
        else:
            parameter.grad.mul_(2.0)
        assert mark.gone(), change


# --- norms of single gradients


NAMES = ("a.weight", "a.bias", "b.weight")


def _kept(*steps: tuple[float, float, float]) -> GradientNorms:
    norms = GradientNorms()
    for number, values in enumerate(steps):
        norms.keep(number, torch.tensor(values))
    return norms


def test_modules_put_the_norms_of_their_parameters_together() -> None:
    table = _kept((3.0, 4.0, 1.0), (0.0, 0.0, math.nan)).table(NAMES)
    assert table == {"steps": [0, 1], "modules": ["a", "b"], "norms": [[5.0, 0.0], [1.0, "nan"]]}


def test_only_the_last_steps_are_kept() -> None:
    table = _kept(*[(1.0, 1.0, 1.0)] * (STEPS + 5)).table(NAMES)
    assert table["steps"] == list(range(5, STEPS + 5))


def test_steps_without_a_gradient_for_each_parameter_are_left_out() -> None:
    assert _kept((1.0, 1.0, 1.0)).table(("a.weight", "b.weight")) is None
    assert GradientNorms().table(NAMES) is None


def test_a_large_model_is_shown_by_the_first_parts_of_its_names() -> None:
    names = [f"layers.{layer}.block.{part}.weight" for layer in range(30) for part in range(5)]
    norms = GradientNorms()
    norms.keep(0, torch.ones(len(names)))
    table = norms.table(names)
    assert table["modules"] == [f"layers.{layer}.block" for layer in range(30)]
    assert len(table["modules"]) <= MOST_MODULES


def test_numbers_come_back_in_order_and_in_full_precision() -> None:
    values = [torch.tensor(1 / 3, dtype=torch.float64), torch.tensor([2], dtype=torch.int64)]
    assert Packet(values).fetch() == [1 / 3, 2.0]


# --- updates that could make NaN out of finite gradients


class Own(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})


def adam(dtype: torch.dtype = torch.float32, **settings: Any) -> Adam:
    return Adam([nn.Parameter(torch.zeros(2, dtype=dtype))], **{"lr": 0.01, **settings})


@pytest.mark.parametrize("rate", [LR_JUMP * 0.01 * 1.001, math.inf, math.nan])
def test_a_rate_far_above_the_configured_one_is_risky(rate: float) -> None:
    optimizer = adam()
    optimizer.param_groups[0]["lr"] = rate
    assert risky_update(optimizer, (0.01,))


def test_an_epsilon_that_vanishes_in_the_dtype_is_risky() -> None:
    assert not risky_update(adam(torch.bfloat16, eps=1e-8), (0.01,))
    assert risky_update(adam(torch.bfloat16, eps=1e-45), (0.01,))
    assert risky_update(adam(eps=0.0), (0.01,))


def test_a_custom_optimizer_is_risky_if_small_or_a_gradient_is_zero() -> None:
    small = Own([nn.Parameter(torch.zeros(2))])
    large = Own([nn.Parameter(torch.zeros(CHEAP_COPY + 1))])
    assert is_custom(small)
    assert not is_custom(adam())
    assert risky_update(small, (0.01,), 1.0)
    assert not risky_update(large, (0.01,), 1.0)
    assert risky_update(large, (0.01,), 0.0)


# --- stored tensors


NAN = math.nan


def test_the_largest_value_carries_nan_and_inf() -> None:
    good = torch.tensor([1.0, 5.0])
    assert largest([]) is None
    assert float(largest([good, torch.zeros(2)])) == 5.0  # type: ignore[arg-type]
    for bad in (NAN, math.inf):
        number = largest([good, torch.tensor([bad, 0.0])])
        assert number is not None
        assert not math.isfinite(number)


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
def test_extremes_are_finite_if_all_elements_are(bad: float) -> None:
    assert extremes(torch.tensor([1, 2])) is None
    both = extremes(torch.tensor([2.0, -1.0]))
    assert both is not None
    assert both.tolist() == [-1.0, 2.0]
    both = extremes(torch.tensor([2.0, bad]))
    assert both is not None
    assert not bool(torch.isfinite(both).all())


def test_bad_tensors_are_named_with_their_kind() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    loose = nn.Parameter(torch.tensor([NAN]))
    optimizer = torch.optim.SGD([*model.parameters(), loose], lr=0.1)
    with torch.no_grad():
        model[0].bias[1] = math.inf
    model[1].running_var[0] = NAN
    assert bad_parameters({"": model}, optimizer) == ["param:0.bias", "param:group0[4]"]
    assert bad_parameters({"": model}, optimizer, {id(loose)}) == ["param:0.bias"]
    assert bad_buffers({"critic": model}) == ["buffer:critic.1.running_var"]


def test_bad_slots_are_named_by_parameter_once_each_also_inside_lists() -> None:
    first = nn.Parameter(torch.zeros(1))
    second = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([first, second], lr=0.1)
    for parameter in (first, second):
        optimizer.state[parameter] = {"old": [torch.tensor([1.0]), torch.tensor([NAN])], "n": 3}
    named = nn.Module()
    named.first = first
    assert bad_slots({"": named}, optimizer) == ["opt:first/old", "opt:group0[1]/old"]
    assert len(state_tensors(optimizer)) == 4


def test_norm_statistics_are_the_floating_point_buffers_of_norm_layers() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.LayerNorm(2))
    model.register_buffer("mask", torch.full((2,), -math.inf))
    found = norm_statistics({"": model})
    assert [id(t) for t in found] == [id(model[0].running_mean), id(model[0].running_var)]


LARGE = 3 * SCANNED_EACH_STEP + 12


class WithUnused(nn.Module):
    """A large parameter that the loss does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.unused = nn.Parameter(torch.zeros(LARGE // 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


def _scanned(model: WithUnused, hurt: int | None, steps: int) -> tuple[Incident, ...]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    with stepguard.Guard(model, optimizer, config=quiet(snapshots=0)) as guard:
        for step in range(steps):
            if step == 2 and hurt is not None:
                model.unused.data.view(-1)[hurt] = float("nan")
            try:
                guard.step(lambda b: F.mse_loss(model(b), torch.zeros(4, 2)), x)
            except stepguard.TrainingHalted:
                break
        return tuple(guard.incidents)


@pytest.mark.parametrize(
    "place", [0, SCANNED_EACH_STEP - 1, SCANNED_EACH_STEP, 2 * SCANNED_EACH_STEP + 5, LARGE - 1]
)
def test_a_nan_anywhere_in_a_large_parameter_is_found_within_a_round(place: int) -> None:
    torch.manual_seed(0)
    found = _scanned(WithUnused(), place, steps=8)
    assert found[0].verdict.kind == "nonfinite_parameter"
    assert found[0].reading.bad_state == ("param:unused",)
    assert 2 < found[0].step <= 2 + LARGE // SCANNED_EACH_STEP + 2


def test_nothing_is_found_where_nothing_is_hurt() -> None:
    assert _scanned(WithUnused(), None, steps=8) == ()


def test_a_round_takes_a_bounded_number_of_steps_for_a_model_of_any_size() -> None:
    huge = [
        torch.empty(40 * SCANNED_EACH_STEP, device="meta"),
        *(torch.empty(SCANNED_EACH_STEP // 3, device="meta") for _ in range(50)),
    ]
    turn = RotatingScan()
    seen = sum(t.numel() for _ in range(STEPS_A_ROUND) for t in turn.share(huge))
    assert seen >= sum(t.numel() for t in huge)


def test_replaced_memory_is_scanned_where_it_is_now() -> None:
    parameter = nn.Parameter(torch.zeros(2, SCANNED_EACH_STEP))
    turn = RotatingScan()
    tensors: list[Tensor] = [parameter]
    turn.share(tensors)
    parameter.data = torch.ones(SCANNED_EACH_STEP, 2).t()  # cannot be cut without a copy any more
    assert [t.numel() for t in turn.share(tensors)] == [2 * SCANNED_EACH_STEP]
    parameter.data = torch.ones(3)
    assert [t.tolist() for t in turn.share(tensors)] == [[1.0, 1.0, 1.0]]


# --- wrapped torch functions


class Recorder:
    def __init__(self) -> None:
        self.told: list[Any] = []
        self.veto_average = False

    def before_backward(self, root: Tensor) -> None:
        self.told.append(("before", torch_patches.inside_backward()))

    def after_backward(self, root: Tensor, *, failed: bool) -> None:
        self.told.append(("after", failed))

    def after_norm(self, tensors: list[Tensor], norm: Tensor) -> None:
        self.told.append(("norm", len(tensors), float(norm)))

    def after_load(self) -> None:
        self.told.append("load")

    def around_update(
        self, scaler: GradScaler, update: Callable[[Any], None], new_scale: Any
    ) -> None:
        self.told.append("update")
        update(new_scale)

    def before_scaled_step(self, scaler: GradScaler, optimizer: Any) -> None:
        self.told.append("scaled step")

    def averages_nothing(self, average: AveragedModel, model: Any) -> bool:
        self.told.append("average")
        return self.veto_average


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    listener = Recorder()
    stop = torch_patches.listen(listener)
    yield listener
    stop()


def test_originals_are_back_when_the_last_listener_stops() -> None:
    before = (torch.Tensor.backward, clip_grad._get_total_norm, GradScaler.update)
    listeners = [Recorder(), Recorder()]
    stops = [torch_patches.listen(listener) for listener in listeners]
    stops[0]()
    assert torch.Tensor.backward is not before[0]
    stops[1]()
    stops[1]()
    assert (torch.Tensor.backward, clip_grad._get_total_norm, GradScaler.update) == before


def test_a_backward_is_told_before_and_after(recorder: Recorder) -> None:
    number = torch_patches.backwards()
    torch.ones((), requires_grad=True).backward()
    assert recorder.told == [("before", False), ("after", False)]
    assert torch_patches.backwards() == number + 1
    assert not torch_patches.inside_backward()


def test_a_backward_that_raises_is_told_as_failed(recorder: Recorder) -> None:
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.ones(()).backward()
    assert recorder.told[-1] == ("after", True)
    assert not torch_patches.inside_backward()


def test_the_norm_inside_clipping_is_told_with_all_gradients(recorder: Recorder) -> None:
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.tensor([3.0])
    # an iterator, which may be read once only
    norm = nn.utils.clip_grad_norm_(iter(parameters), 1.0)
    assert recorder.told == [("norm", 2, float(norm))]


def test_norms_of_another_kind_are_not_told(recorder: Recorder) -> None:
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    nn.utils.clip_grad_norm_([parameter], 1.0, norm_type=1.0)
    assert recorder.told == []

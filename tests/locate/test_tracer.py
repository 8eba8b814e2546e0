"""The trace: makers by memory, modules by call stack, facts measured at an operation, the record
of what was found, and a step of a watched loop under the live tracer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stepguard.locate import live_trace
from stepguard.locate.blame import FirstBad
from stepguard.locate.live_trace import LiveTracer, leave
from stepguard.locate.operands import (
    Call,
    Flaws,
    broadcast_index,
    broadcasts,
    describe,
    element,
    flaws,
    mask_like,
)
from stepguard.locate.origins import origin_of
from stepguard.locate.source import Line, ModuleSpans
from stepguard.locate.tracer import Tracer
from stepguard.records import Origin
from stepguard.tensors.torch_private import TorchDispatchMode, dispatch_mode_stack

from .cases import BAD_LOSS, noise, step_of

# --- the trace: makers by memory, nodes by number, and who is to blame for each bad output

INF = math.inf


def fresh(model: nn.Module | None = None) -> Tracer:
    return Tracer(ModuleSpans({} if model is None else {"": model}))


def maker(tracer: Tracer, tensor: Tensor) -> Call:
    call = tracer.maker_of(tensor)
    assert call is not None
    return call


def test_part_that_is_overwritten_leaves_the_rest_to_its_maker() -> None:
    tracer = fresh()
    x = torch.tensor([0.0, 0.0, 1.0])
    with tracer:
        y = x.log()
        y[:1] = 5.0
        still_bad = y.sum()
        y[1:] = 5.0
    assert maker(tracer, still_bad).causes[0].op == "aten.log"


def test_uninitialised_memory_is_blamed_when_it_is_read() -> None:
    tracer = fresh()
    # Memory that happens to hold NaN: torch fills it so on demand.
    torch.use_deterministic_algorithms(True)
    try:
        with tracer:
            memory = torch.empty(2)
            allocated = maker(tracer, memory)
            assert not allocated.first_bad
            total = memory.sum()
    finally:
        torch.use_deterministic_algorithms(False)
    assert allocated.first_bad
    assert maker(tracer, total).causes == (allocated,)


def test_memory_that_was_written_outside_the_operations_is_not_uninitialised() -> None:
    tracer = fresh()
    with tracer:
        memory = torch.empty(2)
        memory.numpy()[...] = math.nan
        total = memory.sum()
    (wrote,) = maker(tracer, total).causes
    assert wrote.first_bad and wrote.evidence.opaque == "code"


def test_good_memory_that_turned_bad_between_two_operations_is_blamed_there() -> None:
    tracer = fresh()
    with tracer:
        memory = torch.ones(2) * 2
        memory.numpy()[0] = math.inf
        total = memory.sum()
    made = maker(tracer, total)
    assert not made.first_bad and made.causes[0].first_bad
    assert made.causes[0].evidence.opaque == "code"


# --- the dtype that autocast computes in is seen while the user's code is traced


@pytest.mark.parametrize("dtypes", [(torch.float16, torch.bfloat16), (torch.bfloat16,), ()])
def test_the_dtype_of_the_users_first_context_is_seen(dtypes: tuple[torch.dtype, ...]) -> None:
    model = nn.Linear(4, 1)
    spans = ModuleSpans({"": model})
    tracer = Tracer(spans)
    with spans, tracer:
        for dtype in dtypes:
            with torch.autocast("cpu", dtype=dtype):
                model(torch.ones(2, 4))
        model(torch.ones(2, 4))
    seen = tracer.autocast
    assert seen == (str(dtypes[0]).removeprefix("torch.") if dtypes else None)


# --- modules by call stack in the forward pass and by node numbers in the backward pass


class Twice(nn.Linear):
    """Calls itself once."""

    inner = False

    def forward(self, x: Tensor) -> Tensor:
        if self.inner:
            return super().forward(x)
        self.inner = True
        out: Tensor = self(x)
        self.inner = False
        return out


def test_hooks_of_a_module_belong_to_it() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Twice(2, 2))
    spans = ModuleSpans({"": model})
    seen: list[str | None] = []

    def before(module: nn.Module, args: object) -> None:
        seen.append(spans.current)

    def after(module: nn.Module, args: object, output: Tensor) -> Tensor:
        seen.append(spans.current)
        return output.exp()

    for part in model:
        part.register_forward_pre_hook(before)
        part.register_forward_hook(after)
    with spans:
        out = model(torch.ones(1, 2))
    assert seen == ["0", "0", "1", "1", "1", "1"]
    assert out.grad_fn is not None and spans.created(out.grad_fn._sequence_nr()) == "1"
    assert spans.current is None
    assert [len(part._forward_hooks) for part in model] == [1, 1]


def test_hook_that_raises_leaves_the_stack() -> None:
    model = nn.Sequential(nn.Linear(2, 2))

    def fail(module: nn.Module, args: object, output: Tensor) -> None:
        raise ValueError

    model[0].register_forward_hook(fail)
    with ModuleSpans({"": model}) as spans:
        with pytest.raises(ValueError):
            model(torch.ones(1, 2))
        assert spans.current is None
    assert len(model[0]._forward_hooks) == 1


# --- facts that are measured at the operation that made a bad value


def first_bad(compute: Callable[[], Tensor]) -> Call:
    """The first operation of the computation whose bad result was measured."""
    tracer = Tracer(ModuleSpans({}))
    with tracer:
        compute()
    return next(call for call in tracer.calls if call.output is not None)


HALF = torch.full((2,), 6e4, dtype=torch.float16)
MASKED = torch.tensor([[0.0, 1.0], [-INF, -INF], [-INF, 0.0]])
NOT_ALLOWED = torch.zeros(1, 2).masked_fill(torch.tensor([[True, False]]), -INF)
ALIGNED = (torch.tensor([[1, 2, 1]]), torch.tensor([2]), torch.tensor([3]))
FACTS: dict[str, tuple[Callable[[], Tensor], dict[str, Any]]] = {
    "zero over zero": (
        lambda: torch.zeros(1) / torch.zeros(3).sum(),
        {
            "zero_denominator": True,
            "zero_numerator": True,
            "denominator_from": "aten.sum",
            "denominator_fractional": False,
        },
    ),
    "fraction and no count": (
        lambda: torch.ones(2) / torch.tensor([0.0, 0.5]),
        {"zero_denominator": True, "denominator_fractional": True, "zero_numerator": False},
    ),
    "log 0": (lambda: torch.log(torch.tensor([0.0])), {"argument": "zero", "finite_in": None}),
    "log -1": (lambda: torch.log(torch.tensor([-1.0])), {"argument": "negative"}),
    "log1p -1": (lambda: torch.log1p(torch.tensor([-1.0])), {"argument": "zero"}),
    "root of -2": (lambda: torch.tensor([-2.0]) ** 0.5, {"argument": "negative"}),
    "negative power": (lambda: torch.zeros(1) ** -1.5, {"negative_power": True}),
    "half precision": (
        lambda: HALF + HALF,
        {"half_precision": True, "finite_in": "float32", "dtype_limit": 65504.0},
    ),
    "infinity times zero": (
        lambda: torch.zeros(2) * INF,
        {
            "zero_times_inf": True,
            "intended_inf": True,
            "number_argument": "other",
            "number": INF,
        },
    ),
    "vanished epsilon": (
        lambda: torch.ones_like(HALF) / (torch.zeros_like(HALF) + 1e-8),
        {"eps_vanished": 1e-8},
    ),
    "masked rows": (lambda: torch.softmax(MASKED, -1), {"masked_rows": 1, "rows": 3}),
    "rows by the axis": (
        lambda: torch.softmax(torch.tensor([[-INF, 0.0], [-INF, 0.0]]), 0),
        {"masked_rows": 1, "rows": 2},
    ),
    "mean of nothing": (lambda: torch.zeros(0).mean(), {"reduced_elements": 0}),
    "deviation of one": (lambda: torch.ones(1).std(), {"reduced_elements": 1}),
    "no target counts": (
        lambda: F.cross_entropy(torch.zeros(3, 2), torch.full((3,), -100)),
        {"valid_targets": 0, "targets": 3},
    ),
    "target of probability 0": (
        lambda: F.nll_loss(NOT_ALLOWED, torch.tensor([0])),
        {"zero_target_probability": True, "valid_targets": 1},
    ),
    "target too long for ctc": (
        lambda: F.ctc_loss(torch.randn(2, 1, 3).log_softmax(-1), *ALIGNED, reduction="none"),
        {"ctc_infeasible": 1},
    ),
    "variance below 0": (
        lambda: F.batch_norm(torch.randn(4, 2), torch.zeros(2), torch.tensor([1.0, -1.0])),
        {"argument": "negative"},
    ),
}


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("name", FACTS)
def test_facts_of_the_operation(name: str) -> None:
    compute, expected = FACTS[name]
    found = first_bad(compute).evidence
    assert {field: getattr(found, field) for field in expected} == expected


def test_operands_show_the_element_that_met_the_bad_one() -> None:
    call = first_bad(lambda: torch.log(torch.tensor([2.0, -3.0])))
    assert call.inputs[0].index == (1,) and call.inputs[0].value == -3.0
    assert call.output is not None and call.output.nan == 1


# --- values: which elements are bad, in every layout, and which infinities are a mask


@pytest.mark.parametrize(
    ("value", "shown"), [(complex(1.0, INF), INF), (complex(-INF, 1.0), -INF), (3 + 4j, 5.0)]
)
def test_complex_element_shows_its_bad_part_or_its_magnitude(value: complex, shown: float) -> None:
    assert element(torch.tensor([value]), (0,)) == shown


@pytest.mark.parametrize(
    ("shape", "position"),
    [
        ((2, 3), (1, 2)),
        ((3,), (2,)),
        ((2, 1), (1, 0)),
        ((), ()),
        ((4, 2, 3), None),
        ((2,), None),
        ((2, 2), None),
    ],
)
def test_position_before_a_broadcast(
    shape: tuple[int, ...], position: tuple[int, ...] | None
) -> None:
    assert broadcast_index((1, 2), shape) == position
    assert broadcasts(shape, (2, 3)) == (position is not None)


def sparse(value: float) -> Tensor:
    positions = torch.tensor([[0, 0, 2]])
    values = torch.tensor([1.0, value, 3.0])
    return torch.sparse_coo_tensor(positions, values, (4,), check_invariants=True)


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.tensor([1.0, math.nan]), Flaws(nan=True)),
        (torch.tensor([1.0, -INF]), Flaws(inf=True)),
        (torch.tensor([3e38, 3e38]), Flaws()),
        (HALF, Flaws()),
        (torch.tensor([complex(1.0, math.nan)]), Flaws(nan=True)),
        (torch.tensor([1.0, math.nan]).to(torch.float8_e4m3fn), Flaws(nan=True)),
        (sparse(math.nan), Flaws(nan=True)),
        (sparse(2.0), Flaws()),
        (torch.empty(3, device="meta"), Flaws()),
        (torch.empty(0), Flaws()),
    ],
)
def test_kinds_of_bad_elements(tensor: Tensor, expected: Flaws) -> None:
    assert flaws(tensor) == expected


@pytest.mark.parametrize(
    ("out", "intended", "harmful"),
    [
        (Flaws(inf=True), True, False),
        (Flaws(inf=True), False, True),
        (Flaws(nan=True), True, True),
        (Flaws(), False, False),
    ],
)
def test_infinity_written_on_purpose_is_not_harmful(
    out: Flaws, intended: bool, harmful: bool
) -> None:
    call = Call(index=0, op="aten.mul", stage="forward", out=out, intended_inf=intended)
    assert call.harmful is harmful


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0, -INF, 0.0, 0.0], True),
        ([0.1, 0.2, -INF, 0.4], True),
        ([0.1, 0.2, 0.3, 0.4, 0.5, -INF], False),
        ([0.0, INF], False),
        ([0.0, -INF, math.nan], False),
    ],
)
def test_mask_is_minus_infinity_around_a_constant_or_much_of_it(
    values: list[float], expected: bool
) -> None:
    assert mask_like(torch.tensor(values)) is expected


# --- operators: what they read and write, and the facts of a replay as a whole


ATEN = torch.ops.aten


@pytest.mark.parametrize(
    ("operator", "name", "reads", "writes"),
    [
        (ATEN.add_.Tensor, "self", True, True),
        (ATEN.add_.Tensor, "other", True, False),
        (ATEN.copy_.default, "self", False, True),
        (ATEN.copy_.default, "src", True, False),
        (ATEN.add.out, "out", False, True),
        (ATEN.zeros_like.default, "self", False, False),
        (ATEN.new_zeros.default, "self", False, False),
        (ATEN._foreach_add_.Scalar, "self[3]", True, True),
    ],
)
def test_operators_say_what_they_read_and_write(
    operator: Any, name: str, reads: bool, writes: bool
) -> None:
    described = describe(operator)
    assert (described.reads(name), described.writes(name)) == (reads, writes)


def test_facts_on_the_replay_as_a_whole() -> None:
    model = nn.Sequential(nn.Linear(3, 1))
    step = step_of(lambda batch: batch, model, noise(2, 3))
    step.scale = 8.0
    tracer = fresh(model)
    tracer.unseen |= {"aten.b", "aten.a"}
    call = Call(index=0, op="aten.log", stage="forward", module="0", line=Line(__file__, 3))
    evidence = origin_of(FirstBad(call), tracer, step).evidence
    assert (evidence.scale, evidence.unseen) == (8.0, ("aten.a", "aten.b"))
    assert evidence.batch_max == float(step.micro_batches[0].abs().max())


# --- one step of a watched loop under the live tracer
# --------------------------------------------------------------------------------------------------


def tracer_of(model: nn.Module) -> LiveTracer:
    return LiveTracer(step_of(lambda batch: batch, model))


def live_origin(model: nn.Module, x: Tensor, factor: float) -> Origin | None:
    step = step_of(lambda batch: batch, model)
    tracer = LiveTracer(step)
    tracer.switch(on=True)
    scaled = x * 1.0
    tracer.model_called({"x": scaled})
    loss = model(scaled).sigmoid().mul(factor).log().mean()
    tracer.before_backward(loss)
    loss.backward()
    tracer.after_backward(ours=True)
    tracer.finish()
    assert not dispatch_mode_stack()
    return tracer.origin(step, BAD_LOSS)


def test_data_that_is_bad_before_the_model_is_called_is_input() -> None:
    x = noise(4, 3)
    x[2, 0] = float("nan")
    origin = live_origin(nn.Linear(3, 1), x, 1.0)
    assert origin is not None and origin.phase == "input"


class Passing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_mode_is_taken_from_under_another_one() -> None:
    lower = Passing()  # type: ignore[no-untyped-call]
    lower.__enter__()  # type: ignore[no-untyped-call]
    with Passing() as upper:  # type: ignore[no-untyped-call]
        leave(lower)
        assert list(dispatch_mode_stack()) == [upper]
        leave(lower)
    assert not dispatch_mode_stack()


def test_fault_of_the_tracer_ends_the_trace_and_not_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tracer = tracer_of(nn.Linear(1, 1))
    monkeypatch.setattr(tracer, "_inspect", lambda *arguments: 1 / 0)
    tracer.switch(on=True)
    assert torch.ones(2).sum().item() == 2.0
    tracer.finish()
    assert isinstance(tracer.fault, ZeroDivisionError) and not tracer.calls


def test_full_tracer_records_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_trace, "MOST_CALLS", 2)
    tracer = tracer_of(nn.Linear(1, 1))
    tracer.switch(on=True)
    torch.ones(2).exp().sin().cos()
    tracer.finish()
    assert len(tracer.calls) == 2

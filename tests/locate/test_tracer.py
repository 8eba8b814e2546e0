"""The trace: makers by memory, modules by call stack, and who is to blame for each bad output."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stepguard.locate.operands import Call
from stepguard.locate.source import ModuleSpans
from stepguard.locate.tracer import Tracer

# --- the trace: makers by memory, nodes by number, and who is to blame for each bad output

INF = math.inf


def fresh(model: nn.Module | None = None) -> Tracer:
    return Tracer(ModuleSpans({} if model is None else {"": model}))


def maker(tracer: Tracer, tensor: Tensor) -> Call:
    call = tracer.maker_of(tensor)
    assert call is not None
    return call


def ops(tracer: Tracer) -> list[str]:
    return [call.op for call in tracer.calls]


def test_maker_is_known_through_views_and_in_place_writes() -> None:
    tracer = fresh()
    with tracer:
        x = torch.ones(4)
        y = x.mul(2.0)
        y.view(2, 2)[0].add_(1.0)
    assert maker(tracer, y.view(2, 2)).op == "aten.add_"
    assert maker(tracer, x).op == "aten.ones"


def test_views_and_tests_are_not_recorded() -> None:
    tracer = fresh()
    x = torch.ones(4)
    with tracer:
        torch.isnan(x.view(2, 2)).any()
    assert ops(tracer) == ["aten.any"]


def test_first_bad_operation_and_what_it_spoils() -> None:
    tracer = fresh()
    x = torch.tensor([0.0, 1.0])
    with tracer:
        root = x.log()
        total = root.sum()
    assert maker(tracer, root).first_bad
    spoiled = maker(tracer, total)
    assert not spoiled.first_bad
    assert spoiled.causes == (maker(tracer, root),)
    assert maker(tracer, root).bad_positions == (0,)


def test_part_that_is_overwritten_leaves_the_rest_to_its_maker() -> None:
    tracer = fresh()
    x = torch.tensor([0.0, 0.0, 1.0])
    with tracer:
        y = x.log()
        y[:1] = 5.0
        still_bad = y.sum()
        y[1:] = 5.0
    assert maker(tracer, still_bad).causes[0].op == "aten.log"


def test_mask_is_intended_and_a_weight_is_not() -> None:
    tracer = fresh()
    mask = tracer.store("buffer:mask", torch.tensor([0.0, -INF]))
    weight = tracer.store("param:weight", torch.tensor([0.0, -INF]))
    assert mask.intended_inf and not mask.first_bad
    assert weight.first_bad and not weight.intended_inf


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


def test_number_read_from_a_bad_tensor_leads_back_to_it() -> None:
    tracer = fresh()
    x = torch.tensor(0.0)
    with tracer:
        bad = x.log()
        product = torch.ones(2) * bad.item()
    call = maker(tracer, product)
    assert call.number is None and not call.first_bad
    assert call.causes == (maker(tracer, bad),)


def test_backward_call_leads_to_the_forward_call_that_created_its_node() -> None:
    model = nn.Linear(2, 1, bias=False)
    spans = ModuleSpans({"": model})
    tracer = Tracer(spans)
    with spans, tracer:
        loss = model(torch.ones(1, 2)).exp().sum()
        loss.backward()
    backward = [call for call in tracer.calls if call.stage == "backward"]
    exp = next(call for call in tracer.calls if call.op == "aten.exp")
    gradient = next(call for call in backward if call.node == "ExpBackward0")
    assert tracer.owners[gradient.sequence] is exp
    linear = next(call for call in backward if call.op == "aten.mm")
    assert spans.created(linear.sequence) == ""
    assert exp.line is not None and exp.line.file == __file__


def test_recomputed_block_belongs_to_the_forward() -> None:
    tracer = fresh()
    x = torch.ones(2, requires_grad=True)
    with tracer:
        loss = checkpoint(torch.exp, x, use_reentrant=False).sum()
        loss.backward()
    runs = [call for call in tracer.calls if call.op == "aten.exp"]
    assert [call.stage for call in runs] == ["forward", "forward"]
    assert [call.evidence.recomputed for call in runs] == [False, True]


def test_epsilon_that_half_precision_cannot_hold() -> None:
    tracer = fresh()
    x = torch.ones(2, dtype=torch.float16)
    with tracer:
        small = x + 1e-8
        large = x + 1e-3
    assert maker(tracer, small).rounded_to_zero == 1e-8
    assert maker(tracer, large).rounded_to_zero is None


def test_foreach_operation_blames_the_entry_that_went_bad() -> None:
    tracer = fresh()
    good = torch.ones(2)
    bad = torch.zeros(3)
    with tracer:
        results = torch._foreach_div([good, good], [good, bad[:2]])
    call = maker(tracer, results[1])
    assert call.first_bad
    assert {operand.name: operand.zeros for operand in call.inputs} == {"self": 0, "other": 2}


# --- the dtype that autocast computes in is seen while the user's code is traced


def traced(*dtypes: torch.dtype) -> Tracer:
    model = nn.Linear(4, 1)
    spans = ModuleSpans({"": model})
    tracer = Tracer(spans)
    with spans, tracer:
        for dtype in dtypes:
            with torch.autocast("cpu", dtype=dtype):
                model(torch.ones(2, 4))
        model(torch.ones(2, 4))
    return tracer


@pytest.mark.slow
def test_the_dtype_of_the_users_context_is_seen() -> None:
    assert traced(torch.float16).autocast == "float16"


def test_the_first_context_counts() -> None:
    assert traced(torch.bfloat16, torch.float16).autocast == "bfloat16"


def test_nothing_is_seen_without_autocast() -> None:
    assert traced().autocast is None


# --- modules by call stack in the forward pass and by node numbers in the backward pass


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.seen: list[str | None] = []
        self.spans: ModuleSpans | None = None

    def forward(self, x: Tensor) -> Tensor:
        assert self.spans is not None
        self.seen.append(self.spans.current)
        return self.inner(x).exp()


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError


def test_current_module_and_the_module_of_a_node() -> None:
    model = Outer()
    spans = ModuleSpans({"": model, "criterion": nn.MSELoss()})
    model.spans = spans
    with spans:
        out = model(torch.ones(1, 2))
        after = out.sum()
    assert model.seen == [""]
    assert spans.current is None
    exp = out.grad_fn
    assert exp is not None and after.grad_fn is not None
    linear = exp.next_functions[0][0]
    assert linear is not None
    assert spans.created(exp._sequence_nr()) == ""
    assert spans.created(linear._sequence_nr()) == "inner"
    assert spans.created(after.grad_fn._sequence_nr()) is None


def test_module_that_raises_leaves_the_stack() -> None:
    model = Failing()
    with ModuleSpans({"": model}) as spans:
        with pytest.raises(ValueError):
            model(torch.ones(1))
        assert spans.current is None


def test_criterion_is_outside_the_model() -> None:
    spans = ModuleSpans({"": nn.Linear(1, 1), "criterion": nn.MSELoss()})
    assert spans.belongs_to_model("")
    assert not spans.belongs_to_model("criterion")
    assert not spans.belongs_to_model(None)


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

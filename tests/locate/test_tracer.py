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
from torch.utils.checkpoint import checkpoint

from stepguard.locate import live_trace
from stepguard.locate.blame import FirstBad
from stepguard.locate.live_trace import SEEN_LIVE, LiveTracer, leave
from stepguard.locate.operands import Call, Flaws
from stepguard.locate.origins import line_of, origin_of
from stepguard.locate.source import Line, ModuleSpans
from stepguard.locate.tracer import Tracer
from stepguard.records import Evidence, Origin
from stepguard.state.batch import Step
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


# --- facts that are measured at the operation that made a bad value


def first_bad(compute: Callable[[], Tensor]) -> Call:
    """The first operation of the computation whose bad result was measured."""
    tracer = Tracer(ModuleSpans({}))
    with tracer:
        compute()
    return next(call for call in tracer.calls if call.output is not None)


def evidence(compute: Callable[[], Tensor]) -> Evidence:
    return first_bad(compute).evidence


def test_zero_over_zero_names_divisor_and_what_computed_it() -> None:
    mask = torch.zeros(3)
    found = evidence(lambda: torch.zeros(1) / mask.sum())
    assert found.zero_denominator and found.zero_numerator
    assert found.denominator_from == "aten.sum" and not found.denominator_fractional


def test_a_fractional_divisor_is_told_from_a_count() -> None:
    found = evidence(lambda: torch.ones(2) / torch.tensor([0.0, 0.5]))
    assert found.zero_denominator and found.denominator_fractional and not found.zero_numerator


@pytest.mark.parametrize(
    ("compute", "argument"),
    [
        (lambda: torch.log(torch.tensor([0.0])), "zero"),
        (lambda: torch.log(torch.tensor([-1.0])), "negative"),
        (lambda: torch.log1p(torch.tensor([-1.0])), "zero"),
        (lambda: torch.tensor([-2.0]) ** 0.5, "negative"),
    ],
    ids=["log 0", "log -1", "log1p -1", "root of -2"],
)
def test_the_argument_is_zero_or_negative(compute: Callable[[], Tensor], argument: str) -> None:
    assert evidence(compute).argument == argument


def test_a_negative_base_that_overflows_has_no_missing_root() -> None:
    assert evidence(lambda: torch.tensor([-1e30]) ** 3).argument is None


def test_zero_to_a_negative_power_is_named() -> None:
    assert evidence(lambda: torch.zeros(1) ** -1.5).negative_power


def test_overflow_in_half_precision_is_finite_in_a_wider_dtype() -> None:
    large = torch.full((2,), 6e4, dtype=torch.float16)
    found = evidence(lambda: large + large)
    assert found.half_precision and found.finite_in == "float32"
    assert found.dtype_limit == 65504.0


def test_what_overflows_in_any_dtype_has_no_wider_one() -> None:
    assert evidence(lambda: torch.tensor([0.0]).log()).finite_in is None


def test_an_infinity_times_zero_was_written_on_purpose() -> None:
    found = evidence(lambda: torch.zeros(2) * float("inf"))
    assert found.zero_times_inf and found.intended_inf
    assert (found.number_argument, found.number) == ("other", float("inf"))


def test_an_epsilon_that_half_precision_cannot_hold_has_vanished() -> None:
    zeros = torch.zeros(2, dtype=torch.float16)
    assert (
        evidence(lambda: torch.ones(2, dtype=torch.float16) / (zeros + 1e-8)).eps_vanished == 1e-8
    )


def test_operands_show_the_element_that_met_the_bad_one() -> None:
    call = first_bad(lambda: torch.log(torch.tensor([2.0, -3.0])))
    assert call.inputs[0].index == (1,) and call.inputs[0].value == -3.0
    assert call.output is not None and call.output.nan == 1


# --- facts on rows, reductions and targets

INF = float("inf")


def test_masked_rows_of_a_softmax_are_counted() -> None:
    scores = torch.tensor([[0.0, 1.0], [-INF, -INF], [-INF, 0.0]])
    found = evidence(lambda: torch.softmax(scores, dim=-1))
    assert (found.masked_rows, found.rows) == (1, 3)


def test_the_axis_of_the_softmax_decides_what_a_row_is() -> None:
    scores = torch.tensor([[-INF, 0.0], [-INF, 0.0]])
    found = evidence(lambda: torch.softmax(scores, dim=0))
    assert (found.masked_rows, found.rows) == (1, 2)


def test_a_mean_of_nothing_reduced_no_element() -> None:
    assert evidence(lambda: torch.zeros(0).mean()).reduced_elements == 0


def test_a_deviation_of_one_element_is_named() -> None:
    with pytest.warns(UserWarning, match="degrees of freedom"):
        assert evidence(lambda: torch.ones(1).std()).reduced_elements == 1


def test_targets_that_count_are_counted() -> None:
    scores = torch.zeros(3, 2)
    found = evidence(lambda: F.cross_entropy(scores, torch.full((3,), -100)))
    assert (found.valid_targets, found.targets) == (0, 3)


def test_a_target_class_of_probability_zero_is_named() -> None:
    mask = torch.tensor([[True, False]])
    scores = torch.zeros(1, 2)
    found = evidence(lambda: F.nll_loss(scores.masked_fill(mask, -INF), torch.tensor([0])))
    assert found.zero_target_probability and found.valid_targets == 1


def test_a_ctc_target_that_is_too_long_is_counted() -> None:
    log_p = torch.randn(2, 1, 3).log_softmax(-1)
    targets = torch.tensor([[1, 2, 1]])
    found = evidence(
        lambda: F.ctc_loss(log_p, targets, torch.tensor([2]), torch.tensor([3]), reduction="none")
    )
    assert found.ctc_infeasible == 1


def test_a_running_variance_below_zero_has_no_root() -> None:
    x = torch.randn(4, 2)
    found = evidence(lambda: F.batch_norm(x, torch.zeros(2), torch.tensor([1.0, -1.0])))
    assert found.argument == "negative"


# --- the record: phase, module, line and facts
# --------------------------------------------------------------------------------------------------


def setting(scale: float = 1.0) -> tuple[Tracer, Step]:
    model = nn.Sequential(nn.Linear(3, 1))
    step = step_of(lambda x: model(x).mean(), model, noise(4, 3))
    step.scale = scale
    tracer = Tracer(ModuleSpans({"": model, "criterion": nn.MSELoss()}))
    return tracer, step


def made(module: str | None, **fields: object) -> Call:
    line = Line(__file__, 3)
    call = Call(index=0, op="aten.log", stage="forward", module=module, line=line)
    for name, value in fields.items():
        setattr(call, name, value)
    return call


def test_phase_follows_the_module() -> None:
    traced, step = setting()
    phases = {}
    for module in ("0", "criterion", None):
        phases[module] = origin_of(FirstBad(made(module)), traced, step).phase
    assert phases == {"0": "forward", "criterion": "loss", None: "loss"}


def test_facts_on_the_replay_as_a_whole() -> None:
    traced, step = setting(scale=8.0)
    traced.unseen |= {"aten.b", "aten.a"}
    evidence = origin_of(FirstBad(made("0")), traced, step).evidence
    assert (evidence.scale, evidence.unseen) == (8.0, ("aten.a", "aten.b"))
    batch = step.micro_batches[0]
    assert evidence.batch_max == float(batch.abs().max())


def test_uninitialised_memory_is_placed_where_it_is_read() -> None:
    traced, step = setting()
    reader = made("0")
    allocated = Call(index=0, op="aten.empty", stage="forward", uninitialised=True)
    origin = origin_of(FirstBad(allocated, reader), traced, step)
    assert (origin.op, origin.module) == ("aten.empty", "0")
    assert origin.evidence.uninitialised


def test_stored_parameter_is_counted_and_placed_at_its_consumer() -> None:
    traced, step = setting()
    with torch.no_grad():
        step.model.get_parameter("0.weight")[0, 1] = math.nan
    stored = Call(index=-1, op="param:0.weight", stage="stored", out=Flaws(nan=True))
    origin = origin_of(FirstBad(stored, made("0")), traced, step)
    assert (origin.phase, origin.tensor, origin.module) == ("state", "param:0.weight", "0")
    assert (origin.evidence.bad_elements, origin.evidence.elements) == (1, 3)
    assert origin.inputs[0].index == (0, 1) and origin.micro_batch is None


def test_constant_from_outside_has_no_name() -> None:
    traced, step = setting()
    stored = Call(index=-1, op="constant", stage="stored", out=Flaws(inf=True))
    origin = origin_of(FirstBad(stored, made(None)), traced, step)
    assert (origin.phase, origin.tensor, origin.evidence.constant) == ("loss", None, "inf")


def test_line_of_a_backward_call_is_that_of_its_node_or_of_a_parent() -> None:
    tracer = Tracer(ModuleSpans({}))
    line = Line("model.py", 4)
    tracer.lines[7] = line
    node = Call(index=1, op="aten.mul", stage="backward", sequence=7)
    assert line_of(node, tracer) == line
    behind = Call(index=2, op="aten.add", stage="backward", sequence=9, parents=(node,))
    assert line_of(behind, tracer) == line
    assert line_of(Call(index=3, op="aten.add", stage="backward"), tracer) is None


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


def test_bad_value_of_the_loss_expression_is_named() -> None:
    origin = live_origin(nn.Linear(3, 1), noise(4, 3), 0.0)
    assert origin is not None
    assert (origin.op, origin.phase, origin.method) == ("aten.log", "loss", "live")
    assert origin.source is not None and "test_tracer.py:" in origin.source
    assert SEEN_LIVE in origin.remarks and origin.reproduced is None


def test_data_that_is_bad_before_the_model_is_called_is_input() -> None:
    x = noise(4, 3)
    x[2, 0] = float("nan")
    origin = live_origin(nn.Linear(3, 1), x, 1.0)
    assert origin is not None and origin.phase == "input"


def test_bad_weight_is_named() -> None:
    model = nn.Linear(3, 1)
    with torch.no_grad():
        model.weight[0, 1] = float("nan")
    origin = live_origin(model, noise(4, 3), 1.0)
    assert origin is not None
    assert (origin.phase, origin.tensor, origin.module) == ("state", "param:weight", "")


def test_healthy_step_has_no_origin() -> None:
    assert live_origin(nn.Linear(3, 1), noise(4, 3), 1.0) is None


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

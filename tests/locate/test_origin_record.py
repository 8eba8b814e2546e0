"""The record of what was found: phase, module, line and facts on the replay."""

from __future__ import annotations

import math

import torch
from torch import nn

from stepguard.locate.blame import FirstBad
from stepguard.locate.operands import Call, Flaws
from stepguard.locate.origins import line_of, origin_of
from stepguard.locate.source import Line, ModuleSpans
from stepguard.locate.tracer import Tracer
from stepguard.state.batch import Step

from .cases import noise
from .test_bad_micro_batch import step_of


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

"""Which candidates are worth a trial, and the words to make each of them last."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from engine.parts import incident_of, origin_of, step_of
from scenes import batches, plain_net
from stepguard.probes.whatif import Candidate, candidates
from stepguard.records import Incident, Operand, Reading
from stepguard.state.capsule import WindowStep, window_step

BATCH = batches(1)[0]


def bad_step(**fields: Any) -> WindowStep:
    return replace(window_step(step_of(BATCH, index=9), None, (0.1,)), **fields)


def offered(
    incident: Incident,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    bad: WindowStep | None = None,
    **known: Any,
) -> dict[str, Candidate]:
    optimizer = optimizer or torch.optim.SGD(plain_net().parameters(), lr=0.1)
    given = {"way": (), "usual_norm": None, **known}
    found = candidates(optimizer, incident, bad or bad_step(), **given)
    assert [one.cost for one in found] == sorted(one.cost for one in found)
    return {one.name: one for one in found}


def test_plain_optimizer_gets_no_setting_that_it_does_not_have() -> None:
    assert list(offered(incident_of())) == ["skip", "lr x0.5", "lr x0.1"]


def test_adam_gets_a_larger_epsilon_and_another_memory() -> None:
    adam = torch.optim.Adam(plain_net().parameters(), lr=0.1, eps=1e-8)
    found = offered(incident_of(), adam)
    assert found["eps"].change == "Adam(..., eps=1e-06)"
    assert found["beta2"].settings == (("betas", (0.9, 0.95)),)
    short = torch.optim.Adam(plain_net().parameters(), lr=0.1, betas=(0.9, 0.5))
    assert offered(incident_of(), short)["beta2"].settings == (("betas", (0.9, 0.999)),)
    half = torch.optim.Adam(plain_net().half().parameters(), lr=0.1)
    assert offered(incident_of(), half)["eps"].settings == (("eps", 1e-4),)


def test_guilty_samples_are_left_out_where_the_batch_can_be_cut() -> None:
    found = offered(incident_of(origin=origin_of(samples=(2,))))
    assert found["leave out"].rows == (2,)
    whole = offered(incident_of(origin=origin_of(samples=(0, 1, 2, 3))))
    assert "leave out" not in whole


def test_guilty_micro_batches_are_left_out() -> None:
    incident = incident_of(reading=Reading(step=9, micro_losses=(1.0, math.nan)))
    twice = bad_step(micro_batches=(BATCH, BATCH))
    found = offered(incident, bad=twice)
    assert found["leave out"].label == "leave out micro-batch 2 of 2"


def test_rate_that_has_jumped_or_is_nan_can_be_kept() -> None:
    first = bad_step(index=4)
    jumped = offered(incident_of(), bad=bad_step(lr=(0.9,)), way=(first,))
    assert jumped["keep lr"].rates_at_most == (0.1,)
    assert "keep lr" in offered(incident_of(), bad=bad_step(lr=(math.nan,)), way=(first,))
    back = offered(incident_of(), way=(first, bad_step(index=5, lr=(7.0,))))
    assert back["keep lr"].change == "the rate rises to 7 at step 5: keep 0.1"
    assert "keep lr" not in offered(incident_of(), bad=bad_step(lr=(0.15,)), way=(first,))


def test_value_born_in_half_precision_gets_its_module_in_float32() -> None:
    half = Operand(name="self", dtype="float16")
    found = offered(incident_of(origin=origin_of(module="head", inputs=(half,))))
    assert found["wider module"].wide == "head"
    assert found["float32"].wide == ""
    single = Operand(name="self", dtype="float32")
    assert "float32" not in offered(incident_of(origin=origin_of(module="head", inputs=(single,))))


def test_clipping_is_harder_than_before() -> None:
    assert offered(incident_of(), usual_norm=0.734)["clip"].clip_norm == 0.73
    clipped = offered(incident_of(), bad=bad_step(clip_norm=1.0), usual_norm=5.0)
    assert clipped["clip"].clip_norm == 0.5


def test_loss_scale_strong_decay_and_spoiled_slots_have_their_own() -> None:
    assert offered(incident_of(), bad=bad_step(scale=1024.0))["loss scale"].scale_factor == 1 / 16
    adamw = torch.optim.AdamW(plain_net().parameters(), lr=0.01, weight_decay=400.0)
    assert offered(incident_of(), adamw)["no decay"].settings == (("weight_decay", 0.0),)
    spoiled = incident_of(reading=Reading(step=9, bad_state=("opt:exp_avg",)))
    assert offered(spoiled)["fresh state"].fresh_state


def test_only_what_leaves_the_steps_before_as_they_were_is_late() -> None:
    adam = torch.optim.Adam(plain_net().parameters(), lr=0.1)
    found = offered(incident_of(origin=origin_of(samples=(1,))), adam, own=lambda *_: None)
    late = [name for name, one in found.items() if one.late]
    assert late == ["leave out", "skip"]

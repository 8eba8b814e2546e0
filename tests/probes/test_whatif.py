"""Which candidates are worth a trial, how they are ranked, and that trials leave no trace."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from engine.parts import incident_of, origin_of, step_of
from scenes import batches, difference, plain_net
from stepguard.probes.whatif import Candidate, candidates, in_float32, kept_program, ranked, undone
from stepguard.records import Incident, Operand, Reading
from stepguard.records.probes import TrialOutcome
from stepguard.state.capsule import WindowStep, window_step
from stepguard.state.run_state import RunState

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


# --- ranking


CALM = (1.0, 1.01, 1.0, 0.99)


def outcome(name: str, cost: int, **fields: Any) -> TrialOutcome:
    return TrialOutcome(name=name, label=name, cost=cost, **fields)


def names(outcomes: list[TrialOutcome]) -> list[str]:
    return [one.name for one in outcomes]


def test_what_fails_comes_last_and_the_one_that_got_furthest_before_the_others() -> None:
    short = outcome("short", 0, losses=(1.0,))
    far = outcome("far", 9, losses=(1.0, 1.0))
    untried = outcome("untried", 1, why_not="ValueError: no")
    works = outcome("works", 8, works=True, loss=5.0)
    assert names(ranked([short, untried, far, works], CALM)) == ["works", "far", "short", "untried"]


def test_of_equal_losses_the_cheaper_candidate_wins() -> None:
    dear = outcome("dear", 8, works=True, loss=1.000)
    cheap = outcome("cheap", 2, works=True, loss=1.015)
    assert names(ranked([dear, cheap], CALM)) == ["cheap", "dear"]


def test_a_loss_that_is_clearly_lower_wins_over_the_cost() -> None:
    dear = outcome("dear", 8, works=True, loss=1.0)
    cheap = outcome("cheap", 2, works=True, loss=1.5)
    assert names(ranked([cheap, dear], CALM)) == ["dear", "cheap"]


def test_batches_that_differ_much_make_losses_equal() -> None:
    dear = outcome("dear", 8, works=True, loss=1.0)
    cheap = outcome("cheap", 2, works=True, loss=1.5)
    assert names(ranked([cheap, dear], (1.0, 4.0, 1.0, 4.0))) == ["cheap", "dear"]


def test_batches_that_were_not_trained_on_count_more() -> None:
    fitted = outcome("fitted", 8, works=True, loss=0.1, held_out=9.0)
    plain = outcome("plain", 9, works=True, loss=1.0, held_out=1.0)
    assert names(ranked([fitted, plain], CALM)) == ["plain", "fitted"]


# --- trials leave no trace


def test_weights_optimizer_hooks_and_random_numbers_end_as_they_began() -> None:
    step = step_of(batches(1)[0])
    step.optimizer = torch.optim.Adam(step.model.parameters())
    calls: list[int] = []
    step.optimizer.register_step_post_hook(lambda *_: calls.append(1))
    before = {name: tensor.clone() for name, tensor in step.model.state_dict().items()}
    random = torch.get_rng_state()
    with undone(step, RunState(step.named_roots(), step.optimizer)):
        nn.functional.cross_entropy(step.model(torch.randn(4, 6)), torch.zeros(4).long()).backward()
        step.optimizer.step()
        assert difference(dict(step.model.state_dict()), before) != ""
    assert difference(dict(step.model.state_dict()), before) == ""
    assert not step.optimizer.state
    assert calls == []
    assert torch.equal(torch.get_rng_state(), random)
    step.optimizer.step()
    assert calls == [1]


def test_what_a_fix_puts_into_the_model_is_taken_out_again() -> None:
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    head = model[2]
    with kept_program([model], optimizer):
        model[2] = nn.Identity()
        model.extra = nn.Linear(1, 1)
        model.forward = lambda inputs: inputs
        model[0].register_forward_hook(lambda *_: None)
        optimizer.param_groups[0]["lr"] = 3.0
    assert model[2] is head
    assert not hasattr(model, "extra")
    assert model(torch.zeros(1, 6)).shape == (1, 3)
    assert not model[0]._forward_hooks
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_module_in_half_precision_computes_in_float32_and_returns_what_the_next_one_takes() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False)).half()
    with torch.no_grad():
        model[0].weight.fill_(100.0)
    inputs = torch.full((1, 4), 300.0, dtype=torch.float16)
    assert model[0](inputs).isinf().all()
    with in_float32(model, whole=True):
        out = model(inputs)
    assert out.dtype is torch.float32
    assert out.isfinite().all()
    with in_float32(model[0], whole=False):
        assert model[0](inputs).dtype is torch.float16
    assert "forward" not in vars(model)


def test_module_under_autocast_computes_in_float32() -> None:
    model = nn.Linear(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(torch.ones(1, 2)).dtype is torch.bfloat16
        with in_float32(model, whole=False):
            assert model(torch.ones(1, 2)).dtype is torch.float32

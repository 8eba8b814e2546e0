"""From a verdict to what happens: skip, note, lower the scale, stop; with
budgets that end.
"""

from __future__ import annotations

import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import forked
import stepguard
from scenes import (
    CLASSES,
    LOOPS,
    NAN,
    QUIET,
    Scene,
    bare,
    batches,
    calm_net,
    difference,
    grouped,
    plain_net,
    poisoned,
    quiet,
    state_of,
    stepped,
)
from stepguard import Guard, GuardConfig, Policy, Probes, TrainingHalted
from stepguard.engine.drivers.schedule import scale_rates
from stepguard.records import Action

DATA = batches(12)
BAD = (poisoned(DATA[0]),)
GOOD = (DATA[1],)
NOTED: tuple[Action, ...] = (*Policy().actions, "note")
SOURCE = Path(stepguard.__file__).parents[1]


def _scene(*, fused: bool = False, schedule: bool = False) -> Scene:
    model = calm_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=fused)
    return Scene(
        model,
        optimizer,
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) if schedule else None,
    )


def _rates(scene: Scene) -> list[float]:
    return [float(group["lr"]) for group in scene.optimizer.param_groups]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_limit_of_skips_in_a_row_stops_with_the_weights_from_before(
    loop: str, fused: bool
) -> None:
    scene, reference = _scene(fused=fused), _scene(fused=fused)
    with pytest.raises(TrainingHalted) as halted:
        LOOPS[loop](
            scene, [GOOD, BAD, BAD, BAD, BAD, GOOD], quiet(policy=Policy(max_consecutive=3))
        )
    incident = halted.value.incident
    assert incident.step == 4 and incident.decision is not None
    assert incident.decision.action == "stop" and incident.decision.consecutive == 4
    assert "4 incidents in a row, 3 are allowed" in incident.decision.reason
    bare(reference, [GOOD])
    assert difference(state_of(scene), state_of(reference)) == ""


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
def test_committed_step_resets_what_is_counted_in_a_row(loop: str, fused: bool) -> None:
    scene, reference = _scene(fused=fused), _scene(fused=fused)
    policy = Policy(max_consecutive=3)
    LOOPS[loop](scene, [BAD, BAD, BAD, GOOD, BAD, BAD, BAD, GOOD], quiet(policy=policy))
    bare(reference, [GOOD, GOOD])
    assert difference(state_of(scene), state_of(reference)) == ""


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_total": 2}, "3 incidents in this run, 2 are allowed"),
    ],
    ids=["total"],
)
def test_budget_of_the_whole_run_ends_as_well(
    loop: str, limits: dict[str, int], reason: str
) -> None:
    config = quiet(policy=Policy(**limits))
    with pytest.raises(TrainingHalted, match=reason):
        LOOPS[loop](_scene(), [BAD, GOOD] * 4, config)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
def test_stop_first_stops_at_once(loop: str, fused: bool) -> None:
    scene = _scene(fused=fused)
    with pytest.raises(TrainingHalted) as halted:
        LOOPS[loop](scene, [GOOD, BAD, GOOD], quiet(policy=Policy(actions=("stop",))))
    assert halted.value.incident.step == 1
    reference = _scene(fused=fused)
    bare(reference, [GOOD])
    assert difference(state_of(scene), state_of(reference)) == ""


@pytest.mark.parametrize("nested", [False, True])
def test_rates_that_were_lowered_stay_lowered_under_a_schedule(nested: bool) -> None:
    scene = _scene()
    schedules = torch.optim.lr_scheduler
    flat = schedules.LambdaLR(scene.optimizer, lambda i: 1.0)
    scene.scheduler = flat
    if nested:
        warm = schedules.LinearLR(scene.optimizer, 0.5, total_iters=2)
        scene.scheduler = schedules.SequentialLR(scene.optimizer, [warm, flat], [2])
    scale_rates(scene.optimizer, scene.scheduler, [0.1])
    stepped(scene, [GOOD, GOOD, GOOD])
    assert _rates(scene) == pytest.approx([0.005])


@pytest.mark.parametrize("loop", LOOPS)
def test_note_never_lets_a_non_finite_update_through(loop: str) -> None:
    scene, reference = _scene(), _scene()
    LOOPS[loop](scene, [GOOD, BAD, GOOD], quiet(policy=Policy(actions=("note",))))
    bare(reference, [GOOD, GOOD])
    assert difference(state_of(scene), state_of(reference)) == ""


def test_result_of_a_skipped_step_says_so() -> None:
    results = stepped(_scene(), [GOOD, BAD])
    assert [r.committed for r in results] == [True, False]
    assert results[0].incident is None and results[1].incident is not None
    assert results[1].loss != results[1].loss


# --- how much may be lost
# ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("count", [4, 16, 64])
@pytest.mark.parametrize("loop", LOOPS)
def test_bad_batches_in_a_row_cost_nothing_but_themselves(
    loop: str, count: int, fused: bool
) -> None:
    scene, reference = _scene(fused=fused), _scene(fused=fused)
    before = [(DATA[i % 12],) for i in range(100)]
    LOOPS[loop](scene, [*before, *[BAD] * count, GOOD, GOOD])
    bare(reference, [*before, GOOD, GOOD])
    assert difference(state_of(scene), state_of(reference)) == ""


@pytest.mark.parametrize("loop", LOOPS)
def test_run_stops_when_too_large_a_share_is_lost_and_keeps_the_weights_it_has(loop: str) -> None:
    scene, reference = _scene(), _scene()
    before = [(DATA[i % 12],) for i in range(40)]
    with pytest.raises(TrainingHalted, match="of the samples of the last") as halted:
        LOOPS[loop](scene, [*before, *[BAD] * 300])
    decision = halted.value.incident.decision
    assert decision is not None and decision.rewound_to is None
    bare(reference, before)
    assert difference(state_of(scene), state_of(reference)) == ""


def test_run_that_never_had_a_good_step_stops_soon() -> None:
    with pytest.raises(TrainingHalted) as halted:
        stepped(_scene(), [BAD] * 100)
    assert halted.value.incident.step == 31


# --- a bad start
# --------------------------------------------------------------------------------------------------


class Spare(nn.Module):
    """A linear model with a weight that takes no part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used = nn.Linear(6, CLASSES)
        self.spare = nn.Parameter(torch.full((2,), NAN))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.used(inputs)


def _spare(*, fused: bool = False) -> Scene:
    model = Spare()
    return Scene(model, torch.optim.AdamW(model.parameters(), lr=0.05, fused=fused))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
def test_state_that_is_bad_before_the_first_step_stops_the_run(loop: str, fused: bool) -> None:
    scene = _spare(fused=fused)
    before = state_of(scene)
    with pytest.raises(TrainingHalted) as halted:
        LOOPS[loop](scene, [GOOD, GOOD])
    incident = halted.value.incident
    assert incident.step == 0 and incident.reading.bad_state == ("param:spare",)
    assert incident.decision is not None and "before the first step" in incident.decision.reason
    assert difference(state_of(scene), before) == ""


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
def test_bad_start_may_be_warned_about_once_and_trained_through(loop: str, fused: bool) -> None:
    scene, reference = _spare(fused=fused), _spare(fused=fused)
    config = quiet(policy=Policy(actions=NOTED))
    found = LOOPS[loop](scene, [GOOD] * 6, config)
    warned = (
        list(found) if loop == "watch" else [r.incident for r in found if r.incident is not None]
    )
    assert [(i.step, i.decision.action) for i in warned] == [(0, "note")]
    bare(reference, [GOOD] * 5)  # the first step only warns
    assert difference(state_of(scene), state_of(reference)) == ""


@pytest.mark.parametrize("loop", LOOPS)
def test_bad_start_that_ruins_every_step_still_ends(loop: str) -> None:
    scene = _scene()
    with torch.no_grad():
        next(scene.model.parameters()).fill_(NAN)
    with pytest.raises(TrainingHalted) as halted:
        LOOPS[loop](scene, [GOOD] * 10, quiet(policy=Policy(actions=NOTED, max_consecutive=3)))
    assert halted.value.incident.step == 3


# --- a static loss scale
# ----------------------------------------------------------------------------------------------


def _half_scene() -> Scene:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, CLASSES)).half()
    scene = Scene(model, torch.optim.SGD(model.parameters(), lr=1e-2))
    scene.loss = lambda s, b: nn.functional.cross_entropy(s.model(b[0].half()).float(), b[1]) * 8
    return scene


def test_static_scale_that_overflows_falls_once_to_one_that_works() -> None:
    scene = _half_scene()
    with Guard(scene.model, scene.optimizer, config=quiet(loss_scale=65536.0)) as guard:
        results = [guard.step(scene.loss_fn, batch) for batch in DATA]
        scale = guard._context.scales.static
    assert [r.committed for r in results] == [False] + [True] * 11
    incident = results[0].incident
    assert incident is not None and len(guard.incidents) == 1
    assert "static loss scale 65536 makes the gradients overflow" in incident.verdict.summary
    assert incident.decision is not None and incident.decision.action == "skip"
    assert incident.decision.new_scale == scale and 1.0 < scale < 65536.0


def test_static_scale_is_divided_out_before_norm_and_update() -> None:
    scaled, plain = (
        Scene(m, torch.optim.SGD(m.parameters(), lr=0.05)) for m in (plain_net(), plain_net())
    )
    results = stepped(scaled, grouped(DATA[:4], 2), quiet(loss_scale=256.0))
    expected = stepped(plain, grouped(DATA[:4], 2))
    assert [(r.loss, r.grad_norm) for r in results] == [(r.loss, r.grad_norm) for r in expected]
    assert difference(state_of(scaled), state_of(plain)) == ""


def test_static_scale_reaches_sparse_gradients() -> None:
    model = nn.Embedding(8, 4, sparse=True)
    scene = Scene(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda s, b: s.model(b).square().sum(),
    )
    other = nn.Embedding(8, 4, sparse=True, _weight=model.weight.detach().clone())
    plain = Scene(other, torch.optim.SGD(other.parameters(), lr=0.1), loss=scene.loss)
    stepped(scene, [(torch.tensor([1, 2, 2]),)], quiet(loss_scale=64.0))
    stepped(plain, [(torch.tensor([1, 2, 2]),)])
    assert difference(state_of(scene), state_of(plain)) == ""


# --- what the outside sees
# --------------------------------------------------------------------------------------------

SCRIPT = """
    import torch, stepguard
    from torch import nn
    model = nn.Linear(3, 1)
    optimizer = torch.optim.{optimizer}
    probes = stepguard.Probes(locate_budget=0)
    config = stepguard.GuardConfig(probes=probes, policy=stepguard.Policy(max_consecutive=1))
    {body}
    print("not reached")
"""
STEP = """
    with stepguard.Guard(model, optimizer, config=config) as guard:
        for _ in range(4):
            guard.step(lambda b: model(b).mean(), torch.full((2, 3), float("nan")))
"""
WATCH = """
    stepguard.watch(model, optimizer, config=config)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.full((2, 3), float("nan"))).mean().backward()
        optimizer.step()
"""


def _run(script: str) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "PATH": ""}
    return forked.python(["-W", "error", "-c", script], variables=environment)


@pytest.mark.parametrize("body", [STEP, WATCH], ids=["step", "watch"])
@pytest.mark.parametrize(
    "optimizer", ["SGD(model.parameters(), lr=0.1)", "AdamW(model.parameters(), fused=True)"]
)
def test_uncaught_halt_ends_the_process_with_code_three(optimizer: str, body: str) -> None:
    script = textwrap.dedent(SCRIPT).format(optimizer=optimizer, body=textwrap.dedent(body))
    done = _run(script)
    assert done.returncode == 3, done.stderr
    # one line for people, one for launchers
    told = [
        line for line in done.stderr.splitlines() if "Stopping" in line or "halted" in line.lower()
    ]
    assert len(told) == 2 and told[1].startswith("stepguard: HALTED step=1 "), done.stderr
    assert "Traceback" not in done.stderr
    assert "not reached" not in done.stdout


def test_other_uncaught_exceptions_keep_their_own_exit_code() -> None:
    script = textwrap.dedent(
        """
        import torch, stepguard
        from torch import nn
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        policy = stepguard.Policy(actions=("stop",))
        probes = stepguard.Probes(locate_budget=0)
        config = stepguard.GuardConfig(probes=probes, terminal="quiet", policy=policy)
        try:
            with stepguard.Guard(model, optimizer, config=config) as guard:
                guard.step(lambda b: model(b).mean(), torch.full((2, 3), float("nan")))
        except stepguard.TrainingHalted:
            raise KeyError("the user's own") from None
        """
    )
    done = _run(script)
    assert done.returncode == 1 and "KeyError" in done.stderr


def test_skips_are_counted_and_loud(capsys: pytest.CaptureFixture[str]) -> None:
    stepped(_scene(), [GOOD, BAD, BAD, GOOD, BAD, BAD], GuardConfig(probes=Probes(locate_budget=0)))
    said = capsys.readouterr()
    assert said.out == ""
    lines = [line for line in said.err.splitlines() if "of this kind" in line]
    assert "step 1" in said.err and "skipped" in said.err.lower()
    assert len(lines) == 2
    assert "step 2" in lines[0] and "2nd of this kind, 2 in a row" in lines[0]
    assert "step 5" in lines[1] and "4th of this kind, 2 in a row" in lines[1]


def test_healthy_run_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    stepped(_scene(), [GOOD] * 4, GuardConfig(probes=Probes(locate_budget=0)))
    assert capsys.readouterr() == ("", "")


def test_quiet_guard_says_nothing_and_still_records(capsys: pytest.CaptureFixture[str]) -> None:
    results: list[Any] = stepped(_scene(), [GOOD, BAD], QUIET)
    assert capsys.readouterr() == ("", "") and results[1].incident is not None

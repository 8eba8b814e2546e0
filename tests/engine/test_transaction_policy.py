"""From a verdict to what happens: one step as one transaction, with budgets that end, and the line
that a launcher reads.
"""

from __future__ import annotations

import re
import subprocess
import textwrap
import warnings
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

import forked
import stepguard
from engine.parts import incident_of
from pairwise import pairwise
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
from stepguard.engine.incident import situation
from stepguard.engine.incident.run_facts import (
    leaves_out,
    let_through,
    not_applied,
    rewinds,
    skipped_after_all,
    without_micro_batches,
)
from stepguard.engine.incident.situation import exit_line
from stepguard.engine.protect import GuardDisarmed
from stepguard.engine.transaction import Transaction
from stepguard.journal import read_run
from stepguard.records import Action, Decision, Verdict

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
def test_run_stops_when_too_large_a_share_is_lost_and_keeps_the_weights_it_has(loop: str) -> None:
    scene, reference = _scene(), _scene()
    before = [(DATA[i % 12],) for i in range(40)]
    with pytest.raises(TrainingHalted, match="of the samples of the last") as halted:
        LOOPS[loop](scene, [*before, *[BAD] * 300])
    decision = halted.value.incident.decision
    assert decision is not None and decision.rewound_to is None
    bare(reference, before)
    assert difference(state_of(scene), state_of(reference)) == ""


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
    def made() -> Scene:
        torch.manual_seed(0)
        model = nn.Embedding(8, 4, sparse=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Scene(model, optimizer, loss=lambda s, b: s.model(b).square().sum())

    scaled, plain = made(), made()
    stepped(scaled, [(torch.tensor([1, 2, 2]),)], quiet(loss_scale=64.0))
    stepped(plain, [(torch.tensor([1, 2, 2]),)])
    assert difference(state_of(scaled), state_of(plain)) == ""


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


# --- what is told is what was done


def _small_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def test_panel_and_journal_say_what_was_left_out_of_a_partly_committed_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = plain_net()
    config = GuardConfig(run_dir=tmp_path, probes=Probes(locate_budget=0))
    before = model[0].weight.detach().clone()
    with Guard(model, _small_sgd(model), config=config) as guard:
        scene = Scene(model, guard.optimizer)
        result = guard.step(scene.loss_fn, poisoned(DATA[0]), DATA[1])
    assert result.committed
    assert not torch.equal(model[0].weight, before)
    told = capsys.readouterr().err
    assert "micro-batch 1 of 2" in told
    assert "as before the step" not in told
    (incident,) = read_run(tmp_path).incidents
    assert incident.decision is not None
    assert incident.decision.action == "leave_out"
    assert incident.decision.left_out == "micro-batch 1 of 2"


@pytest.mark.filterwarnings("ignore::stepguard.engine.protect.NotExplained")
@pytest.mark.parametrize(
    ("part", "told"),
    [
        ("put_back", r"rewind to step .* failed"),
        ("plan", "could not decide because of an internal fault"),
    ],
)
@pytest.mark.parametrize("loop", LOOPS)
def test_fault_in_a_rewind_stops_the_run_instead_of_flying_into_the_loop(
    loop: str, part: str, told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise ArithmeticError("a fault of the guard's own")

    model = plain_net()
    scene = Scene(model, _small_sgd(model))
    monkeypatch.setattr(f"stepguard.engine.recover.rewind.Rewinder.{part}", broken)
    damage = [(batch,) for batch in DATA[:6]]
    scene.loss = _damaging(at=4)
    config = quiet(run_dir=tmp_path, snapshot_every=1)
    with pytest.raises(TrainingHalted, match=told):
        LOOPS[loop](scene, damage, config)
    (incident,) = read_run(tmp_path).incidents
    assert incident.decision is not None
    assert incident.decision.action == "stop"


def _damaging(at: int) -> Any:
    """A loss that damages a stored weight, as a broken kernel does, in the `at`-th step."""
    calls = [0]

    def loss(scene: Scene, batch: Any) -> Any:
        calls[0] += 1
        if calls[0] == at:
            with torch.no_grad():
                scene.model[0].weight[0, 0] = NAN
        inputs, targets = batch
        return nn.functional.cross_entropy(scene.model(inputs), targets)

    return loss


def test_decision_that_could_not_be_applied_is_recorded_as_a_skip(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(self: Transaction, incident: Any) -> Any:
        raise ArithmeticError("a fault of the guard's own")

    model = plain_net()
    monkeypatch.setattr(Transaction, "apply", broken)
    config = quiet(run_dir=tmp_path, policy=Policy(actions=("leave_out", "skip", "stop")))
    with pytest.warns(GuardDisarmed), Guard(model, _small_sgd(model), config=config) as guard:
        guard.step(Scene(model, guard.optimizer).loss_fn, poisoned(DATA[0]))
    (incident,) = read_run(tmp_path).incidents
    assert incident.decision is not None
    assert incident.decision.action == "skip"


def test_steps_that_could_not_be_decided_on_count_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise ArithmeticError("a fault of the guard's own")

    monkeypatch.setattr(situation, "choose_remedy", broken)
    model = plain_net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = quiet(policy=Policy(max_consecutive=3))
        guard = Guard(model, _small_sgd(model), config=config)
        with guard, pytest.raises(TrainingHalted, match="4 incidents in a row"):
            for _ in range(10):
                guard.step(Scene(model, guard.optimizer).loss_fn, poisoned(DATA[0]))
    assert [incident.decision.action for incident in guard.incidents if incident.decision] == [
        *["skip"] * 3,
        "stop",
    ]


# --- a decision says what was really done


INSTEAD = {"retry": "skip", "undo": "skip", "rewind": "stop", "heal": "stop"}


@pytest.mark.parametrize("action", get_args(Action))
def test_decision_says_what_was_really_done(action: Action) -> None:
    decision = Decision(action=action, reason="why", left_out="sample 2")
    decided = incident_of(decision=decision)
    after = not_applied(decided).decision
    assert after is not None and after.action == INSTEAD.get(action, action)
    failed = f"{action} failed because of an internal fault of stepguard"
    assert after.reason == (failed if action in INSTEAD else "why")
    # only a finite anomaly that is only told is let through
    spike, bad = (Verdict(kind=k, severity="incident") for k in ("spike", "nonfinite_loss"))
    assert let_through(spike, decided) == (action == "note")
    assert let_through(spike, None) and not let_through(bad, decided)
    cut = without_micro_batches(decided, [0], 2).decision
    assert cut is not None and cut.left_out == "micro-batch 1 of 2"
    skipped = skipped_after_all(decided)
    assert skipped is not None and skipped.decision is not None
    assert skipped.decision.action == ("skip" if action == "leave_out" else action)
    undecided = incident_of()
    assert not_applied(undecided) is undecided
    assert not rewinds(undecided) and not leaves_out(undecided) and not rewinds(None)


ENDS: dict[str, tuple[Policy, list[Any], int, str, list[Any]]] = {
    "in a row": (
        Policy(max_consecutive=3),
        [GOOD, BAD, BAD, BAD, GOOD, BAD, BAD, BAD, BAD, GOOD],
        8,
        "4 incidents in a row, 3 are allowed",
        [GOOD, GOOD],
    ),
    "in the run": (
        Policy(max_total=2),
        [BAD, GOOD] * 4,
        4,
        "3 incidents in this run, 2 are allowed",
        [GOOD, GOOD],
    ),
    "no good step yet": (Policy(), [BAD] * 100, 31, "", []),
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("budget", ENDS)
def test_budget_of_bad_steps_ends_with_the_weights_from_before(
    budget: str, loop: str, fused: bool
) -> None:
    policy, steps, last, reason, committed = ENDS[budget]
    scene, reference = _scene(fused=fused), _scene(fused=fused)
    with pytest.raises(TrainingHalted, match=reason or None) as halted:
        LOOPS[loop](scene, steps, quiet(policy=policy))
    incident = halted.value.incident
    assert incident.step == last and incident.decision is not None
    assert incident.decision.action == "stop"
    if budget == "in a row":
        assert incident.decision.consecutive == 4
    bare(reference, committed)
    assert difference(state_of(scene), state_of(reference)) == ""


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
def test_stop_first_stops_at_once(loop: str, fused: bool) -> None:
    scene, reference = _scene(fused=fused), _scene(fused=fused)
    with pytest.raises(TrainingHalted) as halted:
        LOOPS[loop](scene, [GOOD, BAD, GOOD], quiet(policy=Policy(actions=("stop",))))
    assert halted.value.incident.step == 1
    bare(reference, [GOOD])
    assert difference(state_of(scene), state_of(reference)) == ""


@pytest.mark.parametrize("loop", LOOPS)
def test_note_never_lets_a_non_finite_update_through(loop: str) -> None:
    scene, reference = _scene(), _scene()
    LOOPS[loop](scene, [GOOD, BAD, GOOD], quiet(policy=Policy(actions=("note",))))
    bare(reference, [GOOD, GOOD])
    assert difference(state_of(scene), state_of(reference)) == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loop", "count", "fused"), pairwise(product(LOOPS, [4, 64], [False, True]))
)
def test_bad_batches_in_a_row_cost_nothing_but_themselves(
    loop: str, count: int, fused: bool
) -> None:
    scene, reference = _scene(fused=fused), _scene(fused=fused)
    before = [(DATA[i % 12],) for i in range(100)]
    LOOPS[loop](scene, [*before, *[BAD] * count, GOOD, GOOD])
    bare(reference, [*before, GOOD, GOOD])
    assert difference(state_of(scene), state_of(reference)) == ""


def test_healthy_run_and_quiet_guard_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    stepped(_scene(), [GOOD] * 4, GuardConfig(probes=Probes(locate_budget=0)))
    good, bad = stepped(_scene(), [GOOD, BAD], QUIET)
    assert capsys.readouterr() == ("", "")
    assert (good.committed, bad.committed) == (True, False)
    assert good.incident is None and bad.incident is not None and bad.loss != bad.loss


def test_line_is_exactly_what_launchers_are_told_to_grep_for() -> None:
    state = Path("runs/a/checkpoints/step-40")
    assert exit_line(step=48, cause="SG204", restart="same-fault", state=state) == (
        "stepguard: HALTED step=48 cause=SG204 restart=same-fault state=runs/a/checkpoints/step-40"
    )
    for nothing in (None, ""):
        line = exit_line(step=0, cause="nonfinite_loss", restart="change-code", state=nothing)
        assert line.endswith(" restart=change-code state=none")
    odd = "a path\nwith\x1b[2J/ blanks"
    line = exit_line(step=7, cause="two words\n", restart="helps", state=odd)
    found = re.fullmatch(r"stepguard: HALTED step=7 cause=(\S+) restart=helps state=(.+)", line)
    assert found is not None and found[2] == "a path?with?[2J/ blanks"
    with pytest.raises(ValueError, match="same-fault"):
        exit_line(step=1, cause="SG204", restart="perhaps")  # type: ignore[arg-type]

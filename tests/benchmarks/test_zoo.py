"""Every case of the zoo fails as it claims, its fix works, and stepguard answers each of them
rightly. So it does where a function that no tracer can look into is the origin.
"""

from __future__ import annotations

import random
import subprocess
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from zoo.case import Case
from zoo.catalogue import KNOWN, UNSEEN, chosen, load
from zoo.prove import problems
from zoo.score import CONTROL_STEPS, Answer, score
from zoo.tools import named, stepguard

from benchmarks import opaque
from forked import FULL
from stepguard import Guard, GuardConfig, watch
from stepguard.judge import History
from stepguard.judge.decide import LOST_WINDOW

ROOT = Path(__file__).parents[2]
CASES = list(load().values())
INCIDENTS = [case for case in CASES if not case.control]
CONTROLS = [case for case in CASES if case.control]
SAMPLE = 9


def scored() -> list[Case]:
    """One incident of the core for each cause in each phase; all with STEPGUARD_FULL=1."""
    if FULL:
        return INCIDENTS
    core = [case for case in INCIDENTS if case.core]
    shuffled = random.Random(0).sample(core, len(core))
    one = {(case.accepted[0], case.expected.phase): case for case in shuffled}
    return [case for case in core if case in one.values()]


def sample(cases: list[Case]) -> list[Case]:
    """The same few each time; all with STEPGUARD_FULL=1."""
    few = {case.name for case in random.Random(0).sample(cases, SAMPLE)}
    return [case for case in cases if FULL or case.name in few]


def proven() -> list[Case]:
    """A fixed sample, and every case of a file that differs from main or from the last commit.

    All of them with STEPGUARD_FULL=1, where git knows no main, or where what proves has changed.
    """
    changed: set[str] = set()
    for base in ("main...HEAD", "HEAD~1"):
        command = ["git", "diff", "--name-only", base, "--", "zoo"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            return CASES
        changed |= {Path(line).stem for line in done.stdout.splitlines()}
    if FULL or not changed <= {*KNOWN, *UNSEEN}:
        return CASES
    few = sample(CASES)
    return [case for case in CASES if case in few or case.group in changed]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Let torch warn about what some cases do on purpose, such as a deviation of one element."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def name(case: Case) -> str:
    return case.name


@pytest.mark.parametrize("case", proven(), ids=name)
def test_case_is_as_it_claims_and_its_fix_works(case: Case) -> None:
    assert problems(case) == []


@pytest.mark.parametrize("case", scored(), ids=name)
def test_incident_is_named_and_survived(case: Case) -> None:
    row = score(case, stepguard)
    assert row.right, f"{row.marks} {row.causes} {row.said} {row.error}"


@pytest.mark.parametrize("case", sample(CONTROLS), ids=name)
def test_healthy_run_raises_no_alarm(case: Case) -> None:
    row = score(case, stepguard)
    assert row.right, f"{row.false_alarms} alarms: {row.causes} {row.said} {row.error}"


def test_controls_run_longer_than_a_guard_remembers() -> None:
    config = GuardConfig()
    memories = (History().window, config.snapshots.probation, LOST_WINDOW)
    assert max(memories) + 32 <= CONTROL_STEPS


def test_every_case_names_public_threads() -> None:
    assert [case.name for case in INCIDENTS if case.group in KNOWN and not case.incidents] == []


def test_a_group_stands_for_its_cases() -> None:
    assert {case.group for case in chosen(["masks"])} == {"masks"}
    with pytest.raises(SystemExit, match="neither a case nor a group"):
        chosen(["no_such_case"])


def test_a_wrong_answer_costs_marks() -> None:
    """The scorer can fail: the same run measured against another answer."""
    case = load()["nan_feature_in_one_sample"]
    other = Case(
        name=case.name,
        incidents=case.incidents,
        build=case.build,
        expected=load()["mha_all_keys_masked"].expected,
        accepted=("SG204",),
    )
    row = score(other, stepguard)
    assert (row.place, row.sample, row.cause) == (False, False, False)


def test_a_wrong_claim_is_found_out() -> None:
    """The prover can fail: a healthy run that claims to be an incident."""
    case = load()["ok_double_where"]
    claims = Case(
        name=case.name,
        incidents=(),
        build=case.build,
        expected=load()["mha_all_keys_masked"].expected,
    )
    assert problems(claims)
    assert torch.is_grad_enabled()


def test_core_has_two_cases_of_each_kind_and_every_control() -> None:
    kinds = Counter()
    for case in INCIDENTS:
        if case.core:
            kinds[case.accepted[0], case.expected.phase, case.expected.op] += 1
    everything = {(c.accepted[0], c.expected.phase, c.expected.op) for c in INCIDENTS}
    assert set(kinds) == everything and max(kinds.values()) == 2
    assert all(case.core for case in CONTROLS)


def test_another_tool_is_a_function_of_the_scene() -> None:
    """A tool that says nothing but the step gets that mark and no other."""
    case = load()["nan_feature_in_one_sample"]
    row = score(case, lambda scene: Answer(step=case.wanted.step))
    assert (row.detect, row.place, row.sample, row.cause) == (True, False, False, False)
    assert named("zoo.tools:stepguard") is stepguard
    with pytest.raises(SystemExit, match="is not a tool"):
        named("nothing")


# --- functions that no tracer can look into
# --------------------------------------------------------------------------------------------------

SCENES = list(opaque.scenes())


HERE = range(0, len(SCENES), 1 if FULL else 2)


@pytest.mark.parametrize("number", HERE, ids=lambda number: SCENES[number].name)
def test_opaque_function_is_the_origin(number: int) -> None:
    """SG208; drivers in turn. Every second scene, all with STEPGUARD_FULL=1."""
    scene, driver = SCENES[number], opaque.DRIVERS[number % len(opaque.DRIVERS)]
    assert opaque.wrong(scene, opaque.incidents_of(scene, driver)) == ""


@pytest.mark.full
@pytest.mark.parametrize("driver", opaque.DRIVERS)
def test_opaque_functions_are_the_origin_under_every_driver(driver: str) -> None:
    """Also with the two thirds of the scenes that the cases above have under another one."""
    others = [s for n, s in enumerate(SCENES) if driver != opaque.DRIVERS[n % len(opaque.DRIVERS)]]
    assert len(others) >= 2 * len(SCENES) // 3
    faults = {s.name: opaque.wrong(s, opaque.incidents_of(s, driver)) for s in others}
    assert not any(faults.values()), faults


def test_there_are_forty_of_them() -> None:
    assert len([scene for scene in SCENES if scene.way is not None]) >= 40


def test_mask_of_an_opaque_function_is_not_blamed_for_another_fault() -> None:
    def call(self: opaque.Opaque, x: torch.Tensor) -> torch.Tensor:
        weights = opaque.Mask.apply(x @ x.T).softmax(-1)
        return (weights @ x).div(0.0 if opaque.armed["forward"] else 1.0)

    scene = opaque.Scene(name="", way="forward", op="", call=call)
    origin = opaque.incidents_of(scene, "step")[0].origin
    assert origin is not None and (origin.op, origin.module) == ("aten.div", opaque.PLACE)


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_function_in_the_loss_is_named_when_the_next_bad_step_is_traced(way: str) -> None:
    """No replay of a watched loop reaches its loss expression."""
    torch._dynamo.utils.counters.clear()
    model = torch.nn.Linear(3, 3)

    def batches() -> Iterator[torch.Tensor]:
        for _ in range(2):
            opaque.armed[way] = True
            yield torch.randn(4, 3)
        opaque.armed[way] = False

    def loss_fn(x: torch.Tensor) -> torch.Tensor:
        return opaque.Scale.apply(model(x)).square().mean()

    incident = opaque.driven("watch", model, loss_fn, batches())[-1]
    origin = incident.origin
    assert origin is not None and (origin.op, origin.module) == ("Scale", None)
    assert origin.method == "live" and origin.phase == ("loss" if way == "forward" else way)
    assert [(one.code, one.certainty) for one in incident.findings] == [("SG208", "likely")]


def test_optimizer_whose_kernel_writes_the_weights_is_named() -> None:
    class Kernel(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                parameter.detach().numpy()[0] = float("nan")

    model = torch.nn.Linear(3, 1)
    optimizer = Kernel(model.parameters(), lr=0.1)
    config = GuardConfig(terminal="quiet")
    with Guard(model, optimizer, config=config) as guard:
        incident = guard.step(lambda x: model(x).square().mean(), torch.ones(2, 3)).incident
    assert incident is not None and incident.origin is not None
    assert (incident.origin.phase, incident.origin.op) == ("optimizer", "Kernel.step")
    assert incident.findings[0].code == "SG208"


class Rescale(torch.nn.Linear):
    """Computes with NumPy in the middle of its forward."""

    factor = float("nan")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y * torch.from_numpy(y.detach().numpy() * self.factor)


def test_values_from_numpy_in_plain_code_of_a_module_are_not_a_bad_input() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), Rescale(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = GuardConfig(terminal="quiet")
    with Guard(model, optimizer, config=config) as guard:
        guard.step(lambda x: model(x).mean(), torch.ones(2, 4))
    origin, findings = guard.incidents[0].origin, guard.incidents[0].findings
    assert origin is not None and origin.module == "1"
    assert (findings[0].code, findings[0].certainty) == ("SG208", "likely")


@pytest.mark.parametrize("made_by", ["module", "loop", "batch object"])
def test_values_from_numpy_are_judged_alike_in_a_live_trace(made_by: str) -> None:
    """The root is not called, so nothing can be run again; the second bad step is traced."""

    class Data:
        def __init__(self, x: torch.Tensor) -> None:
            self.x = x

    class Takes(torch.nn.Linear):
        def forward(self, data: Data) -> torch.Tensor:  # type: ignore[override]
            return super().forward(data.x)

    model = torch.nn.Sequential(Takes(4, 4), Rescale(4, 1))
    model[1].factor = float("nan") if made_by == "module" else 1.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = GuardConfig(terminal="quiet")
    with watch(model, optimizer, config=config) as guard:
        for _ in range(2):
            x = torch.from_numpy(
                torch.ones(2, 4).numpy() * (1.0 if made_by == "module" else np.nan)
            )
            hidden = (
                torch.nn.Linear.forward(model[0], x) if made_by == "loop" else model[0](Data(x))
            )
            model[1](hidden).mean().backward()
            optimizer.step()
    incident = guard.incidents[-1]
    assert incident.origin is not None and incident.origin.method == "live"
    expected = "SG208" if made_by == "module" else "SG101"
    assert incident.findings[0].code == expected
    if made_by == "module":
        assert incident.origin.module == "1" and incident.origin.op == "Rescale.forward"

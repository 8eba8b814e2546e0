"""Every case of the zoo fails as it claims, its fix works, and stepguard answers each of them
rightly.
"""

from __future__ import annotations

import random
import subprocess
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from zoo.case import Case
from zoo.catalogue import KNOWN, UNSEEN, chosen, load
from zoo.prove import problems
from zoo.score import CONTROL_STEPS, Answer, score
from zoo.tools import named, stepguard

from forked import FULL
from stepguard import GuardConfig
from stepguard.judge import History
from stepguard.judge.decide import LOST_WINDOW

ROOT = Path(__file__).parents[2]
CASES = list(load().values())
INCIDENTS = [case for case in CASES if not case.control]
# Two of each kind; the rest is scored at full length.
SCORED = [case for case in INCIDENTS if FULL or case.core]
CONTROLS = [case for case in CASES if case.control]
SAMPLE = 48


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
    sample = {case.name for case in random.Random(0).sample(CASES, SAMPLE)}
    return [case for case in CASES if case.name in sample or case.group in changed]


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


@pytest.mark.parametrize("case", SCORED, ids=name)
def test_incident_is_named_and_survived(case: Case) -> None:
    row = score(case, stepguard)
    assert row.right, f"{row.marks} {row.causes} {row.said} {row.error}"


@pytest.mark.parametrize("case", CONTROLS, ids=name)
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

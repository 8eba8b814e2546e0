"""Settings are checked where they are built; the message names the value and what is allowed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest

from stepguard import ConfigError, GuardConfig, Policy, Probes, Ranks, Snapshots


@pytest.mark.parametrize(
    ("cls", "setting", "message"),
    [
        (
            Policy,
            {"actions": ("repeat",)},
            "'repeat' is not known; use one of 'leave_out', 'skip', 'retry', 'undo', 'heal', "
            "'rewind', 'stop'",
        ),
        (Policy, {"actions": ()}, "Policy.actions is empty"),
        (
            Policy,
            {"max_consecutive": -1},
            "max_consecutive=-1 must be a whole number of at least 0",
        ),
        (Policy, {"max_total": True}, "max_total=True"),
        (Policy, {"max_rewinds": None}, "max_rewinds=None"),
        (
            Policy,
            {"max_lost_share": 1.5},
            "max_lost_share=1.5 must be a number above 0 and up to 1",
        ),
        (Policy, {"max_lost_share": math.nan}, "max_lost_share=nan"),
        (GuardConfig, {"clip_norm": 0.0}, "clip_norm=0.0 must be a finite number above 0"),
        (GuardConfig, {"clip_norm": math.inf}, "clip_norm=inf"),
        (GuardConfig, {"clip_norm": "1"}, "clip_norm='1'"),
        (GuardConfig, {"loss_scale": -2.0}, "loss_scale=-2.0"),
        (Probes, {"spike_sigmas": math.nan}, "Probes.spike_sigmas=nan"),
        (
            Snapshots,
            {"every": 0},
            "Snapshots.every=0 must be a whole number of at least 1, or 'auto'",
        ),
        (Snapshots, {"every": "often"}, "every='often'"),
        (GuardConfig, {"checkpoint_every": 0}, "checkpoint_every=0"),
        (GuardConfig, {"policy": "skip"}, "policy='skip' is not a stepguard.Policy"),
        (
            GuardConfig,
            {"capsule": "some"},
            "'some' is not known; use one of 'full', 'no-data', 'off'",
        ),
        (GuardConfig, {"terminal": "loud"}, "'loud' is not known"),
        (GuardConfig, {"terminal": None}, "None is not known; use one of 'auto', 'quiet'"),
        (GuardConfig, {"run_dir": 3}, "run_dir=3 must be the path of a folder, or None"),
        (GuardConfig, {"run_dir": " "}, "run_dir=' ' must be the path of a folder, or None"),
        (GuardConfig, {"human_log": True}, "human_log=True must be the path of a folder, or None"),
        (Snapshots, {"count": 1}, "count=1 must be 0 or a whole number of at least 2"),
        (Ranks, {"timeout": 0}, "Ranks.timeout=0 must be a finite number above 0"),
        (
            GuardConfig,
            {"snapshots": 3},
            "snapshots=3 is not a stepguard.Snapshots; give Snapshots(...)",
        ),
        (Probes, {"locate_budget": "6"}, "locate_budget='6' must be a finite number of at least 0"),
        (GuardConfig, {"build": 7}, "build=7 must look like"),
        (
            GuardConfig,
            {"build": "train.py"},
            "build='train.py' must look like 'package.module:function'",
        ),
        (GuardConfig, {"labels_key": 0}, "labels_key=0 must be a name, or None"),
        (GuardConfig, {"sinks": []}, "sinks=[] must be a tuple"),
        (Probes, {"outliers": True}, "True is not known; use one of 'note'"),
        (Policy, {"max_lost_share": "0.5"}, "max_lost_share='0.5' must be a number"),
        (Policy, {"exceptions": "ignore"}, "'ignore' is not known; use one of 'raise', 'skip'"),
    ],
)
def test_wrong_setting_is_refused_with_the_way_out(
    cls: type, setting: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        cls(**setting)
    assert message in str(error.value)
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize("cls", [Policy, GuardConfig])
def test_settings_are_frozen_and_keyword_only(cls: type) -> None:
    settings = cls()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(settings, dataclasses.fields(settings)[0].name, None)
    with pytest.raises(TypeError):
        cls(None)


def test_default_policy_leaves_out_what_is_bad_and_stops_by_share() -> None:
    assert Policy().actions == ("retry", "leave_out", "skip", "heal", "rewind", "stop")
    assert Policy().max_consecutive is None
    assert Policy().max_lost_share == 0.5


def test_default_config_writes_nothing() -> None:
    assert GuardConfig().run_dir is None
    assert GuardConfig().human_log is None
    assert GuardConfig().checkpoint_every is None


@pytest.mark.parametrize(
    ("make", "needed"),
    [
        (
            lambda: GuardConfig(look_every=10),  # type: ignore[call-arg]
            r"look_every is not known. It belongs in GuardConfig\(probes=Probes\(...\)\)",
        ),
        (
            lambda: GuardConfig(rundir="a"),  # type: ignore[call-arg]
            r"rundir is not known. Did you mean run_dir\?",
        ),
        (
            lambda: Policy(clip_norm=1.0),  # type: ignore[call-arg]
            "policy.clip_norm is not known. It belongs in GuardConfig itself",
        ),
    ],
)
def test_setting_that_does_not_exist_says_where_it_belongs(
    make: Callable[[], object], needed: str
) -> None:
    with pytest.raises(ConfigError, match=needed):
        make()

"""SG6xx to SG8xx: stored state, ranks, replays and compiled code, settings."""

from __future__ import annotations

from typing import Any

from diagnose.literals import (
    BACKWARD,
    CALM,
    HALF,
    NAN,
    UPDATE,
    Cases,
    at,
    checks,
    codes,
    found,
    origin,
    spans,
    traced_in,
    x,
)
from diagnose.test_sg500 import HUGE_WEIGHT
from stepguard.diagnose import RunFacts
from stepguard.records import Evidence

WATCHED: dict[str, Any] = CALM | {"severity": "incident", "loss": None}
"""Something that ranks have compared."""
DRIFT = WATCHED | {
    "kind": "replica_drift",
    "said": {"ranks": "2", "agree": "0, 1, 3", "tensor": "param:0.weight", "parameters": 4},
}
SAME_DATA = WATCHED | {
    "kind": "same_data",
    "summary": "ranks 0, 1 read the same batch",
    "said": {"ranks": "0, 1", "samplers": "rank 0: seed 0, rank 1: seed 7"},
}
RUNNING_VAR = {"bad_state": ("buffer:bn.running_var",), "kind": "nonfinite_buffer"}
TWO_RANKS, FROM_BF16 = RunFacts(world_size=2), RunFacts(configured_dtype="bfloat16", scaling="none")
RESUMED = RunFacts(configured_lr=(1e-4,), resumed=True)
RULES = {
    "SG601": Cases(
        fires=(
            origin(
                "state",
                "aten.mm",
                x(NAN, 0.1, 0.2, shape=(2, 2), name="w", nan=3, index=(0, 1)),
                tensor="param:w",
            ),
            {"step": 0, "bad_state": ("param:w", "param:b"), "kind": "nonfinite_parameter"},
        ),
        says=("param:w", "before the first step", "3 of 4 elements NaN", "(0, 1)", "2 parameters"),
        first={
            "a parameter nobody filled": (
                at("state", "cat", tensor="param:bg", step=0),
                {"step": 0, "kind": "nonfinite_parameter", "bad_state": ("param:bg",)},
            ),
        },
        measured={
            "memory nobody wrote": at("forward", "empty", nan=4, uninitialised=True),
            "a weight of 1e38 before the first update": (
                HUGE_WEIGHT,
                {"facts": RunFacts(committed=0)},
            ),
        },
        silent={
            "a parameter this step's update made bad": (None, UPDATE | {"bad_state": ("param:w",)}),
            "a bad buffer": (at("state", tensor="buffer:bn.running_var"), RUNNING_VAR),
        },
    ),
    "SG602": Cases(
        fires=(
            at("state", None, spans(1.0, 2.0, nan=1), tensor="buffer:bn.running_var"),
            CALM | RUNNING_VAR,
        ),
        says=("buffer:bn.running_var", "1 of 4 elements NaN", "evaluation will be NaN"),
        first={
            "a buffer of a checkpoint": (
                at("state", "native_batch_norm", tensor="buffer:bn.running_var", step=0),
                CALM | RUNNING_VAR,
            ),
        },
        silent={
            "a bad parameter beside it": (
                at("state", tensor="param:w"),
                {"bad_state": ("param:w", "buffer:bn.running_var")},
            ),
        },
    ),
    "SG603": Cases(
        fires=(
            at("checkpoint", None, spans(1.0, 2.0, posinf=2), tensor="param:w"),
            {"summary": "seal broken"},
        ),
        says=("param:w", "2 of 4 elements +inf", "seal broken"),
        silent={"a bad parameter in memory": at("state", tensor="param:w")},
    ),
    "SG701": Cases(
        fires=(
            at("input", tensor="batch:x"),
            {"bad_ranks": (3,), "facts": RunFacts(world_size=8)},
        ),
        says=("rank 3 of 8", "the others were finite"),
        silent={
            "every rank": (None, {"bad_ranks": (0, 1), "facts": TWO_RANKS}),
            "one process": (None, {"bad_ranks": (0,), "facts": RunFacts(world_size=1)}),
        },
    ),
    "SG702": Cases(
        fires=(
            at("backward", reproduced=False),
            BACKWARD | {"bad_grads": ("head.weight",), "bad_ranks": (2,)},
        ),
        says=("replayed", "head.weight", "rank 2"),
        first={"a replay that is clean": (at("backward", reproduced=False), BACKWARD)},
        silent={
            "a replay that shows it": at("forward", "log", x(0.0, 0.0, 1.0), reproduced=True),
            "no replay": (at("backward", reproduced=None), BACKWARD),
            "a graph that only fails compiled": at("forward", reproduced=False, compiled_only=True),
        },
    ),
    "SG703": Cases(
        fires=at("forward", compiled_only=True),
        says=("compiled", "eagerly"),
        measured={"only the compiled step": at("forward", reproduced=False, compiled_only=True)},
        silent={"a transient": at("forward", reproduced=False)},
    ),
    "SG704": Cases(
        fires=(None, DRIFT),
        says=("rank 2", "rank 0, 1, 3", "parameters that differ: 4", "`param:0.weight`"),
        silent={
            "a calm step": (None, CALM),
            "a bad parameter of one rank": (
                None,
                {"bad_ranks": (1,), "kind": "nonfinite_parameter"},
            ),
        },
    ),
    "SG705": Cases(
        fires=(None, SAME_DATA),
        says=("ranks 0, 1 read the same batch", "rank 1: seed 7"),
        silent={
            "a calm step": (None, CALM),
            "drifted ranks": (None, CALM | {"kind": "replica_drift"}),
        },
    ),
    "SG801": Cases(
        fires=(traced_in(HALF), CALM | {"facts": FROM_BF16}),
        says=("bfloat16 is configured", "gives float16", "without a loss scale", "6e-08"),
        silent={
            "float16 with a scaler": (
                traced_in(HALF),
                CALM | {"facts": RunFacts(scaling="dynamic")},
            ),
            "bfloat16 as configured": (traced_in("bfloat16"), CALM | {"facts": FROM_BF16}),
            "a precision that no replay has seen": (at("loss"), CALM | {"facts": FROM_BF16}),
        },
    ),
    "SG802": Cases(
        fires=(
            None,
            CALM | {"kind": "lr_mismatch", "severity": "note", "lr": (5e-4,), "facts": RESUMED},
        ),
        says=("lr 0.0001", "0.0005", "was loaded"),
        silent={
            "a rate below the configured one": (None, CALM | {"lr": (1e-5,), "facts": RESUMED}),
            "a run that was not resumed": (
                None,
                CALM
                | {"kind": "lr_mismatch", "lr": (5e-4,), "facts": RunFacts(configured_lr=(1e-4,))},
            ),
        },
    ),
    "SG803": Cases(
        fires=(
            None,
            CALM
            | {"kind": "no_labels", "severity": "note", "loss": 0.0, "grad_norm": 0.0, "labels": 0},
        ),
        says=("0 targets", "loss is 0, gradient norm is 0"),
        silent={"a small loss": (None, CALM | {"loss": 1e-9, "grad_norm": 1e-9})},
    ),
}


test_fires_with_its_numbers, test_comes_first, test_stays_silent = checks(RULES)


def test_state_loaded_bad_is_also_a_corrupted_checkpoint() -> None:
    bad = {"bad_state": ("param:head.weight",)}
    where = at("state", tensor="param:head.weight", bad_elements=1)
    assert "SG603" in codes(where, **bad, facts=RunFacts(resumed=True, committed=0))
    assert "SG603" not in codes(where, **bad, facts=RunFacts(resumed=True, committed=40))


def test_not_reproduced_names_the_loss_function_before_hardware() -> None:
    moves = Evidence(same_bits=True, moves=("the generator `own`",))
    finding = found("SG702", origin("loss", reproduced=False, evidence=moves))
    said = "not reproduced: the loss function is probably not a function of its batch"
    assert finding.evidence[0] == said
    assert "the generator `own`" in finding.evidence[1]
    assert "hardware" in finding.evidence[-1]
    steady = found("SG702", at("loss", reproduced=False, same_bits=True))
    assert (finding.certainty, steady.certainty) == ("likely", "likely")


def test_what_ranks_disagree_on_is_the_only_finding() -> None:
    assert codes(at("state", rank=2, method="comparison of the ranks"), **DRIFT) == ["SG704"]
    assert codes(None, **SAME_DATA) == ["SG705"]


def test_ranks_without_a_majority_are_said_to_have_none() -> None:
    two = DRIFT | {"said": {"ranks": "0, 1", "rates": "rank 0: 0.1, rank 1: 0.05"}}
    said = " | ".join(found("SG704", None, **two).evidence)
    assert "no majority" in said and "rank 1: 0.05" in said


def test_autocast_seen_in_the_replay_counts_for_the_settings() -> None:
    where = at("backward", "mul", spans(0.0, 0.0), autocast=HALF)
    assert "SG801" in codes(where, facts=RunFacts(scaling="none"))
    assert "SG801" not in codes(where, facts=RunFacts(scaling="dynamic"))

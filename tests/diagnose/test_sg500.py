"""SG5xx, the update: clipping, epsilons, moments, rates that jump or are too high, scales."""

from __future__ import annotations

from typing import Any

import pytest

from diagnose.literals import (
    BACKWARD,
    CALM,
    DIVERGED,
    HALF,
    INF,
    NAN,
    SPIKE,
    UPDATE,
    Cases,
    at,
    checks,
    codes,
    found,
    number,
    spans,
    x,
)
from stepguard.diagnose import RunFacts
from stepguard.records import Evidence, Finding, Origin

ADDED = at("optimizer", "add_")
IN_HALF = RunFacts(optimizer="AdamW", eps=1e-8, param_dtypes=(HALF,))
GROWN = Evidence(finite_in="float64", batch_max=3.1)
HUGE_WEIGHT = at(
    "forward",
    "bmm",
    spans(-3e38, 3e38, 1, 6, 18, name="mat2"),
    posinf=9,
    huge_parameter="param:biaffine.U",
    finite_in="float64",
    batch_max=3.0,
)


def rates(*history: float | tuple[float, ...], **facts: Any) -> RunFacts:
    """The learning rates of recent steps."""
    groups = tuple(one if isinstance(one, tuple) else (one,) for one in history)
    return RunFacts(lr_history=groups, **facts)


def spike(facts: RunFacts, **reading: Any) -> tuple[Origin, dict[str, Any]]:
    """A loss far above the ones before."""
    return ADDED, SPIKE | {"facts": facts} | reading


def huge_in_bfloat16(finite_in: str | None) -> Origin:
    """A layer norm of 3e20, on a batch that holds nothing unusual."""
    wide = spans(-3e20, 3e20, 4, 8, name="input", dtype="bfloat16")
    facts = {"half_precision": True, "batch_max": 4.2, "finite_in": finite_in}
    return at("forward", "native_layer_norm", wide, nan=32, dtype="bfloat16", **facts)


RULES = {
    "SG501": Cases(
        fires=(
            at(
                "optimizer", "_foreach_norm", spans(1e20, 3e20, 9, name="self[0]"), finite_norm=9e20
            ),
            CALM | {"kind": "infinite_norm", "grad_norm": INF, "facts": RunFacts(clip_norm=0.5)},
        ),
        says=("3e+20", "9e+20", "clip_grad_norm_ to 0.5", "0.5 / inf = 0"),
        first={
            "every gradient clipped to 0": (
                at("optimizer", "_foreach_norm", spans(1e20, 1e20, 9, name="self[0]"), posinf=1),
                {"loss": 3e20, "grads_finite": True, "grad_norm": INF, "kind": "infinite_norm"},
            ),
        },
        silent={
            "an infinite loss": (None, CALM | {"loss": INF, "kind": "nonfinite_loss"}),
            "bad elements": (None, BACKWARD | {"grad_norm": INF}),
            "a finite norm": (None, CALM | {"grad_norm": 1e30}),
        },
    ),
    "SG502": Cases(
        fires=(
            at(
                "optimizer",
                "addcdiv_",
                spans(-1.0, 1.0, dtype=HALF),
                x(0.0, -0.1, 0.1, name="tensor1", dtype=HALF),
                x(0.0, 0.0, 0.1, name="tensor2", dtype=HALF),
                dtype=HALF,
                nan=1,
            ),
            UPDATE | {"facts": IN_HALF},
        ),
        says=("0 / 0", "AdamW eps=1e-08 is 0 in float16", "5.96e-08"),
        first={
            "Adam with eps=0 in float32": (
                at(
                    "optimizer",
                    "_foreach_addcdiv_",
                    spans(0.1, 0.2, name="self[0]"),
                    spans(0.0, 0.0, name="tensor1[0]", zeros=4),
                    spans(0.0, 0.0, name="tensor2[0]", zeros=4),
                    nan=4,
                ),
                UPDATE | {"facts": RunFacts(eps=0.0)},
            ),
            "half weights without a replay": (
                None,
                UPDATE | {"bad_state": ("param:emb.weight",), "facts": IN_HALF},
            ),
        },
        silent={
            "an epsilon float16 can hold": (
                None,
                UPDATE | {"facts": RunFacts(eps=1e-4, param_dtypes=(HALF,))},
            ),
            "parameters in float32": (
                None,
                UPDATE | {"facts": RunFacts(eps=1e-8, param_dtypes=("float32",))},
            ),
            "a division in forward": (
                at("forward", "div", x(0.0, 0.0, 1.0), x(0.0, 0.0, 1.0)),
                {"facts": RunFacts(eps=1e-8, param_dtypes=("float32",))},
            ),
        },
    ),
    "SG503": Cases(
        fires=(
            at("state", tensor="opt:exp_avg"),
            CALM | {"bad_state": ("opt:exp_avg",), "kind": "nonfinite_optimizer_state"},
        ),
        says=("opt:exp_avg", "before this step", "restored without it"),
        first={
            "moments whose squares a checkpoint lost": (
                at("optimizer"),
                SPIKE | {"loss": 80.0, "lr": (1e-2,), "facts": RunFacts(lost_squares=52)},
            ),
            "moments kept when the weights were restored": (
                at("state", "lerp_", tensor="opt:exp_avg"),
                {"kind": "nonfinite_optimizer_state", "grads_finite": True}
                | {"bad_state": ("opt:exp_avg",)},
            ),
        },
        silent={
            "a bad parameter": (at("state", tensor="param:w"), {"bad_state": ("param:w",)}),
            "a cause in forward": (
                at("forward", "log", x(0.0, 0.0, 1.0)),
                {"bad_state": ("opt:exp_avg",)},
            ),
        },
    ),
    "SG504": Cases(
        fires=spike(rates(0.01, 0.01, 4.0, 4.0), lr=(4.0,)),
        says=("lr 4", "400 times", "0.01", "1 step before"),
        first={
            "weights that ran away after a jump of the rate": (
                at("forward", "exp", x(316.0, -2.0, 316.0), posinf=1),
                {"facts": rates(0.001, 0.001, 0.03, 0.03, losses=(1.0, 1.1, 40.0)), "lr": (0.03,)},
            ),
            "a rate that is not a number": (
                at("optimizer", "add_", tensor="param:w"),
                UPDATE | {"lr": (0.1, NAN)},
            ),
            "warm-up thrown back to its peak": spike(rates(1e-2, 4e-3, 1e-3, 1e-3, 1e-2)),
            "a group that stood still, now a thousand times above the others": spike(
                rates((0.05, 0.0), (0.05, 0.0), (0.05, 50.0), losses=(1.0, 1.1, 40.0))
            ),
            "above the configured rate from the first step on": spike(
                rates(4.0, 4.0, 4.0, configured_lr=(0.01,), committed=2), lr=(4.0,)
            ),
        },
        silent={
            "a linear warm-up": spike(rates(*(1e-4 * i for i in range(12)))),
            "a OneCycle schedule far above its first rate": spike(
                rates(8e-3, 9e-3, 1e-2, configured_lr=(4e-4,), losses=(1.0,), committed=900),
                lr=(1e-2,),
            ),
            "a cosine schedule": spike(rates(1e-3, 9e-4, 5e-4, 1e-5)),
        },
    ),
    "SG505": Cases(
        fires=spike(
            RunFacts(losses=(8.0, 90.0, 900.0), update_ratio=0.4),
            summary="loss 900 is 40 deviations above its usual 8",
            lr=(0.8,),
            repeat_loss=870.0,
        ),
        says=("40 deviations", "from 8 to 900", "gives 870", "0.4 of their norm", "lr is 0.8"),
        first={
            "a rate that is too high": spike(
                rates(0.8, 0.8, 0.8, losses=(8.0, 60.0, 900.0)), lr=(0.8,)
            ),
            "gradients that grow": spike(RunFacts(grad_norms=(1.0, 12.0))),
            "weights that ran away": (
                at(
                    "loss",
                    "mse_loss",
                    spans(-1e22, 1e23, 16, 1),
                    spans(-3.0, 3.0, 16, 1, name="target"),
                    posinf=1,
                    finite_in="float64",
                    batch_max=3.1,
                ),
                {"loss": INF, "facts": rates(0.1, losses=(1.0, 3.0, 40.0, 9e5)), "lr": (0.1,)},
            ),
            "a slow rise": (
                ADDED,
                SPIKE | {"kind": "drift", "loss": 3.0, "lr": (1e-3,), "repeat_loss": 2.9},
            ),
            "a weight of 1e38 after some updates": (
                HUGE_WEIGHT,
                {"facts": RunFacts(committed=40, losses=(1.0, 3.0, 40.0, 9e5))},
            ),
            "a group that stood still and now runs with the rate of the others": spike(
                rates((0.05, 0.0), (0.05, 0.0), (0.05, 0.05), losses=(1.0, 1.1, 40.0))
            ),
            "an infinite norm at the end of a rise": (
                None,
                CALM
                | {"kind": "infinite_norm", "grad_norm": INF}
                | {"facts": rates(0.8, 0.8, losses=(8.0, 9e3, 4e7, 6e18))},
            ),
        },
        measured={
            f"3e20 in bfloat16, finite in {finite_in}": (
                huge_in_bfloat16(finite_in),
                {"facts": RunFacts(losses=DIVERGED, committed=5), "lr": (1.0,)},
            )
            for finite_in in (None, "float32")
        },
        silent={
            "a rate that jumped": spike(rates(0.01, 4.0, losses=(1.0, 50.0))),
            "a singular gradient in a falling run": (
                at("backward", "div", x(1.0, 1.0, 1.0), x(0.0, 0.0, 1.0), node="SqrtBackward0"),
                BACKWARD | {"facts": RunFacts(losses=(3.0, 2.0, 1.0))},
            ),
            "an extreme batch": (
                at("loss", "mse_loss", spans(0.0, 1e25, 3), batch_max=1e25),
                {"loss": INF, "facts": RunFacts(losses=(3.0, 2.0, 1.0))},
            ),
        },
    ),
    "SG506": Cases(
        fires=(None, BACKWARD | {"kind": "scaler_collapse", "scale": 0.5}),
        says=("0.5, below 1", "never move"),
        silent={
            "a scale that calibrates itself": (None, BACKWARD | {"scale": 32768.0}),
            "no scaler": (None, BACKWARD),
        },
    ),
}


test_fires_with_its_numbers, test_comes_first, test_stays_silent = checks(RULES)


def diverged(
    rate: float = 0.1, where: Origin | None = None, said: Any = None, **facts: Any
) -> Finding:
    run = RunFacts(losses=DIVERGED, **({"committed": 9} | facts))
    return found("SG505", where, **SPIKE, lr=(rate,), facts=run, said=said)


def test_moments_that_took_the_weights_along_are_the_cause() -> None:
    bad = {"bad_state": ("param:w", "opt:exp_avg"), "kind": "nonfinite_parameter"}
    where = at("state", "addmm", tensor="param:w")
    assert codes(where, **bad, step=7) == ["SG503", "SG601"]
    # before the first step, both were loaded that way
    assert codes(where, **bad, step=0)[0] == "SG601"


@pytest.mark.parametrize(
    ("facts", "rate", "said"),
    [
        (rates(0.1, 0.1, 0.5), 0.5, "5 times the rate before (0.1), in this very step"),
        (rates(1.0, 0.1, 1.0), 1.0, "10 times the rate before (0.1)"),
        (rates(0.1, 0.5, 0.5), 0.5, "1 step before the bad one"),
        (RunFacts(configured_lr=(0.1,)), 0.5, "the configured rate"),
    ],
    ids=["in this step", "restarted", "a step ago", "configured"],
)
def test_jump_of_the_rate_is_told_with_its_size_and_step(
    facts: RunFacts, rate: float, said: str
) -> None:
    finding = found("SG504", None, kind="spike", lr=(rate,), facts=facts)
    assert said in "; ".join(finding.evidence)


def test_jump_that_the_judge_has_seen_is_told() -> None:
    said = {"group": 1, "lr": 3.0, "ceiling": 1.0}
    assert codes(None, kind="spike", said=said)[0] == "SG504"


def test_runaway_schedule_is_told_by_its_first_rate_and_the_declared_one() -> None:
    climbing = tuple((0.0025 * step,) for step in range(20, 81))
    declared = {"first_lr": (0.0025,), "initial_lr": (0.05,)}
    finding = diverged(0.2, lr_history=climbing, committed=80, **declared)
    said = (
        "the learning rate of group 0 has grown from 0.0025 to 0.2 over 80 steps and is 4 times "
        "initial_lr (0.05)"
    )
    assert said in finding.evidence
    assert not any("did not jump" in sentence for sentence in finding.evidence)
    assert finding.remedies[0].title == (
        "Bound the schedule: the lr of group 0 is 0.2, 0.05 was configured"
    )


def test_divergence_is_a_conclusion_and_never_certain() -> None:
    """Doubtful where the loss function changes by itself, or the weights stood still."""
    constant = diverged(lr_history=((0.1,),) * 9, first_lr=(0.1,), said={"older_loss": 2.0})
    assert "lr is 0.1 and did not jump" in constant.evidence
    assert (diverged().certainty, constant.certainty) == ("likely", "likely")
    moves = diverged(where=at("optimizer", moves=("the number `temperature`",)))
    assert moves.certainty == "possible"
    assert (
        "but the loss function changes between calls (the number `temperature`)" in moves.evidence
    )
    assert diverged(1e-12, update_ratio=1e-12).certainty == "possible"


def test_temperature_annealed_to_nothing_is_not_a_divergence() -> None:
    """scores / 1e-30: the number is extreme by itself, whatever the weights are."""
    scores, temperature = spans(-3e9, 3e9, 4, 8), number("other", 1e-30)
    where = at("loss", "div", scores, temperature, posinf=3, finite_in="float64", batch_max=3.0)
    assert codes(where, facts=RunFacts(losses=DIVERGED, committed=9))[0] != "SG505"

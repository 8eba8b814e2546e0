"""Rules SG3xx to SG8xx one by one: the evidence has the numbers."""

from __future__ import annotations

from typing import Any

import pytest

from diagnose.diagnose_literals import (
    BACKWARD,
    INF,
    NAN,
    codes,
    found,
    origin,
    out,
    tensor,
    traced_in,
)
from stepguard.diagnose import RunFacts
from stepguard.records import Evidence, Operand, Origin

Bad = tuple[Origin | None, dict[str, Any]]
HALF = "float16"
UPDATE: dict[str, Any] = {
    "loss": 0.5,
    "grads_finite": True,
    "kind": "nonfinite_parameter",
    "state_born": True,
}
CALM: dict[str, Any] = {"loss": 0.5, "grads_finite": True, "kind": "ok", "severity": "ok"}


def at(name: str, value: float, low: float, high: float, **more: Any) -> Operand:
    """An operand whose element at the bad position is known."""
    return tensor(name, (4,), low, high, index=(1,), value=value, **more)


def backward(op: str, node: str, *inputs: Operand, **more: Any) -> Origin:
    return origin("backward", op, *inputs, node=node, **more)


FIRES: dict[str, tuple[Bad, tuple[str, ...]]] = {
    "SG301": (
        (
            origin(
                "forward",
                "aten.add",
                at("self", -33.5, -61.0, -30.0, dtype=HALF),
                at("other", -65504.0, -65504.0, 0.0, dtype=HALF),
                output=out(dtype=HALF, neginf=1),
                evidence=Evidence(finite_in="float32"),
            ),
            {},
        ),
        ("65504, the largest float16", "-33.5 + -65504", "computed in float32"),
    ),
    "SG302": (
        (
            origin(
                "forward",
                "aten.rsqrt",
                at("self", 0.0, 0.0, 1.0, dtype=HALF, zeros=1),
                evidence=Evidence(eps_underflow=True, eps=1e-08),
            ),
            {},
        ),
        ("eps=1e-08 is 0 in float16", "5.96e-08"),
    ),
    "SG401": (
        (
            backward(
                "aten.div",
                "SqrtBackward0",
                at("self", 1.0, 0.1, 1.0),
                at("other", 0.0, 0.0, 2.0, zeros=1),
            ),
            BACKWARD,
        ),
        ("sqrt(x) at x = 0", "SqrtBackward0", "at index (1,)", "1 of 4 elements zero"),
    ),
    "SG402": (
        (
            backward(
                "aten.mul",
                "ExpBackward0",
                at("self", 0.0, 0.0, 1.0, zeros=1),
                tensor("other", (4,), 1.0, 2.0, posinf=1),
                evidence=Evidence(unselected=True),
            ),
            BACKWARD,
        ),
        ("discards", "0 * inf", "1 of 4 elements +inf"),
    ),
    "SG403": (
        (
            origin(
                "forward",
                "aten.reciprocal",
                at("self", 0.0, 0.0, 1.0, zeros=1),
                output=out(posinf=1),
                evidence=Evidence(absorbed=True, absorbed_by="aten.erf"),
            ),
            BACKWARD,
        ),
        ("1 of 4 elements +inf", "(erf)", "backward multiplies it by 0"),
    ),
    "SG501": (
        (
            origin(
                "optimizer",
                "aten._foreach_norm",
                tensor("self[0]", (9,), 1e20, 3e20),
                evidence=Evidence(finite_norm=9e20),
            ),
            CALM | {"kind": "infinite_norm", "grad_norm": INF, "facts": RunFacts(clip_norm=0.5)},
        ),
        ("3e+20", "9e+20", "clip_grad_norm_ to 0.5", "0.5 / inf = 0"),
    ),
    "SG502": (
        (
            origin(
                "optimizer",
                "aten.addcdiv_",
                tensor("self", (4,), -1.0, 1.0, dtype=HALF),
                at("tensor1", 0.0, -0.1, 0.1, dtype=HALF),
                at("tensor2", 0.0, 0.0, 0.1, dtype=HALF),
                output=out(dtype=HALF, nan=1),
            ),
            UPDATE | {"facts": RunFacts(optimizer="AdamW", eps=1e-8, param_dtypes=(HALF,))},
        ),
        ("0 / 0", "AdamW eps=1e-08 is 0 in float16", "5.96e-08"),
    ),
    "SG503": (
        (
            origin("state", tensor="opt:exp_avg"),
            CALM | {"bad_state": ("opt:exp_avg",), "kind": "nonfinite_optimizer_state"},
        ),
        ("opt:exp_avg", "before this step", "restored without it"),
    ),
    "SG504": (
        (
            origin("optimizer", "aten.add_"),
            CALM
            | {
                "kind": "spike",
                "lr": (4.0,),
                "facts": RunFacts(lr_history=((0.01,), (0.01,), (4.0,), (4.0,))),
            },
        ),
        ("lr 4", "400 times", "0.01", "1 step before"),
    ),
    "SG505": (
        (
            origin("optimizer", "aten.add_"),
            CALM
            | {
                "kind": "spike",
                "summary": "loss 900 is 40 deviations above its usual 8",
                "lr": (0.8,),
                "repeat_loss": 870.0,
                "facts": RunFacts(losses=(8.0, 90.0, 900.0), update_ratio=0.4),
            },
        ),
        ("40 deviations", "from 8 to 900", "gives 870", "0.4 of their norm", "lr is 0.8"),
    ),
    "SG506": (
        (None, BACKWARD | {"kind": "scaler_collapse", "scale": 0.5}),
        ("0.5, below 1", "never move"),
    ),
    "SG601": (
        (
            origin(
                "state",
                "aten.mm",
                tensor("w", (2, 2), 0.1, 0.2, nan=3, index=(0, 1), value=NAN),
                tensor="param:w",
            ),
            {"step": 0, "bad_state": ("param:w", "param:b"), "kind": "nonfinite_parameter"},
        ),
        ("param:w", "before the first step", "3 of 4 elements NaN", "(0, 1)", "2 parameters"),
    ),
    "SG602": (
        (
            origin(
                "state", None, tensor("rv", (4,), 1.0, 2.0, nan=1), tensor="buffer:bn.running_var"
            ),
            CALM | {"kind": "nonfinite_buffer", "bad_state": ("buffer:bn.running_var",)},
        ),
        ("buffer:bn.running_var", "1 of 4 elements NaN", "evaluation will be NaN"),
    ),
    "SG603": (
        (
            origin(
                "checkpoint",
                None,
                tensor("w", (4,), 1.0, 2.0, posinf=2),
                tensor="param:w",
            ),
            {"summary": "seal broken"},
        ),
        ("param:w", "2 of 4 elements +inf", "seal broken"),
    ),
    "SG701": (
        (origin("input", tensor="batch:x"), {"bad_ranks": (3,), "facts": RunFacts(world_size=8)}),
        ("rank 3 of 8", "the others were finite"),
    ),
    "SG702": (
        (
            origin("backward", reproduced=False),
            BACKWARD | {"bad_grads": ("head.weight",), "bad_ranks": (2,)},
        ),
        ("replayed", "head.weight", "rank 2"),
    ),
    "SG703": (
        (origin("forward", evidence=Evidence(compiled_only=True)), {}),
        ("compiled", "eagerly"),
    ),
    "SG801": (
        (
            traced_in("float16"),
            CALM | {"facts": RunFacts(configured_dtype="bfloat16", scaling="none")},
        ),
        ("bfloat16 is configured", "gives float16", "without a loss scale", "6e-08"),
    ),
    "SG802": (
        (
            None,
            CALM
            | {
                "kind": "lr_mismatch",
                "severity": "note",
                "lr": (5e-4,),
                "facts": RunFacts(configured_lr=(1e-4,), resumed=True),
            },
        ),
        ("lr 0.0001", "0.0005", "was loaded"),
    ),
    "SG803": (
        (
            None,
            CALM
            | {"kind": "no_labels", "severity": "note", "loss": 0.0, "grad_norm": 0.0, "labels": 0},
        ),
        ("0 targets", "loss is 0, gradient norm is 0"),
    ),
}


@pytest.mark.parametrize("code", FIRES)
def test_fires_with_the_numbers(code: str) -> None:
    (where, reading), fragments = FIRES[code]
    finding = found(code, where, **reading)
    said = " | ".join(finding.evidence)
    assert [fragment for fragment in fragments if fragment not in said] == [], said


def test_static_scale_comes_with_the_remedy_of_a_dynamic_one() -> None:
    finding = found(
        "SG301",
        origin("backward", evidence=Evidence(scale_overflow=True)),
        **(BACKWARD | {"scale": 65536.0}),
    )
    assert "dynamic loss scale" in finding.remedies[0].title
    assert "65536" in finding.evidence[0]


def test_update_that_breaks_half_weights_is_named_without_a_replay() -> None:
    facts = RunFacts(optimizer="Adam", eps=1e-8, param_dtypes=(HALF,))
    assert codes(None, **UPDATE, bad_state=("param:emb.weight",), facts=facts)[0] == "SG502"


def test_moments_that_took_the_weights_along_are_the_cause() -> None:
    bad = {"bad_state": ("param:w", "opt:exp_avg"), "kind": "nonfinite_parameter"}
    where = origin("state", "aten.addmm", tensor="param:w")
    assert codes(where, **bad, step=7) == ["SG503", "SG601"]
    assert (
        codes(where, **bad, step=0)[0] == "SG601"
    )  # before the first step, both were loaded that way


def test_a_run_that_diverged_into_an_infinite_norm_is_a_divergence() -> None:
    facts = RunFacts(losses=(8.0, 9e3, 4e7, 6e18), lr_history=((0.8,),) * 5)
    assert codes(None, **(CALM | {"kind": "infinite_norm", "grad_norm": INF}), facts=facts) == [
        "SG505",
        "SG501",
    ]


def test_a_rate_above_the_configured_one_from_the_first_step_on_is_a_jump() -> None:
    facts = RunFacts(configured_lr=(0.01,), lr_history=((4.0,),) * 3, committed=2)
    assert codes(None, **(CALM | {"kind": "spike", "lr": (4.0,)}), facts=facts)[0] == "SG504"

"""Incidents beside the zoo, born in half precision, backward, the optimizer or stored state."""

from __future__ import annotations

from typing import Any

import pytest

from diagnose.diagnose_literals import BACKWARD, NAN, codes, origin, out, tensor
from stepguard.diagnose import RunFacts
from stepguard.records import Evidence, Operand, Origin

HALF, BRAIN = "float16", "bfloat16"
HUGE = Evidence(huge_parameter="param:biaffine.U", finite_in="float64", batch_max=3.0)


def at(
    name: str, value: float, low: float, high: float, shape: tuple[int, ...] = (4,), **more: Any
) -> Operand:
    """An operand whose element at the bad position is known."""
    return tensor(name, shape, low, high, index=(0,) * len(shape), value=value, **more)


OWN_OPTIMIZER = {
    "grads_finite": True,
    "loss": 1.0,
    "kind": "nonfinite_parameter",
    "state_born": True,
    "facts": RunFacts(optimizer="RowNorm"),
}
"""An update that made a parameter non-finite, by an optimizer without an epsilon in its groups."""


def _divided_by_a_norm(dtype: str) -> Origin:
    operands = (
        tensor(name, (), 0.0, 0.0, dtype=dtype, zeros=1, value=0.0, index=())
        for name in ("self", "other")
    )
    evidence = Evidence(
        zero_denominator=True, denominator_from="aten.clamp_min", zero_numerator=True
    )
    return origin(
        "optimizer", "aten.div", *operands, output=out((), dtype=dtype, nan=1), evidence=evidence
    )


CASES: dict[str, tuple[str, Origin, dict[str, Any]]] = {
    # ---- half precision
    "F.normalize in float16": (
        "SG302",
        origin(
            "forward",
            "aten.div",
            at("self", 0.0, 0.0, 0.0, dtype=HALF, zeros=4),
            at("other", 0.0, 0.0, 0.0, dtype=HALF, zeros=4),
            output=out(dtype=HALF, nan=4),
            evidence=Evidence(
                zero_denominator=True,
                denominator_from="aten.clamp_min",
                zero_numerator=True,
                half_precision=True,
            ),
        ),
        {},
    ),
    "log(p + 1e-8) in float16": (
        "SG302",
        origin(
            "loss",
            "aten.log",
            at("self", 0.0, 0.0, 1.0, dtype=HALF, zeros=2),
            output=out(dtype=HALF, neginf=2),
            evidence=Evidence(argument="zero", argument_from="aten.add", half_precision=True),
        ),
        {},
    ),
    "1 - t in bfloat16": (
        "SG302",
        origin(
            "loss",
            "aten.reciprocal",
            at("self", 0.0, 0.0, 0.9, dtype=BRAIN, zeros=1),
            output=out(dtype=BRAIN, posinf=1),
            evidence=Evidence(
                zero_denominator=True, denominator_from="aten.rsub", half_precision=True
            ),
        ),
        {},
    ),
    "sum of squares in float16": (
        "SG301",
        origin(
            "forward",
            "aten.sum",
            tensor("self", (64,), 3e4, 4e4, dtype=HALF),
            output=out((), dtype=HALF, posinf=1),
        ),
        {},
    ),
    "gradient of a matrix product in float16": (
        "SG301",
        origin(
            "backward",
            "aten.mm",
            tensor("self", (8, 4), -4e3, 4e3, dtype=HALF),
            tensor("mat2", (4, 8), -90.0, 90.0, dtype=HALF),
            node="MmBackward0",
            output=out((8, 8), dtype=HALF, posinf=2),
            evidence=Evidence(half_precision=True, finite_in="float32"),
        ),
        BACKWARD,
    ),
    "static loss scale": (
        "SG301",
        origin("backward", evidence=Evidence(scale_overflow=True)),
        BACKWARD | {"scale": 65536.0},
    ),
    "second moment in float16": (
        "SG301",
        origin(
            "optimizer",
            "aten.addcmul_",
            tensor("self", (4,), 0.0, 0.1, dtype=HALF),
            tensor("tensor1", (4,), 0.1, 400.0, dtype=HALF),
            tensor("tensor2", (4,), 0.1, 400.0, dtype=HALF),
            tensor="opt:exp_avg_sq",
            output=out(dtype=HALF, posinf=1),
            evidence=Evidence(half_precision=True, finite_in="float32"),
        ),
        {
            "loss": 0.3,
            "grads_finite": True,
            "kind": "nonfinite_optimizer_state",
            "bad_state": ("opt:exp_avg_sq",),
            "state_born": True,
        },
    ),
    # ---- backward
    "acos of exactly 1": (
        "SG401",
        origin(
            "backward",
            "aten.rsqrt",
            at("self", 0.0, 0.0, 0.7, zeros=1),
            node="AcosBackward0",
            output=out(posinf=1),
        ),
        BACKWARD,
    ),
    "eigh of equal eigenvalues": (
        "SG401",
        origin(
            "backward",
            "aten.div_",
            at("self", 0.0, 0.0, 0.0, (3, 3), zeros=9),
            at("other", 0.0, 0.0, 1.0, (3, 3), zeros=6),
            node="LinalgEighBackward0",
            output=out((3, 3), nan=6),
        ),
        BACKWARD,
    ),
    "distance between equal points": (
        "SG401",
        origin(
            "backward",
            "aten.div",
            at("self", 1.0, 1.0, 1.0),
            at("other", 0.0, 0.0, 2.0, zeros=1),
            node="SqrtBackward0",
        ),
        BACKWARD,
    ),
    "silence against a silent reference": (
        "SG401",
        origin(
            "backward",
            "aten.div",
            at("self", 0.0, 0.0, 0.1, zeros=1),
            at("other", 0.0, 0.0, 2.0, zeros=1),
            node="SqrtBackward0",
            output=out(nan=1),
            evidence=Evidence(zero_upstream_gradient=True, singular_at=0.0),
        ),
        BACKWARD,
    ),
    "angle of zero": (
        "SG401",
        origin(
            "backward", "aten.reciprocal", at("self", 0.0, 0.0, 1.0, zeros=1), node="Atan2Backward0"
        ),
        BACKWARD,
    ),
    "where around a division": (
        "SG402",
        origin(
            "forward",
            "aten.div",
            at("self", 1.0, 1.0, 1.0),
            at("other", 0.0, 0.0, 1.0, zeros=1),
            output=out(posinf=1),
            evidence=Evidence(unselected=True, zero_denominator=True),
        ),
        BACKWARD,
    ),
    "where around a log": (
        "SG402",
        origin(
            "backward",
            "aten.div",
            at("self", 0.0, 0.0, 1.0, zeros=1),
            at("other", 0.0, 0.0, 1.0, zeros=1),
            node="LogBackward0",
            output=out(nan=1),
            evidence=Evidence(unselected=True),
        ),
        BACKWARD,
    ),
    "sigmoid by hand": (
        "SG403",
        origin(
            "forward",
            "aten.exp",
            at("self", 200.0, -1.0, 200.0),
            output=out(posinf=1),
            evidence=Evidence(absorbed=True, absorbed_by="aten.reciprocal", finite_in="float64"),
        ),
        BACKWARD,
    ),
    "exp(log 0)": (
        "SG403",
        origin(
            "forward",
            "aten.log",
            at("self", 0.0, 0.0, 1.0, zeros=1),
            output=out(neginf=1),
            evidence=Evidence(absorbed=True, absorbed_by="aten.exp", argument="zero"),
        ),
        BACKWARD,
    ),
    "exp in a backward that somebody wrote": (
        "SG203",
        origin(
            "backward",
            "aten.exp",
            at("self", 91.4, 0.7, 91.4),
            output=out(posinf=2),
            node="MishFnBackward",
            evidence=Evidence(singular_at=91.4, finite_in="float64"),
        ),
        BACKWARD,
    ),
    "log-sum of two terms that are both -inf": (
        "SG204",
        origin(
            "backward",
            "aten.sub",
            tensor("self", (4, 3), -2.4, -1.3, neginf=2),
            tensor("other", (4, 3), -2.4, -1.3, neginf=5),
            output=out((4, 3), nan=1, posinf=4, neginf=1),
            node="LogaddexpBackward0",
            evidence=Evidence(intended_inf=True),
        ),
        BACKWARD,
    ),
    # ---- optimizer, state, environment
    "an optimizer of one's own that divides by a norm of 0": (
        "SG201",
        _divided_by_a_norm("float32"),
        OWN_OPTIMIZER,
    ),
    "the same in float16, where its constant is 0": (
        "SG502",
        _divided_by_a_norm(HALF),
        OWN_OPTIMIZER,
    ),
    "a root of a rounded eigenvalue in an optimizer": (
        "SG207",
        origin(
            "optimizer",
            "aten.pow",
            at("self", -2.6e-7, -2.6e-7, 3.6),
            Operand(name="exponent", dtype="float", value=-0.25),
            output=out(nan=3),
            evidence=Evidence(argument="negative", argument_from="aten._linalg_eigh"),
        ),
        OWN_OPTIMIZER,
    ),
    "a logarithm of 0 in an optimizer": (
        "SG202",
        origin("optimizer", "aten.log", at("self", 0.0, 0.0, 3.6, zeros=1), output=out(neginf=1)),
        OWN_OPTIMIZER,
    ),
    "moments whose squares a checkpoint lost": (
        "SG503",
        origin("optimizer"),
        {
            "kind": "spike",
            "loss": 80.0,
            "grads_finite": True,
            "lr": (1e-2,),
            "facts": RunFacts(lost_squares=52),
        },
    ),
    "Adam with eps=0 in float32": (
        "SG502",
        origin(
            "optimizer",
            "aten._foreach_addcdiv_",
            tensor("self[0]", (4,), 0.1, 0.2),
            tensor("tensor1[0]", (4,), 0.0, 0.0, zeros=4),
            tensor("tensor2[0]", (4,), 0.0, 0.0, zeros=4),
            output=out(nan=4),
        ),
        {
            "grads_finite": True,
            "kind": "nonfinite_parameter",
            "state_born": True,
            "facts": RunFacts(eps=0.0),
        },
    ),
    "moments kept when the weights were restored": (
        "SG503",
        origin("state", "aten.lerp_", tensor="opt:exp_avg"),
        {"grads_finite": True, "kind": "nonfinite_optimizer_state", "bad_state": ("opt:exp_avg",)},
    ),
    "a rate that is not a number": (
        "SG504",
        origin("optimizer", "aten.add_", tensor="param:w"),
        {"grads_finite": True, "kind": "nonfinite_parameter", "state_born": True, "lr": (NAN,)},
    ),
    "warm-up thrown back to its peak": (
        "SG504",
        origin("optimizer", "aten.add_"),
        {
            "kind": "spike",
            "loss": 80.0,
            "grads_finite": True,
            "lr": (1e-2,),
            "facts": RunFacts(lr_history=((1e-2,), (4e-3,), (1e-3,), (1e-3,), (1e-2,))),
        },
    ),
    "a slow rise": (
        "SG505",
        origin("optimizer", "aten.add_"),
        {"kind": "drift", "loss": 3.0, "grads_finite": True, "lr": (1e-3,), "repeat_loss": 2.9},
    ),
    "memory nobody wrote": (
        "SG601",
        origin("forward", "aten.empty", output=out(nan=4), evidence=Evidence(uninitialised=True)),
        {},
    ),
    "a weight of 1e38 before the first update": (
        "SG601",
        origin(
            "forward",
            "aten.bmm",
            tensor("mat2", (1, 6, 18), -3e38, 3e38),
            output=out(posinf=9),
            evidence=HUGE,
        ),
        {"loss": NAN, "facts": RunFacts(committed=0)},
    ),
    "a weight of 1e38 after some updates": (
        "SG505",
        origin(
            "forward",
            "aten.bmm",
            tensor("mat2", (1, 6, 18), -3e38, 3e38),
            output=out(posinf=9),
            evidence=HUGE,
        ),
        {"loss": NAN, "facts": RunFacts(committed=40, losses=(1.0, 3.0, 40.0, 9e5))},
    ),
    "a replay that is clean": (
        "SG702",
        origin("backward", reproduced=False, evidence=Evidence()),
        BACKWARD,
    ),
    "only the compiled step": (
        "SG703",
        origin("forward", reproduced=False, evidence=Evidence(compiled_only=True)),
        {},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_cause_of(name: str) -> None:
    expected, where, reading = CASES[name]
    said = codes(where, **reading)
    assert said and said[0] == expected, said

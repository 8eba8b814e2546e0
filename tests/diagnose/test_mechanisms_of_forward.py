"""Incidents beside the zoo, born in forward: the mechanism, not the name of the case, decides the
cause.
"""

from __future__ import annotations

from typing import Any

import pytest

from diagnose.diagnose_literals import BACKWARD, INF, codes, number, origin, out, tensor
from stepguard.diagnose import RunFacts
from stepguard.records import Evidence, Operand, Origin

HALF = "float16"
RISING = RunFacts(losses=(1.0, 3.0, 40.0, 9e5), lr_history=((0.1,),) * 4)
JUMPED = RunFacts(losses=(1.0, 1.1, 40.0), lr_history=((0.001,), (0.001,), (0.03,), (0.03,)))


def at(
    name: str, value: float, low: float, high: float, shape: tuple[int, ...] = (4,), **more: Any
) -> Operand:
    """An operand whose element at the bad position is known."""
    return tensor(name, shape, low, high, index=(0,) * len(shape), value=value, **more)


CASES: dict[str, tuple[str, Origin, dict[str, Any]]] = {
    # ---- empty reductions against real divisions by zero
    "mean of an empty selection": (
        "SG102",
        origin(
            "loss",
            "aten.mean",
            tensor("self", (0,), None, None),
            output=out((), nan=1),
            evidence=Evidence(reduced_elements=0),
        ),
        {},
    ),
    "mse over no positive anchor": (
        "SG102",
        origin(
            "loss",
            "aten.mse_loss",
            tensor("self", (0, 4), None, None),
            tensor("target", (0, 4), None, None),
        ),
        {},
    ),
    "masked average pooling of an empty sequence": (
        "SG102",
        origin(
            "forward",
            "aten.div",
            at("self", 0.0, -2.1, 2.0, (3, 8), zeros=8),
            tensor("other", (3, 1), 0.0, 5.0, zeros=1, index=(0, 0), value=0.0),
            module="pool",
            output=out((3, 8), nan=8),
        ),
        {},
    ),
    "class weights of 0": (
        "SG102",
        origin(
            "loss",
            "aten.nll_loss_forward",
            tensor("self", (3, 4), -4.1, -0.4),
            Operand(name="target", dtype="int64", shape=(3,), min=0.0, max=0.0, zeros=3),
            tensor("weight", (4,), 0.0, 1.0, zeros=1),
            output=out((), nan=1),
        ),
        {},
    ),
    "division by a Python count": (
        "SG102",
        origin(
            "loss",
            "aten.div",
            at("self", 3.0, 3.0, 3.0, ()),
            Operand(name="other", dtype="int", value=0.0),
            output=out((), posinf=1),
        ),
        {},
    ),
    "target normalised by its own std in the loss": (
        "SG201",
        origin(
            "loss",
            "aten.div",
            at("self", 0.0, 0.0, 0.0, (4,), zeros=4),
            at("other", 0.0, 0.0, 0.0, (), zeros=1),
            output=out((4,), nan=4),
            evidence=Evidence(
                zero_denominator=True,
                denominator_from="aten.std",
                denominator_root="batch:y",
                zero_numerator=True,
            ),
        ),
        {},
    ),
    "min-max scaling of a constant image": (
        "SG201",
        origin(
            "forward",
            "aten.div",
            at("self", 0.0, 0.0, 255.0, (2, 9), zeros=9),
            at("other", 0.0, 0.0, 255.0, (2, 1), zeros=1),
            output=out((2, 9), nan=9),
            evidence=Evidence(
                zero_denominator=True, denominator_from="aten.sub", zero_numerator=True
            ),
        ),
        {},
    ),
    "rsqrt of a zero degree": (
        "SG201",
        origin("forward", "aten.rsqrt", at("self", 0.0, 0.0, 4.0, zeros=1), output=out(posinf=1)),
        {},
    ),
    "zero to the power -1": (
        "SG201",
        origin(
            "forward",
            "aten.pow",
            at("self", 0.0, 0.0, 2.0, zeros=1),
            number("exponent", -1),
            output=out(posinf=1),
        ),
        {},
    ),
    "layer norm with eps=0 on a constant row": (
        "SG201",
        origin(
            "forward",
            "aten.native_layer_norm",
            tensor("input", (2, 4), 1.0, 1.0),
            number("eps", 0.0),
            output=out(nan=4),
        ),
        {},
    ),
    # ---- logarithms
    "log of a diffusion time that is 0": (
        "SG202",
        origin(
            "forward",
            "aten.log",
            at("self", 0.0, 0.0, 0.9, zeros=1),
            module="time_embedding",
            output=out(neginf=1),
            evidence=Evidence(argument="zero", argument_root="batch:t", turned_nan_by="aten.sin"),
        ),
        {},
    ),
    "logit of 1": (
        "SG202",
        origin("forward", "aten.logit", at("self", 1.0, 0.1, 1.0), output=out(posinf=1)),
        {},
    ),
    "log1p of -1": (
        "SG202",
        origin("loss", "aten.log1p", at("self", -1.0, -1.0, 0.2), output=out(neginf=1)),
        {},
    ),
    "binary cross entropy by hand": (
        "SG202",
        origin(
            "loss",
            "aten.log",
            at("self", 0.0, 0.0, 1.0, zeros=3),
            output=out(neginf=3),
            evidence=Evidence(
                argument="zero", argument_from="aten.sigmoid", turned_nan_by="aten.mul"
            ),
        ),
        {},
    ),
    "gradient of a log that was gathered away": (
        "SG202",
        origin(
            "backward",
            "aten.div",
            at("self", 0.0, -0.3, 0.0, zeros=6),
            at("other", 0.0, 0.0, 1.0, zeros=6),
            node="LogBackward0",
            output=out(nan=6),
        ),
        BACKWARD,
    ),
    # ---- targets
    "kl_div with a negative target": (
        "SG104",
        origin(
            "loss",
            "aten.xlogy",
            at("self", -0.1, -0.1, 0.4),
            at("other", -0.1, -0.1, 0.4),
            output=out(nan=1),
            evidence=Evidence(target_out_of_domain=-0.1),
        ),
        {},
    ),
    "CTC target longer than its input": (
        "SG104",
        origin(
            "loss",
            "aten._ctc_loss",
            tensor("log_probs", (4, 1, 5), -4.2, -0.3),
            Operand(name="input_lengths", dtype="int64", shape=(1,), min=4.0, max=4.0),
            Operand(name="target_lengths", dtype="int64", shape=(1,), min=7.0, max=7.0),
            output=out((1,), posinf=1),
            evidence=Evidence(ctc_infeasible=1),
        ),
        {"loss": INF},
    ),
    "target class masked to -inf": (
        "SG104",
        origin(
            "loss",
            "aten.nll_loss_forward",
            tensor("self", (3, 4), -3.1, -0.4, neginf=3),
            Operand(name="target", dtype="int64", shape=(3,), min=0.0, max=2.0),
            output=out((), posinf=1),
            evidence=Evidence(valid_targets=3, zero_target_probability=True),
        ),
        {"loss": INF},
    ),
    # ---- exponentials and large numbers
    "log-variance of 100": (
        "SG203",
        origin(
            "forward",
            "aten.exp",
            at("self", 100.0, -3.0, 100.0),
            output=out(posinf=1),
            evidence=Evidence(finite_in="float64", batch_max=3.1),
        ),
        {},
    ),
    "Sinkhorn in exp space": (
        "SG203",
        origin(
            "forward",
            "aten.exp",
            at("self", 90.3, -80.0, 90.3),
            module="mhc.2",
            output=out(posinf=2),
        ),
        {},
    ),
    "exp(12) in float16": (
        "SG301",
        origin(
            "forward",
            "aten.exp",
            at("self", 12.0, -1.0, 12.0, dtype=HALF),
            output=out(dtype=HALF, posinf=1),
            evidence=Evidence(half_precision=True, finite_in="float32"),
        ),
        {},
    ),
    "fill value of 1e20 in one sample": (
        "SG103",
        origin(
            "loss",
            "aten.mse_loss",
            tensor("self", (3, 1), -4e19, 2.0),
            tensor("target", (3, 1), -1.0, 1.0),
            samples=(1,),
            output=out((), posinf=1),
            evidence=Evidence(finite_in="float64", batch_max=1e20, sample_max=1e20, others_max=2.4),
        ),
        {"loss": INF},
    ),
    "fill value without a note": (
        "SG103",
        origin(
            "forward",
            "aten.pow",
            tensor("self", (3, 4), 0.1, 1e25),
            number("exponent", 2),
            samples=(0,),
        ),
        {},
    ),
    "1e6 cast to float16": (
        "SG103",
        origin(
            "forward",
            "aten._to_copy",
            tensor("self", (3, 4), 0.1, 1e6),
            output=out((3, 4), dtype=HALF, posinf=1),
            evidence=Evidence(half_precision=True, finite_in="float32", batch_max=1000000.0),
        ),
        {},
    ),
    "the cube of a state that one sample blew up": (
        "SG103",
        origin(
            "forward",
            "aten.pow",
            at("self", -5e14, -5e14, 0.1, (4, 3)),
            number("exponent", 3.0),
            output=out((4, 3), neginf=3),
            samples=(2,),
            evidence=Evidence(
                finite_in="float64", batch_max=200.0, sample_max=200.0, others_max=0.8
            ),
        ),
        {},
    ),
    "a high power": (
        "SG203",
        origin(
            "forward",
            "aten.pow",
            at("self", 3e3, 0.1, 3e3, (4, 3)),
            number("exponent", 400.0),
            output=out((4, 3), posinf=1),
            evidence=Evidence(finite_in="float64", batch_max=200.0),
        ),
        {},
    ),
    "weights that ran away": (
        "SG505",
        origin(
            "loss",
            "aten.mse_loss",
            tensor("self", (16, 1), -1e22, 1e23),
            tensor("target", (16, 1), -3.0, 3.0),
            output=out((), posinf=1),
            evidence=Evidence(finite_in="float64", batch_max=3.1),
        ),
        {"loss": INF, "facts": RISING, "lr": (0.1,)},
    ),
    "weights that ran away after a jump of the rate": (
        "SG504",
        origin(
            "forward",
            "aten.exp",
            at("self", 316.0, -2.0, 316.0),
            output=out(posinf=1),
            evidence=Evidence(finite_in="float64", batch_max=3.1),
        ),
        {"facts": JUMPED, "lr": (0.03,)},
    ),
    # ---- rows, statistics, indeterminate forms, roots
    "logsumexp over a masked row": (
        "SG204",
        origin(
            "backward",
            "aten.sub",
            tensor("self", (3, 4), -2.1, 1.5, neginf=4),
            tensor("other", (3, 1), 1.0, 1.9, neginf=1),
            node="LogsumexpBackward0",
            output=out((3, 4), nan=4),
        ),
        BACKWARD,
    ),
    "hand-written softmax over a masked row": (
        "SG204",
        origin(
            "forward",
            "aten.sub",
            tensor("self", (3, 4), -2.1, 1.5, neginf=4),
            tensor("other", (3, 1), 0.1, 1.5, neginf=1),
            output=out((3, 4), nan=4),
        ),
        {},
    ),
    "attention kernel with a masked row": (
        "SG204",
        origin(
            "forward",
            "aten._scaled_dot_product_flash_attention_for_cpu",
            tensor("query", (1, 1, 3, 4), -1.0, 1.0),
            tensor("attn_mask", (1, 1, 3, 3), 0.0, 0.0, neginf=3),
            output=out((1, 1, 3, 4), nan=4),
            evidence=Evidence(masked_rows=1),
        ),
        {},
    ),
    "advantages of a group of one": (
        "SG205",
        origin(
            "loss",
            "aten.std",
            tensor("self", (1,), 0.7, 0.7),
            output=out((), nan=1),
            evidence=Evidence(reduced_elements=1),
        ),
        {},
    ),
    "variance over a batch of one": (
        "SG205",
        origin(
            "forward", "aten.var_mean", tensor("self", (1, 4), -2.0, 1.5), output=out((4,), nan=4)
        ),
        {},
    ),
    "loss of padding multiplied by its mask": (
        "SG206",
        origin(
            "loss",
            "aten.mul",
            tensor("self", (4,), 0.1, 0.3, neginf=1, index=(1,), value=-INF),
            tensor("other", (4,), 0.0, 1.0, zeros=1, index=(1,), value=0.0),
            output=out(nan=1),
            evidence=Evidence(intended_inf=True),
        ),
        {},
    ),
    "difference of two masked scores": (
        "SG206",
        origin(
            "loss",
            "aten.sub",
            tensor("self", (4,), 0.1, 0.3, neginf=1, index=(1,), value=-INF),
            tensor("other", (4,), 0.2, 0.4, neginf=1, index=(1,), value=-INF),
            output=out(nan=1),
            evidence=Evidence(intended_inf=True),
        ),
        {},
    ),
    "variance below 0 by rounding": (
        "SG207",
        origin(
            "forward",
            "aten.sqrt",
            at("self", -1e-7, -1e-7, 2.0),
            output=out(nan=1),
            evidence=Evidence(argument="negative"),
        ),
        {},
    ),
    "gamma correction of a negative pixel": (
        "SG207",
        origin(
            "forward",
            "aten.pow",
            at("self", -0.1, -0.1, 1.0),
            number("exponent", 0.45),
            output=out(nan=1),
        ),
        {},
    ),
    "acos of 1.0000001": (
        "SG207",
        origin("loss", "aten.acos", at("self", 1.0000001, 0.2, 1.0000001), output=out(nan=1)),
        {},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_cause_of(name: str) -> None:
    expected, where, reading = CASES[name]
    said = codes(where, **reading)
    assert said and said[0] == expected, said

"""Rules SG3xx to SG8xx one by one: near misses stay silent."""

from __future__ import annotations

from typing import Any

import pytest

from diagnose.diagnose_literals import BACKWARD, INF, codes, origin, out, tensor, traced_in
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


SILENT: dict[str, dict[str, Bad]] = {
    "SG301": {
        "the same in float32": (
            origin("forward", "aten.mm", tensor("self", (2, 2), 1.0, 1e25)),
            {},
        ),
        "bfloat16, whose range is float32's": (
            origin(
                "forward",
                "aten.mm",
                tensor("self", (2, 2), 1.0, 1e25, dtype="bfloat16"),
                output=out(dtype="bfloat16"),
            ),
            {},
        ),
        "a division by zero in float16": (
            origin(
                "forward",
                "aten.div",
                at("self", 1.0, 1.0, 1.0, dtype=HALF),
                at("other", 0.0, 0.0, 1.0, dtype=HALF),
            ),
            {},
        ),
        "a masked row in float16": (
            origin(
                "forward", "aten._softmax", tensor("self", (2, 2), 0.0, 1.0, neginf=2, dtype=HALF)
            ),
            {},
        ),
    },
    "SG302": {
        "a zero in float32": (
            origin("forward", "aten.rsqrt", at("self", 0.0, 0.0, 1.0, zeros=1)),
            {},
        ),
        "an overflow in float16": (
            origin(
                "forward",
                "aten.mm",
                tensor("self", (2, 2), 1.0, 9e3, dtype=HALF),
                output=out(dtype=HALF, posinf=1),
            ),
            {},
        ),
    },
    "SG401": {
        "a forward root": (origin("forward", "aten.sqrt", at("self", 0.0, 0.0, 1.0)), {}),
        "a discarded branch": (
            backward(
                "aten.div",
                "SqrtBackward0",
                at("other", 0.0, 0.0, 1.0),
                evidence=Evidence(unselected=True),
            ),
            BACKWARD,
        ),
        "a product in backward with ordinary operands": (
            backward("aten.mm", "MmBackward0", tensor("self", (2, 2), 0.0, 1.0, nan=1)),
            BACKWARD,
        ),
    },
    "SG402": {
        "a gradient that is not zero": (
            backward(
                "aten.div", "SqrtBackward0", at("self", 1.0, 1.0, 1.0), at("other", 0.0, 0.0, 1.0)
            ),
            BACKWARD,
        ),
        "a NaN loss": (
            backward(
                "aten.mul",
                "MulBackward0",
                at("self", 0.0, 0.0, 0.0),
                tensor("other", (4,), 0.0, 1.0, nan=1),
            ),
            {},
        ),
    },
    "SG403": {
        "an infinity that reaches the loss": (
            origin("forward", "aten.reciprocal", at("self", 0.0, 0.0, 1.0), output=out(posinf=1)),
            {"loss": INF},
        ),
        "finite operands in backward": (
            backward(
                "aten.div", "SqrtBackward0", at("self", 0.0, 0.0, 0.1), at("other", 0.0, 0.0, 0.1)
            ),
            BACKWARD,
        ),
    },
    "SG501": {
        "a loss that is infinite itself": (
            None,
            CALM | {"loss": INF, "kind": "nonfinite_loss", "grad_norm": INF},
        ),
        "bad elements": (None, BACKWARD | {"grad_norm": INF}),
        "a finite norm": (None, CALM | {"grad_norm": 1e30}),
    },
    "SG502": {
        "an epsilon float16 can hold": (
            None,
            UPDATE | {"facts": RunFacts(eps=1e-4, param_dtypes=(HALF,))},
        ),
        "parameters in float32": (
            None,
            UPDATE | {"facts": RunFacts(eps=1e-8, param_dtypes=("float32",))},
        ),
        "a division in forward": (
            origin("forward", "aten.div", at("self", 0.0, 0.0, 1.0), at("other", 0.0, 0.0, 1.0)),
            {"facts": RunFacts(eps=1e-8, param_dtypes=("float32",))},
        ),
    },
    "SG503": {
        "a bad parameter": (origin("state", tensor="param:w"), {"bad_state": ("param:w",)}),
        "a cause in forward": (
            origin("forward", "aten.log", at("self", 0.0, 0.0, 1.0)),
            {"bad_state": ("opt:exp_avg",)},
        ),
    },
    "SG504": {
        "a linear warm-up": (
            origin("optimizer", "aten.add_"),
            CALM
            | {
                "kind": "spike",
                "facts": RunFacts(lr_history=tuple((1e-4 * i,) for i in range(12))),
            },
        ),
        "a OneCycle schedule far above its first rate": (
            origin("optimizer", "aten.add_"),
            CALM
            | {
                "kind": "spike",
                "lr": (1e-2,),
                "facts": RunFacts(
                    configured_lr=(4e-4,),
                    lr_history=((8e-3,), (9e-3,), (1e-2,)),
                    losses=(1.0,),
                    committed=900,
                ),
            },
        ),
        "a cosine schedule": (
            origin("optimizer", "aten.add_"),
            CALM
            | {"kind": "spike", "facts": RunFacts(lr_history=((1e-3,), (9e-4,), (5e-4,), (1e-5,)))},
        ),
    },
    "SG505": {
        "a rate that jumped": (
            origin("optimizer", "aten.add_"),
            CALM
            | {
                "kind": "spike",
                "facts": RunFacts(lr_history=((0.01,), (4.0,)), losses=(1.0, 50.0)),
            },
        ),
        "a singular gradient in a falling run": (
            backward(
                "aten.div", "SqrtBackward0", at("self", 1.0, 1.0, 1.0), at("other", 0.0, 0.0, 1.0)
            ),
            BACKWARD | {"facts": RunFacts(losses=(3.0, 2.0, 1.0))},
        ),
        "an extreme batch": (
            origin(
                "loss",
                "aten.mse_loss",
                tensor("self", (3,), 0.0, 1e25),
                evidence=Evidence(batch_max=1e25),
            ),
            {"loss": INF, "facts": RunFacts(losses=(3.0, 2.0, 1.0))},
        ),
    },
    "SG506": {
        "a scale that calibrates itself": (None, BACKWARD | {"scale": 32768.0}),
        "no scaler": (None, BACKWARD),
    },
    "SG601": {
        "a parameter this step's update made bad": (None, UPDATE | {"bad_state": ("param:w",)}),
        "a bad buffer": (
            origin("state", tensor="buffer:bn.running_var"),
            {"bad_state": ("buffer:bn.running_var",)},
        ),
    },
    "SG602": {
        "a bad parameter beside it": (
            origin("state", tensor="param:w"),
            {"bad_state": ("param:w", "buffer:bn.running_var")},
        ),
    },
    "SG603": {"a bad parameter in memory": (origin("state", tensor="param:w"), {})},
    "SG701": {
        "every rank": (None, {"bad_ranks": (0, 1), "facts": RunFacts(world_size=2)}),
        "one process": (None, {"bad_ranks": (0,), "facts": RunFacts(world_size=1)}),
    },
    "SG702": {
        "a replay that shows it": (
            origin("forward", "aten.log", at("self", 0.0, 0.0, 1.0), reproduced=True),
            {},
        ),
        "no replay": (origin("backward", reproduced=None), BACKWARD),
        "a graph that only fails compiled": (
            origin("forward", reproduced=False, evidence=Evidence(compiled_only=True)),
            {},
        ),
    },
    "SG703": {"a transient": (origin("forward", reproduced=False, evidence=Evidence()), {})},
    "SG801": {
        "float16 with a scaler": (
            traced_in(HALF),
            CALM | {"facts": RunFacts(scaling="dynamic")},
        ),
        "bfloat16 as configured": (
            traced_in("bfloat16"),
            CALM | {"facts": RunFacts(configured_dtype="bfloat16", scaling="none")},
        ),
        "a precision that no replay has seen": (
            origin("loss"),
            CALM | {"facts": RunFacts(configured_dtype="bfloat16", scaling="none")},
        ),
    },
    "SG802": {
        "a rate below the configured one": (
            None,
            CALM | {"lr": (1e-5,), "facts": RunFacts(configured_lr=(1e-4,), resumed=True)},
        ),
        "a run that was not resumed": (
            None,
            CALM | {"kind": "lr_mismatch", "lr": (5e-4,), "facts": RunFacts(configured_lr=(1e-4,))},
        ),
    },
    "SG803": {"a small loss": (None, CALM | {"loss": 1e-9, "grad_norm": 1e-9})},
}


@pytest.mark.parametrize(
    ("code", "name"), [(code, name) for code, misses in SILENT.items() for name in misses]
)
def test_stays_silent_on(code: str, name: str) -> None:
    where, reading = SILENT[code][name]
    assert code not in codes(where, **reading)

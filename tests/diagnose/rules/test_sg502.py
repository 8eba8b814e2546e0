"""Rule SG502: when it fires, comes first, and stays silent."""

from __future__ import annotations

from typing import Any

import pytest

from diagnose.diagnose_literals import (
    HALF,
    OWN_OPTIMIZER,
    UPDATE,
    Bad,
    at_second,
    codes,
    divided_by_a_norm,
    found,
    origin,
    out,
    tensor,
)
from stepguard.diagnose import RunFacts


def test_fires_with_the_numbers() -> None:
    where = origin(
        "optimizer",
        "aten.addcdiv_",
        tensor("self", (4,), -1.0, 1.0, dtype=HALF),
        at_second("tensor1", 0.0, -0.1, 0.1, dtype=HALF),
        at_second("tensor2", 0.0, 0.0, 0.1, dtype=HALF),
        output=out(dtype=HALF, nan=1),
    )
    reading: dict[str, Any] = UPDATE | {
        "facts": RunFacts(optimizer="AdamW", eps=1e-8, param_dtypes=(HALF,))
    }
    said = " | ".join(found("SG502", where, **reading).evidence)
    for fragment in ("0 / 0", "AdamW eps=1e-08 is 0 in float16", "5.96e-08"):
        assert fragment in said


FIRST: dict[str, Bad] = {
    "the same in float16, where its constant is 0": (divided_by_a_norm(HALF), OWN_OPTIMIZER),
    "Adam with eps=0 in float32": (
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
}


@pytest.mark.parametrize("name", FIRST)
def test_comes_first_for(name: str) -> None:
    where, reading = FIRST[name]
    assert codes(where, **reading)[0] == "SG502"


SILENT: dict[str, Bad] = {
    "an epsilon float16 can hold": (
        None,
        UPDATE | {"facts": RunFacts(eps=1e-4, param_dtypes=(HALF,))},
    ),
    "parameters in float32": (
        None,
        UPDATE | {"facts": RunFacts(eps=1e-8, param_dtypes=("float32",))},
    ),
    "a division in forward": (
        origin(
            "forward",
            "aten.div",
            at_second("self", 0.0, 0.0, 1.0),
            at_second("other", 0.0, 0.0, 1.0),
        ),
        {"facts": RunFacts(eps=1e-8, param_dtypes=("float32",))},
    ),
}


@pytest.mark.parametrize("name", SILENT)
def test_stays_silent_on(name: str) -> None:
    where, reading = SILENT[name]
    assert "SG502" not in codes(where, **reading)


def test_update_that_breaks_half_weights_is_named_without_a_replay() -> None:
    facts = RunFacts(optimizer="Adam", eps=1e-8, param_dtypes=(HALF,))
    assert codes(None, **UPDATE, bad_state=("param:emb.weight",), facts=facts)[0] == "SG502"

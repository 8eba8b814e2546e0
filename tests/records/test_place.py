"""One wording for the place of a bad value."""

from __future__ import annotations

from stepguard.records import Origin
from stepguard.records.incident import place, place_and_phase


def test_place_names_the_root_model_and_what_lies_outside() -> None:
    assert (
        place(Origin(step=0, phase="forward", op="aten.log", module=""))
        == "aten.log in the model itself"
    )
    assert (
        place(Origin(step=0, phase="loss", op="aten.div", source="t.py:3")) == "aten.div at t.py:3"
    )
    assert place(Origin(step=0, phase="backward", node="SqrtBackward0")) == "SqrtBackward0"
    assert place(Origin(step=0, phase="state", tensor="param:emb.weight")) == "param:emb.weight"


def test_phase_comes_first_and_stands_alone_where_nothing_else_is_known() -> None:
    origin = Origin(step=0, phase="backward", op="aten.div", node="DivBackward0", module="fc")
    assert place_and_phase(origin) == "backward: aten.div (DivBackward0) in fc"
    assert place_and_phase(Origin(step=0, phase="backward")) == "backward"


def test_rules_can_name_the_operation_rather_than_the_tensor() -> None:
    origin = Origin(step=0, phase="forward", op="aten.log", tensor="param:w", module="fc")
    assert place(origin) == "param:w in fc"
    assert place(origin, "aten.log") == "aten.log in fc"

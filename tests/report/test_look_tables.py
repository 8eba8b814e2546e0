"""Tables of deep looks: worst first, with the history of each row."""

from __future__ import annotations

from stepguard.records.probes import AttentionLook, Look, ParameterLook, TensorLook
from stepguard.report.probes import look_tables


def look(step: int, bits: float, infinities: int = 0) -> Look:
    tensor = TensorLook(
        module="body", stage="forward", dtype="float16", headroom=bits, infinities=infinities
    )
    still = ParameterLook(name="still", dtype="bfloat16", weight=1.0, gradient=1.0, lost=1.0)
    moving = ParameterLook(
        name="moving", dtype="float32", weight=1.0, gradient=1.0, update=0.2, lost=0.0
    )
    attention = AttentionLook(module="attention", largest_logit=step, entropy=0.5, collapsed=0.0)
    return Look(step=step, tensors=(tensor,), parameters=(moving, still), attention=(attention,))


def test_every_row_has_its_history() -> None:
    ranges, updates, attention = look_tables([look(2, 9.0), look(7, 5.0)], None)
    assert ranges["rows"][0]["history"] == ((2, 9.0), (7, 5.0))
    assert [row["cells"][0] for row in updates["rows"]] == ["still", "moving"]
    assert updates["rows"][1]["history"] == ((2, 0.2), (7, 0.2))
    assert attention["rows"][0]["history"] == ((2, 2.0), (7, 7.0))


def test_what_is_near_its_limit_is_marked() -> None:
    (ranges, updates, _) = look_tables([look(2, 2.0)], None)
    assert ranges["headings"][ranges["rows"][0]["warns"][0]] == "bits left"
    assert updates["headings"][updates["rows"][1]["warns"][0]] == "update/weight"
    assert look_tables([look(2, 9.0)], None)[0]["rows"][0]["warns"] == ()
    assert (
        look_tables([look(2, 9.0, infinities=3)], None)[0]["rows"][0]["cells"][4] == "9.0 (3 inf)"
    )


def test_only_so_many_rows_are_listed() -> None:
    assert len(look_tables([look(2, 2.0)], 1)[1]["rows"]) == 1

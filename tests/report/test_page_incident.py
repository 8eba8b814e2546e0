"""Words and numbers of an incident's card."""

from __future__ import annotations

import math

from stepguard.records import Decision, Incident, Operand, Origin, Reading, Verdict
from stepguard.report.page import LONGEST_TEXT, bad_values, clipped, incident_card
from stepguard.report.story import StoryIncident


def _told(incident: Incident) -> StoryIncident:
    return StoryIncident(
        incident=incident, done="dropped", attempt=0, row=3, at=4, order=9, kept=True
    )


def test_values_that_are_not_finite_are_named_by_their_series() -> None:
    reading = Reading(
        step=1,
        loss=math.nan,
        components={"a": math.inf, "b": 1.0},
        followed={"kl": -math.inf},
        grad_norm=2.0,
    )
    assert bad_values(reading) == {"loss": 1, "loss/a": 2, "followed/kl": 3}


def test_operand_is_told_with_the_range_of_its_dtype() -> None:
    operand = Operand(
        name="x",
        dtype="float16",
        shape=(2, 3),
        min=-1.0,
        max=60000.0,
        posinf=1,
        index=(0, 1),
        value=math.inf,
        exponents=((0, 4), (15, 1)),
    )
    origin = Origin(step=1, phase="forward", op="aten.exp", inputs=(operand,))
    reading = Reading(step=1, loss=math.nan)
    verdict = Verdict(kind="nonfinite_loss", summary="loss is nan")
    incident = Incident(id="a", step=1, verdict=verdict, reading=reading, origin=origin)
    (shown,) = incident_card(_told(incident))["operands"]
    assert shown["type"] == "float16 2 x 3"
    assert shown["bad"] == "1 +Inf of 6"
    assert shown["at"] == "inf at [0,1]"
    assert shown["range"] == {"least": -24, "normal": -14, "most": 16}
    assert shown["exponents"] == [[0, 4], [15, 1]]


def test_rewind_says_where_it_went() -> None:
    decision = Decision(action="rewind", rewound_to=24, consecutive=1, total=2)
    verdict = Verdict(kind="nonfinite_parameter", summary="bad")
    incident = Incident(id="a", step=1, verdict=verdict, reading=Reading(step=1), decision=decision)
    card = incident_card(_told(incident))
    assert card["done"] == "rewound to step 24"
    assert card["where"] is None and card["unplaced"]


def test_a_text_of_any_length_is_cut_with_its_length() -> None:
    assert clipped("x" * LONGEST_TEXT) == "x" * LONGEST_TEXT
    assert clipped("x" * (LONGEST_TEXT + 5)).endswith("(5 more characters)")

"""Records in a notebook: a short repr, and HTML in which every text is escaped."""

from __future__ import annotations

from stepguard.records import Decision, Finding, Incident, Operand, Origin, Reading, Remedy, Verdict
from stepguard.records.incident import box

HOSTILE = "<script>alert(1)</script>"


def incident(text: str) -> Incident:
    operand = Operand(name=text, dtype="float32", shape=(2, 3), min=0.0, max=1.0, nan=1, zeros=2)
    origin = Origin(
        step=3,
        phase="loss",
        op=f"aten.{text}",
        module=text,
        source="cell [3], line 5",
        context=("  4 | x = 1", f"> 5 | {text}"),
        samples=(4,),
        rows=(text,),
        inputs=(operand,),
        remarks=(text,),
    )
    return Incident(
        id="00000003-nonfinite_loss",
        step=3,
        verdict=Verdict(kind="nonfinite_loss", severity="incident", summary=f"loss is {text}"),
        reading=Reading(step=3),
        origin=origin,
        findings=(
            Finding(
                code="SG201",
                title=text,
                evidence=(text,),
                remedies=(Remedy(title=text, snippet=f"y = safe_{text}"),),
            ),
        ),
        decision=Decision(action="skip", reason=text),
    )


def test_repr_is_one_short_line() -> None:
    found = incident("div")
    assert repr(found.origin) == (
        "<Origin: loss of step 3, aten.div in div at cell [3], line 5 sample 4 (div)>"
    )
    assert repr(found).startswith("<Incident 00000003-nonfinite_loss: loss is div; loss: aten.div")
    assert repr(Origin(step=1, phase="state")) == "<Origin: state of step 1, place not known>"


def test_html_shows_place_line_cause_and_action() -> None:
    shown = incident("div")._repr_html_()
    words = ("Incident at step 3", "cell [3], line 5", "SG201", "skip", "sample", "2x3, 0 to 1")
    for word in (*words, "<b>&gt; 5 | div</b>", "to do", "y = safe_div"):
        assert word in shown, word


def test_no_text_of_a_record_becomes_markup() -> None:
    found = incident(HOSTILE)
    assert found.origin is not None
    for shown in (found._repr_html_(), found.origin._repr_html_()):
        assert "<script" not in shown
        assert shown.count("&lt;script&gt;") >= 5


def test_rows_that_say_nothing_are_left_out() -> None:
    assert box("t", [("label", "")], bad=False).count("<tr>") == 0

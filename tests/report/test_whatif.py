"""The table of what would have helped, from a literal."""

from __future__ import annotations

import io

from stepguard.records.probes import TrialOutcome, WhatIf
from stepguard.report.probes import progress_bar, sentences, show

SKIP = TrialOutcome(
    name="skip",
    label="skip the step",
    cost=2,
    works=True,
    loss=0.5,
    held_out=0.75,
    distance=0.125,
    losses=(1.0, 0.5),
    steps=12,
    change="nothing to change",
    answers=("SG101",),
)
NOTHING = TrialOutcome(
    name="nothing",
    label="do nothing",
    cost=0,
    bad_step=45,
    bad_value="loss is nan",
    losses=(1.0, float("nan")),
    steps=4,
)
UNTRIED = TrialOutcome(name="own", label="your own: fix", cost=3, why_not="ValueError: no")
FOUND = WhatIf(
    incident="00000045-nonfinite_loss",
    step=45,
    first=16,
    window=29,
    after=8,
    outcomes=(SKIP, NOTHING, UNTRIED),
    remarks=("few batches",),
)


def test_table_shows_the_best_first_and_the_words_for_the_change() -> None:
    out = io.StringIO()
    show(FOUND, out)
    text = " ".join(out.getvalue().split())
    assert "00000045-nonfinite_loss: 29 steps from step 16, then the bad one and 8 after" in text
    assert "skip the step [SG101] does not come back 0.5 0.75 12.5%" in text
    assert "do nothing step 45: loss is nan - -" in text
    assert "not tried: ValueError: no" in text
    assert text.index("skip the step") < text.index("do nothing")
    assert text.endswith("Best: skip the step. To change: nothing to change. - few batches")


def test_where_nothing_helps_it_says_so() -> None:
    told = sentences(WhatIf(incident="a", step=1, outcomes=(NOTHING,)))
    assert told == ["Nothing that was tried helps: the cause is in the code or in all of the data."]


def test_no_bar_is_drawn_where_nobody_sees_it() -> None:
    out = io.StringIO()
    with progress_bar(out) as tell:
        tell(1, 2, "skip")
    assert out.getvalue() == ""

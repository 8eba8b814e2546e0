"""The typed facts of an origin: joining two records, and what is written of them."""

from __future__ import annotations

import math
from dataclasses import fields

from stepguard.records import Evidence, Origin
from stepguard.records.codec import from_jsonable, to_jsonable
from stepguard.records.incident import NO_EVIDENCE, with_evidence


def test_joined_records_hold_the_facts_of_both() -> None:
    joined = Evidence(rows=8) | Evidence(masked_rows=2)
    assert joined == Evidence(rows=8, masked_rows=2)


def test_the_left_record_wins_where_both_state_a_fact() -> None:
    joined = Evidence(singular_at=0.0) | Evidence(singular_at=1.0)
    assert joined.singular_at == 0.0


def test_a_fact_of_the_origin_is_not_overwritten() -> None:
    origin = Origin(step=1, phase="loss", evidence=Evidence(argument="zero"))
    more = with_evidence(origin, Evidence(argument="negative", half_precision=True))
    assert more.evidence == Evidence(argument="zero", half_precision=True)


def test_only_measured_facts_are_written() -> None:
    origin = Origin(step=1, phase="loss", evidence=Evidence(same_bits=False, moves=("a counter",)))
    assert to_jsonable(origin)["evidence"] == {"same_bits": False, "moves": ["a counter"]}
    assert to_jsonable(Origin(step=1, phase="loss"))["evidence"] == {}


def test_facts_come_back_as_they_were_written() -> None:
    evidence = Evidence(number_argument="other", number=math.inf, different_losses=(0.1, 0.2))
    origin = Origin(step=1, phase="loss", evidence=evidence)
    assert from_jsonable(Origin, to_jsonable(origin)) == origin


def test_a_number_that_is_nan_counts_as_measured() -> None:
    written = to_jsonable(Origin(step=1, phase="loss", evidence=Evidence(number=math.nan)))
    read = from_jsonable(Origin, written).evidence.number
    assert read is not None and math.isnan(read)


def test_every_fact_can_be_left_out() -> None:
    assert all(field.default in (None, False, ()) for field in fields(NO_EVIDENCE))


def test_repr_shows_what_was_measured_only() -> None:
    assert repr(Evidence()) == "Evidence()"
    assert repr(Evidence(masked_rows=2, rows=24)) == "Evidence(masked_rows=2, rows=24)"

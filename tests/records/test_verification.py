"""The result of a verification as a record: what counts as good, and that it survives JSON."""

from __future__ import annotations

from stepguard.records.checks import Problem, Rate, Verification, Watched
from stepguard.records.codec import from_jsonable, to_jsonable

BAD = Problem(file="a.pt", kind="nan", tensor="w", detail="1 NaN of 3", role="parameter")
ODD = Problem(file="a.pt", kind="inf", tensor="mask", severity="warning", role="buffer")
OTHER = Problem(file="a.pt", kind="lr", detail="lr is 1")


def test_warnings_leave_a_checkpoint_good() -> None:
    found = Verification(path="a.pt", format="torch zip", problems=(ODD,))
    assert found.ok and not found.corrupt and found.warnings == (ODD,)


def test_other_learning_rate_is_an_error_but_no_corruption() -> None:
    found = Verification(path="a.pt", format="torch zip", problems=(OTHER,))
    assert not found.ok and not found.corrupt


def test_record_survives_json() -> None:
    part = Verification(
        path="a.pt",
        format="torch zip",
        problems=(BAD, ODD),
        rates=(Rate(file="a.pt", name="o/lr", kind="lr", value=0.1),),
        watched=(Watched(name="alpha", role="parameter", count=1, low=0.1, high=0.1),),
        roles={"parameter": 1},
    )
    found = Verification(path=".", format="folder", problems=(BAD, ODD), parts=(part,))
    assert from_jsonable(Verification, to_jsonable(found)) == found
    assert found.corrupt and found.leaves == (part,)


def test_problem_reads_as_a_sentence() -> None:
    assert str(BAD) == "a.pt: w: 1 NaN of 3"

"""The graph of calls: makers behind copies, and what bad values lead back to."""

from __future__ import annotations

from stepguard.locate.operands import Call, Flaws, ancestors, aten, earliest, real_maker


def call(index: int, op: str = "aten.mul", **fields: object) -> Call:
    return Call(index=index, op=op, stage="forward", **fields)  # type: ignore[arg-type]


def test_maker_is_found_behind_casts_and_copies() -> None:
    made = call(0)
    cast = call(1, "aten._to_copy", parents=(made,))
    assert real_maker(call(2, "aten.clone", parents=(cast,))) is made


def test_ancestors_follow_causes_and_not_every_parent() -> None:
    innocent = call(0)
    first = call(1)
    second = call(2, parents=(innocent, first), causes=(first,))
    last = call(3, causes=(second, first))
    assert {one.index for one in ancestors(last)} == {1, 2, 3}


def test_infinity_written_on_purpose_is_not_harmful() -> None:
    mask = call(0, out=Flaws(inf=True), intended_inf=True)
    assert not mask.harmful
    assert call(1, out=Flaws(inf=True)).harmful
    assert call(2, out=Flaws(nan=True), intended_inf=True).harmful


def test_earliest_call_ran_first() -> None:
    assert earliest([]) is None
    first = call(1)
    assert earliest([call(3), first]) is first


def test_operators_are_named_as_the_dispatcher_names_them() -> None:
    assert aten("clone copy_") == {"aten.clone", "aten.copy_"}

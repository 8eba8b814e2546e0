"""Records survive strict JSON, whatever non-finite values they hold; lines are written wholly."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import types
import typing
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from forked import FULL
from stepguard.records import (
    Decision,
    Evidence,
    Finding,
    Incident,
    Operand,
    Origin,
    Policy,
    Reading,
    Remedy,
    Verdict,
)
from stepguard.records.codec import (
    LineFile,
    dumps,
    fields_with_text,
    from_jsonable,
    record,
    restore_floats,
    strict_json,
    to_jsonable,
)
from stepguard.records.incident import with_evidence

NAN, INF = math.nan, math.inf
any_float = st.floats(allow_nan=True, allow_infinity=True) | st.sampled_from(
    [NAN, INF, -INF, -0.0, 5e-324, 1.8e308]
)
any_text = st.text(st.characters(codec=None, exclude_categories=()), max_size=8)
tricky_keys = st.sampled_from(["a", "a_kind", "a_kind_kind", "_kind", "", "b", "b_kind", "~float"])
keys = tricky_keys | any_text
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | any_float
    | any_text
    | st.sampled_from(["nan", "inf", "-inf"])
)
plain = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)


def _refuse(constant: str) -> NoReturn:
    raise AssertionError(f"{constant} is not JSON")


def strict_loads(text: str) -> Any:
    """A reader as strict as the ones of other languages."""
    return json.loads(text, parse_constant=_refuse)


def same(a: Any, b: Any) -> bool:
    """Equality in which NaN equals NaN, 0.0 is not -0.0 and 1 is not 1.0."""
    if type(a) is not type(b):
        return False
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b)


def of(hint: Any) -> st.SearchStrategy[Any]:
    """Values of an annotated type; like st.from_type, but records of records with every optional
    field.
    """
    kind, arguments = typing.get_origin(hint), typing.get_args(hint)
    if kind in (types.UnionType, typing.Union):
        return st.one_of(*map(of, arguments))
    if kind is tuple and Ellipsis not in arguments:
        return st.tuples(*map(of, arguments))
    if kind is tuple:
        return st.lists(of(arguments[0]), max_size=3).map(tuple)
    if kind is dict:
        return st.dictionaries(keys, of(arguments[1]), max_size=4)
    if kind is typing.Literal:
        return st.sampled_from(arguments)
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        hints = typing.get_type_hints(hint)
        # what is left out of comparisons never leaves the process
        kept = [f.name for f in dataclasses.fields(hint) if f.compare]
        return st.builds(hint, **{name: of(hints[name]) for name in kept})
    simple = {
        float: any_float,
        int: st.integers(),
        str: any_text,
        bool: st.booleans(),
        type(None): st.none(),
    }
    return simple[hint]


@pytest.mark.slow
@pytest.mark.parametrize(
    "cls", [Reading, Verdict, Operand, Origin, Remedy, Finding, Decision, Incident]
)
def test_record_survives_strict_json(cls: type) -> None:
    @settings(max_examples=100 if FULL else 30)
    @given(of(cls))
    def check(record: Any) -> None:
        text = dumps(to_jsonable(record))
        assert same(from_jsonable(cls, strict_loads(text)), record)

    check()


@pytest.mark.slow
@given(st.dictionaries(keys, plain, max_size=4))
def test_any_plain_dict_survives_strict_json(value: dict[str, Any]) -> None:
    assume(
        same(restore_floats(value), value)
    )  # not one that looks as if it had been made strict already
    text = dumps(value)
    assert len(text.splitlines()) == 1
    text.encode("utf-8")
    assert same(restore_floats(strict_loads(text)), value)


@given(plain)
def test_strict_json_holds_no_non_finite_float_and_is_not_changed_again(value: Any) -> None:
    once = strict_json(value)
    json.dumps(once, allow_nan=False)
    assert same(strict_json(once), once)


def test_non_finite_value_is_null_beside_its_kind() -> None:
    assert strict_json({"loss": NAN, "norm": INF, "low": -INF}) == {
        "loss": None,
        "loss_kind": "nan",
        "norm": None,
        "norm_kind": "inf",
        "low": None,
        "low_kind": "-inf",
    }


def test_list_gets_one_companion_with_a_place_for_each_element() -> None:
    assert strict_json({"micro": (1.0, NAN)}) == {"micro": [1.0, None], "micro_kind": [None, "nan"]}


def test_loss_component_with_the_name_of_a_companion_is_not_overwritten() -> None:
    reading = Reading(step=0, components={"kl": NAN, "kl_kind": 0.5})
    assert same(from_jsonable(Reading, to_jsonable(reading)), reading)


@pytest.mark.parametrize("end", ["\n", "\r", "\x0b", "\x1c", "\x85", "\u2028", "\u2029"])
def test_no_line_separator_breaks_the_line(end: str) -> None:
    text = dumps({"note": f"a{end}é"})
    assert len(text.splitlines()) == 1
    assert strict_loads(text) == {"note": f"a{end}é"}


def test_undecodable_file_name_is_written_and_read_back() -> None:
    value = {"run": "run-\udcff", "note": "häßlich ✓"}
    assert "✓" in dumps(value)
    assert strict_loads(dumps(value)) == value


def test_field_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValidationError, match="step"):
        from_jsonable(Reading, {"step": "many"})


def test_validation_of_a_record_applies_on_reading_too() -> None:
    with pytest.raises(ValueError, match="max_total"):
        from_jsonable(Policy, {**to_jsonable(Policy()), "max_total": -1})


# --- typed facts


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


# --- lines


def test_half_a_line_of_a_crash_is_ended_by_the_next_line(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"one\ntw")
    file = LineFile(path)
    file.append(b"three\n", durable=True)
    file.close()
    assert path.read_bytes() == b"one\ntw\nthree\n"


def test_deleted_file_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "lines"
    path.parent.mkdir()
    file = LineFile(path)
    file.append(b"one\n")
    path.unlink()
    path.parent.rmdir()
    file.append(b"two\n")
    file.close()
    assert path.read_bytes() == b"two\n"


# --- docstrings that list fields


@record
class Point:
    """A place."""

    x: float = 0.0
    """How far
    to the right.
    """
    y: float = 0.0


def test_fields_follow_the_text_with_type_default_and_their_own_text() -> None:
    assert inspect.getdoc(Point) == (
        "A place.\n\nFields:\n    x: float = 0.0\n        How far to the right.\n    y: float = 0.0"
    )
    assert Point(x=1.0).__doc__ == Point.__doc__
    assert fields_with_text(Point)["y"] == ("y: float = 0.0", "")


def test_class_without_source_keeps_its_own_text() -> None:
    scope: dict[str, type] = {}
    exec("class Made:\n    'As it is.'\n    x: int = 0\n", scope)
    assert record(scope["Made"]).__doc__ == "As it is.\n\nFields:"

"""SG101: the batch already held NaN or Inf."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, certain, likely, possible
from stepguard.diagnose.wording import at_index, counts, spell


def recognise(case: Case) -> Proof | None:
    if case.verdict.finite_anomaly:
        return None
    return _in_batch(case) or _number(case) or _constant(case) or _only_listed(case)


def _in_batch(case: Case) -> Proof | None:
    named = case.tensor.startswith("batch:") and case.tensor in case.reading.bad_inputs
    if case.origin is None or not (named or case.phase == "input"):
        return None
    which = case.tensor or ", ".join(case.reading.bad_inputs)
    if not which:
        # a tensor that no operation made, read before the model was called
        return likely(f"a tensor from outside {_amount(case)}", case.confirmed_samples)
    return certain(f"`{which}` {_amount(case)}", case.confirmed_samples)


def _amount(case: Case) -> str:
    bad = case.bad_operand
    if bad is None:
        number = case.evidence.bad_elements
        amount = "was non-finite"
        if number:
            amount = f"holds {number} non-finite elements"
        return f"{amount} before the model saw it"
    amount = f"holds {counts(bad)} before the model saw it"
    if bad.index is None:
        return amount
    return f"{amount}; the first is {spell(bad.value)}{at_index(bad)}"


def _number(case: Case) -> Proof | None:
    """A Python number, such as a loss weight, that is not finite."""
    value = case.evidence.number
    if value is None or case.unselected:
        return None
    first = (
        f"{case.place} was given the number {case.evidence.number_argument}={value}: a Python "
        f"number from outside model and batch"
    )
    kept_as = case.evidence.attribute
    where = ""
    if kept_as:
        where = f"the attribute `{kept_as}` of the model is {value}"
    tensors = ""
    if case.finite_inputs:
        tensors = "every tensor that went in is finite"
    return certain(first, where, tensors)


def _constant(case: Case) -> Proof | None:
    """A tensor that belongs to no module and no batch; one that a module keeps is SG602."""
    constant = case.evidence.constant
    if constant is None or case.evidence.attribute is not None:
        return None
    text = f"a tensor from outside model and batch was already {constant} when {case.place} read it"
    return likely(text, case.confirmed_samples)


def _only_listed(case: Case) -> Proof | None:
    """The batch holds NaN or Inf, but it is not known to be the origin."""
    if not case.reading.bad_inputs:
        return None
    listed = f"the batch holds NaN or Inf in {', '.join(case.reading.bad_inputs)}"
    if case.origin is None:
        return certain(listed, case.verdict.summary)
    if case.verdict.kind == "nonfinite_input":
        return possible(listed, f"but the first harmful value was born in {case.place}")
    return None


RULE = Rule(code="SG101", recognise=recognise, yields_to=("SG504",))

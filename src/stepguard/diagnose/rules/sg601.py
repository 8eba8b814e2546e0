"""SG601: a parameter was bad before the step."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, certain, likely
from stepguard.diagnose.wording import at_index, counts


def recognise(case: Case) -> Proof | None:
    return _uninitialised(case) or _huge(case) or _not_finite(case)


def _uninitialised(case: Case) -> Proof | None:
    if not case.evidence.uninitialised:
        return None
    # the memory itself was seen; which parameter or table should have filled it was not
    text = f"{case.place} read memory that torch.empty left uninitialised"
    return likely(text, _amount(case))


def _huge(case: Case) -> Proof | None:
    which = case.evidence.huge_parameter
    if which is None or case.facts.committed != 0:
        return None
    text = f"`{which}` is finite but absurdly large before the first update"
    more = (
        f"what {case.place} made of it overflowed; no initialisation gives such values, memory "
        f"that nobody filled does"
    )
    return certain(text, more)


def _not_finite(case: Case) -> Proof | None:
    which = _bad_parameter(case)
    if which is None:
        return None
    early = case.facts.committed == 0 or case.reading.step == 0
    when = "before this step"
    if early:
        when = "before the first step: it was never initialised, or loaded that way"
    stored = [name for name in case.reading.bad_state if name.startswith("param:")]
    more = ""
    if len(stored) > 1:
        more = f"{len(stored)} parameters are non-finite in all"
    # bad optimizer state makes bad parameters with the next update: then SG503 knows more
    by_optimizer = not early and any(name.startswith("opt:") for name in case.reading.bad_state)
    prove = certain
    if by_optimizer:
        prove = likely
    return prove(f"`{which}` was non-finite {when}", _amount(case), more)


def _bad_parameter(case: Case) -> str | None:
    """The name of the bad parameter; None where the origin is something else."""
    if case.reading.state_born:
        return None
    if case.origin is not None and case.phase != "state":
        return None
    if case.tensor:
        if case.tensor.startswith("param:"):
            return case.tensor
        return None
    return next((name for name in case.reading.bad_state if name.startswith("param:")), None)


def _amount(case: Case) -> str:
    bad = case.bad_operand
    if bad is None:
        return ""
    amount = f"it holds {counts(bad)}"
    if bad.index is None:
        return amount
    return f"{amount}, the first{at_index(bad)}"


RULE = Rule(code="SG601", recognise=recognise)

"""A rule: one cause code, how it is recognised, and the page that explains it.

`rules/sg204.py` holds the recognition, `rules/sg204.md` the page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule_text import RuleText, rule_text
from stepguard.records import Certainty, Finding, Remedy
from stepguard.records.finding import Safety
from stepguard.records.forecast import Forecast

ShownBy = Literal["operation", "record", "inference"]
"""What a rule goes by: the operation or stored tensor that was located, with its values; settings
and readings that were recorded as they are; or a conclusion from what was seen later.
"""
SAFETY_ORDER: tuple[str, ...] = get_args(Safety)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What a rule found: sentences with numbers, and how sure it is."""

    certainty: Certainty
    sentences: tuple[str, ...]
    """Empty ones are left out."""
    remedies: tuple[Remedy, ...] = ()
    """Remedies for just this case; they come before the rule's own of the same safety."""
    forecast: Forecast | None = None
    """When it comes, where it has not come yet."""


def certain(*sentences: str, remedies: tuple[Remedy, ...] = ()) -> Proof:
    """The operation and its operands leave no doubt."""
    return Proof(certainty="certain", sentences=sentences, remedies=remedies)


def likely(*sentences: str, remedies: tuple[Remedy, ...] = ()) -> Proof:
    """The numbers fit, and another cause is not excluded."""
    return Proof(certainty="likely", sentences=sentences, remedies=remedies)


def possible(*sentences: str, remedies: tuple[Remedy, ...] = ()) -> Proof:
    """True as well, but rather a circumstance than the cause."""
    return Proof(certainty="possible", sentences=sentences, remedies=remedies)


def foretold(forecast: Forecast | None, consequence: str) -> Proof | None:
    """A trend is clear, and has not reached its limit."""
    if forecast is None:
        return None
    sentence = f"{forecast.sentence}: {consequence}"
    return Proof(certainty="likely", sentences=(sentence,), forecast=forecast)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One cause code."""

    code: str
    recognise: Callable[[Case], Proof | None]
    """Examines a case; None when this is not the cause."""
    yields_to: tuple[str, ...] = ()
    """Codes that go before this one where both are found with the same certainty."""
    shown_by: ShownBy = "operation"

    @property
    def text(self) -> RuleText:
        """The page, read when it is first asked for."""
        return rule_text(self.code)

    @property
    def ordered(self) -> tuple[Remedy, ...]:
        """The remedies, those first that change least."""
        return by_safety(self.text.remedies)

    @property
    def fixed(self) -> str:
        """The safest remedy that is code."""
        return next(remedy.snippet for remedy in self.ordered if remedy.snippet)

    def examine(self, case: Case) -> Finding | None:
        """The finding for this case, or None."""
        proof = self.recognise(case)
        if proof is None:
            return None
        return self.finding(proof)

    def finding(self, proof: Proof) -> Finding:
        """What this proof shows, with the words of the page."""
        return Finding(
            code=self.code,
            title=self.text.title,
            evidence=tuple(sentence for sentence in proof.sentences if sentence),
            certainty=proof.certainty,
            remedies=by_safety(proof.remedies + self.text.remedies),
        )


def by_safety(remedies: tuple[Remedy, ...]) -> tuple[Remedy, ...]:
    return tuple(sorted(remedies, key=lambda remedy: SAFETY_ORDER.index(remedy.safety)))

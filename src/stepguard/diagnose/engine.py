"""From an incident to its findings: every rule examines the case, the most certain goes first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, get_args

from stepguard._errors import StepguardError
from stepguard.diagnose.case import Case, RunFacts
from stepguard.diagnose.remedies import in_their_words
from stepguard.diagnose.rule import Rule
from stepguard.diagnose.rules import RULES, sg950
from stepguard.diagnose.source_line import name_operands
from stepguard.diagnose.trends import Trend
from stepguard.records import Certainty, Finding, Incident, Reading
from stepguard.records.incident import OK
from stepguard.records.probes import Forecast, Look

# --- From an incident to its findings: every rule examines the case, the most certain goes first.


MOST_FINDINGS = 4
CERTAINTY_ORDER: tuple[str, ...] = get_args(Certainty)
SHOWN_BY = {rule.code: rule.shown_by for rule in RULES}
YIELDS_TO = {rule.code: frozenset(rule.yields_to) for rule in RULES}


def diagnose(incident: Incident, facts: RunFacts | None = None) -> tuple[Finding, ...]:
    """Findings with evidence, most certain first; empty when no rule can prove anything. Pure."""
    origin = incident.origin
    if origin is not None:
        origin = name_operands(origin)
    case = Case(
        reading=incident.reading,
        verdict=incident.verdict,
        origin=origin,
        facts=facts if facts is not None else RunFacts(),
    )
    found = [rule.examine(case) for rule in RULES]
    findings = [earned(one, case) for one in ranked([one for one in found if one is not None])]
    findings = uncontested(findings)
    # stable: of findings that are equally sure now, the one whose numbers fit best goes first
    findings.sort(key=_certainty)
    shown = [in_their_words(finding, case) for finding in findings[:MOST_FINDINGS]]
    return tuple(_with_way(finding, case) for finding in shown)


def earned(finding: Finding, case: Case) -> Finding:
    """The finding, at most likely unless its cause was seen and not concluded.

    Rules say how well the numbers fit; whether those numbers were observed is decided here, for
    all of them.
    """
    shown_by = SHOWN_BY[finding.code]
    seen = case.observed if shown_by == "operation" else shown_by == "record"
    if finding.certainty != "certain" or seen:
        return finding
    return replace(finding, certainty="likely")


def uncontested(findings: Sequence[Finding]) -> list[Finding]:
    """The findings, at most likely where another cause is as certain and explains it otherwise.

    One that yields to the other is the same fault seen closer: the 0 that is divided by, and the
    epsilon that was rounded to it.
    """
    sure = [finding for finding in findings if finding.certainty == "certain"]
    judged = []
    for finding in findings:
        rivals = [
            other
            for other in sure
            if other is not finding
            and other.code not in YIELDS_TO[finding.code]
            and finding.code not in YIELDS_TO[other.code]
        ]
        contested = finding.certainty == "certain" and rivals
        judged.append(replace(finding, certainty="likely") if contested else finding)
    return judged


def _certainty(finding: Finding) -> int:
    return CERTAINTY_ORDER.index(finding.certainty)


def ranked(findings: Sequence[Finding]) -> list[Finding]:
    """By certainty, then by what the rules yield to, then by code."""
    waiting = sorted(findings, key=lambda finding: (_certainty(finding), finding.code))
    ordered: list[Finding] = []
    while waiting:
        equals = [finding for finding in waiting if finding.certainty == waiting[0].certainty]
        codes = {finding.code for finding in equals}
        # what rules yield to has no cycle (a test keeps it so): at least one is free
        free = [finding for finding in equals if not YIELDS_TO[finding.code] & codes]
        ordered.append(free[0])
        waiting.remove(free[0])
    return ordered


def _with_way(finding: Finding, case: Case) -> Finding:
    """Add how a NaN of the forward passed a finite loss."""
    dropped_by = case.evidence.discarded_by
    if dropped_by is None:
        return finding
    way = (
        f"{dropped_by} left the NaN out of the loss further on; its gradient, 0 times NaN, was "
        f"not left out"
    )
    return replace(finding, evidence=(*finding.evidence, way))


# --- The page of a rule: the same text on the terminal and in `docs/findings/`.


SAFETY_WORDS = {
    "safe": "healthy steps stay as they are",
    "changes-numbers": "changes values",
    "changes-training": "changes what is learned",
}
GROUPS = {
    "1": "Data",
    "2": "Forward arithmetic",
    "3": "Half precision",
    "4": "Backward only",
    "5": "Optimizer and scale",
    "6": "Stored state",
    "7": "Ranks, hardware, compiler",
    "8": "Configuration",
    "9": "Silent failures",
}


# named after what happened, as KeyError's other kin are
class UnknownCode(StepguardError, KeyError):  # noqa: N818
    """There is no rule of that code; the message lists the near ones."""

    def __str__(self) -> str:
        return str(self.args[0])


def all_rules() -> tuple[Rule, ...]:
    """Every rule, in the order of its code."""
    return RULES


def rule_of(code: str) -> Rule:
    """The rule of a code in any spelling (`sg204`, `204`, ` SG204 `)."""
    wanted = code.strip().upper()
    wanted = wanted
    if wanted.isdigit():
        wanted = f"SG{wanted}"
    for rule in RULES:
        if rule.code == wanted:
            return rule
    known = [rule.code for rule in RULES]
    near = get_close_matches(wanted, known, n=4, cutoff=0.5) or [f"{known[0]} to {known[-1]}"]
    raise UnknownCode(
        f"{code!r} is not a finding; near it: {', '.join(near)}. `stepguard explain` lists all."
    )


def explain(code: str) -> str:
    """The markdown page of a rule; raises UnknownCode with the near codes otherwise."""
    return page(rule_of(code))


def page(rule: Rule) -> str:
    """One rule as markdown, under fixed headings."""
    text = rule.text
    parts = [
        f"# {rule.code}: {text.title}",
        f"## What it means\n\n{text.what}",
        f"## Why it happens\n\n{text.why}",
        f"## How stepguard knows\n\n{text.how}",
        f"## What to do\n\nEach snippet replaces the last lines of the example "
        f"below.\n\n{_remedies(rule)}",
        f"## Example\n\n{_example(rule)}",
    ]
    if text.see:
        links = [f"- {_link(reference)}" for reference in text.see]
        parts.append("## See also\n\n" + "\n".join(links))
    return "\n\n".join(parts) + "\n"


def _remedies(rule: Rule) -> str:
    parts = []
    for number, remedy in enumerate(rule.ordered, start=1):
        safety = f"*({remedy.safety}: {SAFETY_WORDS[remedy.safety]})*"
        parts.append(f"{number}. {remedy.title}. {safety}{_indented(remedy.snippet)}")
    return "\n\n".join(parts)


def _indented(snippet: str) -> str:
    if not snippet:
        return ""
    lines = [f"   {line}".rstrip() for line in snippet.splitlines()]
    code = "\n".join(lines)
    return f"\n\n   ```python\n{code}\n   ```"


def _example(rule: Rule) -> str:
    bad = f"```python\n{rule.text.setup}\n\n{rule.text.bad}\n```"
    return f"{bad}\n\nThe last lines, repaired:\n\n```python\n{rule.fixed}\n```"


def _link(reference: str) -> str:
    if reference.startswith("https://"):
        return f"<{reference}>"
    repository, _, number = reference.partition("#")
    return f"[{reference}](https://github.com/{repository}/issues/{number})"


def index() -> str:
    """All codes as a markdown page, grouped by their hundred."""
    parts = [
        "# Findings",
        "What stepguard can prove about a bad step. `stepguard explain SG204` prints a page.",
    ]
    for digit, name in GROUPS.items():
        rows = []
        for rule in RULES:
            if rule.code[2] == digit:
                rows.append(f"| [{rule.code}]({rule.code}.md) | {rule.text.title} |")
        parts.append(f"## {name}\n\n| code | cause |\n|---|---|\n" + "\n".join(rows))
    return "\n\n".join(parts) + "\n"


# --- Silent failures: what trains wrongly with finite numbers, from deep looks and plain
# readings.


SERIES = ("SG90", "SG91", "SG92")
HEALTHY_SERIES = "SG9"
"""Of a run in which every step is finite: these and forecasts."""


def silent_findings(
    looks: Sequence[Look], recent: Sequence[Reading], **known: Any
) -> tuple[Finding, ...]:
    """What the run does wrong without a bad value, by code. Pure.

    `known`: further fields of the case, such as `ended`.
    """
    case = replace(healthy_case(looks, recent), **known)
    found = []
    for rule in RULES:
        if rule.code.startswith(SERIES):
            finding = rule.examine(case)
            if finding is not None:
                found.append(finding)
    return tuple(found)


def healthy_case(looks: Sequence[Look], recent: Sequence[Reading]) -> Case:
    """A run without a bad step, as the rules see it."""
    newest = recent[-1] if recent else Reading(step=looks[-1].step if looks else 0)
    return Case(reading=newest, verdict=OK, looks=tuple(looks), recent=tuple(recent))


# --- What a healthy run is heading for: trends of its looks and readings, extended to their
# limits.


FORECAST_SERIES = "SG95"
MOVED = 0.1
"""Doublings between two looks that are a movement."""
TRENDS = (sg950.TREND, sg950.SG953_TREND, sg950.SG954_TREND, sg950.SG955_TREND, sg950.SG956_TREND)


def forecasts(
    looks: Sequence[Look], recent: Sequence[Reading]
) -> tuple[tuple[Finding, Forecast], ...]:
    """What comes if the run goes on like this, by code. Pure.

    `recent` holds committed steps and those that a GradScaler skipped.
    """
    case = healthy_case(looks, recent)
    found = []
    for rule in RULES:
        if rule.code.startswith(FORECAST_SERIES):
            proof = rule.recognise(case)
            if proof is not None and proof.forecast is not None:
                found.append((rule.finding(proof), proof.forecast))
    return tuple(found)


def trend_begins(looks: Sequence[Look], recent: Sequence[Reading]) -> bool:
    """Something is near a limit, or on its way there: worth a closer look, not worth reporting."""
    if sg950.diverging(recent, sg950.BEGINS) is not None:
        return True
    return len(looks) > 1 and any(_moves_on(looks[-2], looks[-1], trend) for trend in TRENDS)


def _moves_on(before: Look, now: Look, trend: Trend) -> bool:
    """Is a figure that is near its limit nearer than at the look before?"""
    sign = 1.0 if trend.rising else -1.0
    earlier = {one.place: one.value for one in trend.figures(before)}
    for figure in trend.figures(now):
        then = earlier.get(figure.place)
        if not figure.near or figure.value is None or then is None:
            continue
        if sign * (figure.value - then) > MOVED:
            return True
    return False

"""From an incident to its findings: every rule examines the case, the most certain goes first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from textwrap import indent
from typing import Any, get_args

from stepguard._errors import StepguardError
from stepguard.diagnose.case import Case, RunFacts
from stepguard.diagnose.remedies import in_their_words
from stepguard.diagnose.rule import Proof, Rule
from stepguard.diagnose.rules import RULES
from stepguard.diagnose.source_line import name_operands
from stepguard.records import Certainty, Finding, Incident, Reading, Remedy
from stepguard.records.incident import OK
from stepguard.records.probes import Forecast, Look

# --- From an incident to its findings: every rule examines the case, the most certain goes first.


MOST_FINDINGS = 4
CERTAINTY_ORDER: tuple[str, ...] = get_args(Certainty)
Found = tuple[Rule, Proof]
HEALTHY_SERIES = "SG9"
"""Prefix of codes for runs whose steps are all finite: silent failures and forecasts."""
SERIES = ("SG90", "SG91", "SG92", "SG93")
"""Silent failures."""
FORECAST_SERIES = "SG95"


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
    found = []
    for rule in RULES:
        proof = None if rule.code.startswith(HEALTHY_SERIES) else rule.examine(case)
        if proof is not None:
            found.append((rule, proof))
    # Rules say how well the numbers fit; whether those numbers were observed is decided here, for
    # all of them: what was concluded is at most likely.
    seen = {"operation": case.observed, "record": True, "inference": False}
    judged = []
    for rule, proof in ranked(found):
        judged.append((rule, proof if seen[rule.shown_by] else _doubted(proof)))
    judged = uncontested(judged)
    # stable: of findings that are equally sure now, the one whose numbers fit best goes first
    judged.sort(key=_certainty)
    shown = []
    for rule, proof in judged[:MOST_FINDINGS]:
        finding = in_their_words(rule.finding(case, proof), case, proof)
        if case.evidence.discarded_by is not None:
            # how a NaN of the forward passed a finite loss
            way = (
                f"{case.evidence.discarded_by} dropped the NaN from the loss further on, but "
                f"not its gradient, 0 times NaN"
            )
            finding = replace(finding, evidence=(*finding.evidence, way))
        shown.append(finding)
    return tuple(shown)


def _doubted(proof: Proof) -> Proof:
    return proof._replace(certainty="likely") if proof.certainty == "certain" else proof


def _certainty(found: Found) -> int:
    return CERTAINTY_ORDER.index(found[1].certainty)


def uncontested(found: Sequence[Found]) -> list[Found]:
    """What was found, at most likely where another cause is as certain and explains it otherwise.

    One that yields to the other is the same fault seen closer: the 0 that is divided by, and the
    epsilon that was rounded to it.
    """
    sure = [rule for rule, proof in found if proof.certainty == "certain"]
    judged = []
    for rule, proof in found:
        for other in sure:
            related = other.code in rule.yields_to or rule.code in other.yields_to
            if other is not rule and not related:
                proof = _doubted(proof)
        judged.append((rule, proof))
    return judged


def ranked(found: Sequence[Found]) -> list[Found]:
    """By certainty, then by what the rules yield to, then by code."""
    waiting = sorted(found, key=lambda one: (_certainty(one), one[0].code))
    ordered = []
    while waiting:
        first = _certainty(waiting[0])
        codes = {one[0].code for one in waiting if _certainty(one) == first}
        # what rules yield to has no cycle (a test keeps it so): at least one is free
        free = next(one for one in waiting if not one[0].yields_to & codes)
        ordered.append(free)
        waiting.remove(free)
    return ordered


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
    if wanted.isdigit():
        wanted = f"SG{wanted}"
    known = {rule.code: rule for rule in RULES}
    if wanted in known:
        return known[wanted]
    codes = list(known)
    near = get_close_matches(wanted, codes, n=4, cutoff=0.5) or [f"{codes[0]} to {codes[-1]}"]
    raise UnknownCode(
        f"{code!r} is not a finding; near it: {', '.join(near)}. `stepguard explain` lists all."
    )


def explain(code: str) -> str:
    """The markdown page of a rule; raises UnknownCode with the near codes otherwise."""
    return page(rule_of(code))


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """The page of a code."""

    code: str
    title: str
    what: str
    """What it means."""
    why: str
    """Why it happens."""
    how: str
    """How stepguard knows."""
    setup: str
    """What the example starts from."""
    bad: str
    """The lines that go wrong."""
    fixed: str
    """The lines of the safest remedy that is code."""
    remedies: tuple[Remedy, ...]
    """Remedies, the safest first."""
    see: tuple[str, ...]
    """Public threads and documentation pages."""


def explained(rule: Rule) -> Explained:
    """The page of a rule as plain data."""
    text = rule.text
    shared = {name: getattr(text, name) for name in ("title", "what", "why", "how", "setup", "bad")}
    return Explained(
        code=rule.code, fixed=rule.fixed, remedies=text.remedies, see=text.see, **shared
    )


def page(rule: Rule) -> str:
    """One rule as markdown, under fixed headings."""
    text = rule.text
    remedies = ["Each snippet replaces the last lines of the example below."]
    for number, remedy in enumerate(text.remedies, start=1):
        safety = f"*({remedy.safety}: {SAFETY_WORDS[remedy.safety]})*"
        item = f"{number}. {remedy.title}. {safety}"
        if remedy.snippet:
            item += "\n\n" + indent(f"```python\n{remedy.snippet}\n```", "   ")
        remedies.append(item)
    links = []
    for reference in text.see:
        repository, _, number_of_issue = reference.partition("#")
        link = f"[{reference}](https://github.com/{repository}/issues/{number_of_issue})"
        links.append(f"- <{reference}>" if reference.startswith("https://") else f"- {link}")
    parts = {
        "What it means": text.what,
        "Why it happens": text.why,
        "How stepguard knows": text.how,
        "What to do": "\n\n".join(remedies),
        "Example": f"```python\n{text.setup}\n\n{text.bad}\n```\n\nThe last lines, repaired:\n\n"
        f"```python\n{rule.fixed}\n```",
        "See also": "\n".join(links),
    }
    sections = [f"## {heading}\n\n{body}" for heading, body in parts.items() if body]
    return "\n\n".join([f"# {rule.code}: {text.title}", *sections]) + "\n"


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


# --- A healthy run: what trains wrongly with finite numbers, and what the run is heading for.


def silent_findings(
    looks: Sequence[Look], recent: Sequence[Reading], **known: Any
) -> tuple[Finding, ...]:
    """What the run does wrong without a bad value, by code. Pure.

    `known`: further fields of the case, such as `ended`.
    """
    return tuple(finding for finding, _ in _of_healthy_run(SERIES, looks, recent, **known))


def forecasts(
    looks: Sequence[Look], recent: Sequence[Reading]
) -> tuple[tuple[Finding, Forecast], ...]:
    """What comes if the run goes on like this, by code. Pure.

    `recent` holds committed steps and those that a GradScaler skipped.
    """
    found = _of_healthy_run((FORECAST_SERIES,), looks, recent)
    return tuple((finding, proof.fields["forecast"]) for finding, proof in found)


def _of_healthy_run(
    series: tuple[str, ...], looks: Sequence[Look], recent: Sequence[Reading], **known: Any
) -> list[tuple[Finding, Proof]]:
    """What the rules of these series find in a run without a bad step."""
    newest = recent[-1] if recent else Reading(step=looks[-1].step if looks else 0)
    case = Case(reading=newest, verdict=OK, looks=tuple(looks), recent=tuple(recent), **known)
    found = []
    for rule in RULES:
        proof = rule.examine(case) if rule.code.startswith(series) else None
        if proof is not None:
            found.append((rule.finding(case, proof), proof))
    return found

"""The page of a rule: the same text on the terminal and in `docs/findings/`."""

from __future__ import annotations

from difflib import get_close_matches

from stepguard._errors import StepguardError
from stepguard.diagnose.rule import Rule
from stepguard.diagnose.rules import RULES

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

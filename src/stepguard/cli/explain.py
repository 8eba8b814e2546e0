"""`stepguard explain SG204`: the page of a finding, without importing torch."""

from __future__ import annotations

import json as json_module
import sys
from dataclasses import asdict
from typing import Annotated

import typer

from stepguard._errors import EXIT_USAGE
from stepguard.cli._terminal import echo
from stepguard.diagnose.page import UnknownCode, all_rules, index, page, rule_of
from stepguard.diagnose.rule import Rule


def explain(
    code: Annotated[
        str, typer.Argument(help="A code such as SG204; without one, all codes are listed.")
    ] = "",
    json: Annotated[bool, typer.Option("--json", help="Print the same as JSON.")] = False,
) -> None:
    """Explain a finding: what it means, why it happens, how stepguard knows, what to do."""
    try:
        rules = (rule_of(code),) if code else all_rules()
    except UnknownCode as unknown:
        echo(str(unknown), err=True)
        raise typer.Exit(EXIT_USAGE) from None
    if json:
        listed = [as_plain(rule) for rule in rules]
        printed = listed[0] if code else listed
        echo(json_module.dumps(printed, indent=2, ensure_ascii=False))
    else:
        _print(page(rules[0]) if code else index())


def as_plain(rule: Rule) -> dict[str, object]:
    """A rule as JSON values."""
    text = rule.text
    return {
        "code": rule.code,
        "title": text.title,
        "what": text.what,
        "why": text.why,
        "how": text.how,
        "setup": text.setup,
        "bad": text.bad,
        "fixed": rule.fixed,
        "remedies": [asdict(remedy) for remedy in rule.ordered],
        "see": list(text.see),
    }


def _print(markdown: str) -> None:
    """Print rendered Markdown on a terminal, plain text in a pipe."""
    if not sys.stdout.isatty():
        echo(markdown, nl=False)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console().print(Markdown(markdown))

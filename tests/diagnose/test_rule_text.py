"""The pages of the rules are read from the markdown beside them."""

from __future__ import annotations

import pytest

from stepguard.diagnose.rules import RULES
from stepguard.diagnose.wording import parse, rule_text

PAGE = """# SG999: a made-up cause

## What it means

Two lines that are
one paragraph.

## Why it happens

Because.

## How stepguard knows

By looking.

## What to do

### Do nothing (safe)

### Change the numbers (slightly) (changes-numbers)

```python
if good:
    loss = 0.0
```

## Example

```python
import torch
```

The lines that go wrong:

```python
loss = 1 / 0
```

## See also

- owner/repository#1
- https://example.org/page

## Evidence

### seen

- {place} is bad
- {verdict.summary}

## In an incident: in_batch

### Leave {who} out (changes-training)

## In an incident

### Find `{tensor}` (safe)

## In the failing line

### Sqrt Rsqrt: where {x} is 0: nothing (safe)

```python
safe_sqrt({x})
```
"""


def test_a_paragraph_is_joined_to_one_line() -> None:
    assert parse(PAGE).what == "Two lines that are one paragraph."


def test_title_and_references_are_read() -> None:
    text = parse(PAGE)
    assert text.title == "a made-up cause"
    assert text.see == ("owner/repository#1", "https://example.org/page")


def test_remedies_have_title_safety_and_snippet() -> None:
    nothing, change = parse(PAGE).remedies
    assert (nothing.title, nothing.safety, nothing.snippet) == ("Do nothing", "safe", "")
    assert (change.title, change.safety) == ("Change the numbers (slightly)", "changes-numbers")
    assert change.snippet == "if good:\n    loss = 0.0"


def test_sentences_and_remedies_of_an_incident_are_read_with_their_conditions() -> None:
    text = parse(PAGE)
    assert text.evidence["seen"] == ("{place} is bad", "{verdict.summary}")
    (condition, (leave,)), (otherwise, (find,)) = text.incident
    assert (condition, leave.title) == ("in_batch", "Leave {who} out")
    assert (otherwise, find.title) == ("", "Find `{tensor}`")


def test_replacements_are_read_by_operation() -> None:
    name, fix = parse(PAGE).in_line["Rsqrt"]
    assert (name, fix.title, fix.snippet) == ("sqrt", "where {x} is 0: nothing", "safe_sqrt({x})")


def test_example_is_split_into_setup_and_bad_lines() -> None:
    text = parse(PAGE)
    assert (text.setup, text.bad) == ("import torch", "loss = 1 / 0")


def test_a_missing_heading_is_an_error() -> None:
    with pytest.raises(KeyError, match="Why it happens"):
        parse(PAGE.replace("## Why it happens", "Why it happens"))


@pytest.mark.parametrize("code", [rule.code for rule in RULES])
def test_every_rule_has_a_complete_page(code: str) -> None:
    text = rule_text(code)
    assert all((text.title, text.what, text.why, text.how, text.setup, text.bad, text.see))
    assert text.remedies


def test_the_heading_of_a_page_is_its_code() -> None:
    from importlib.resources import files

    for rule in RULES:
        page = files("stepguard.diagnose.rules").joinpath(f"{rule.code.lower()}.md")
        assert page.read_text(encoding="utf-8").startswith(f"# {rule.code}: ")

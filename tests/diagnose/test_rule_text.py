"""The pages of the rules are read from the markdown beside them."""

from __future__ import annotations

import ast
import re
import string
from pathlib import Path

import pytest

from stepguard.diagnose import Case, rules
from stepguard.diagnose.rule import RuleText, parse, rule_text
from stepguard.diagnose.rules import RULES

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


FOLDER = Path(rules.__file__).parent
FILLED_IN = {"who", "in_batch", "statement", "no_line"}
"""Fields that every remedy of an incident can have (remedies.py)."""


def pages_of(module: Path) -> dict[str, RuleText]:
    """The pages whose rules a module recognises: sg200.py stops where sg300.py begins."""
    modules = sorted(path.stem for path in FOLDER.glob("sg*.py"))
    found = {}
    for rule in RULES:
        if max(name for name in modules if name < rule.code.lower()) == module.stem:
            found[rule.code] = rule.text
    return found


@pytest.mark.parametrize("module", sorted(FOLDER.glob("sg*.py")), ids=lambda path: path.stem)
def test_pages_say_what_their_rules_find(module: Path) -> None:
    """What a rule names has sentences on its page, and no sentence is left over."""
    tree = ast.parse(module.read_text(encoding="utf-8"))
    named = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            named.add(node.value)
    called = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        if node.func.id in ("certain", "likely", "possible", "prove"):
            called |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
    said = {name for page in pages_of(module).values() for name in page.evidence}
    assert called <= said
    assert said - {""} <= named


@pytest.mark.parametrize("module", sorted(FOLDER.glob("sg*.py")), ids=lambda path: path.stem)
def test_fields_of_a_page_are_known(module: Path) -> None:
    tree = ast.parse(module.read_text(encoding="utf-8"))
    known = FILLED_IN | set(dir(Case))
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg:
            known.add(node.arg)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            known.add(node.value)
    for code, page in pages_of(module).items():
        sentences = [one for some in page.evidence.values() for one in some]
        for condition, remedies in page.incident:
            sentences += ["{" + name.removeprefix("not ") + "}" for name in condition.split(", ")]
            sentences += [text for one in remedies for text in (one.title, one.snippet)]
        for sentence in sentences:
            for _, field, _, _ in string.Formatter().parse(sentence):
                assert not field or re.split(r"[.\[]", field)[0] in known, (code, sentence)

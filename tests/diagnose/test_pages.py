"""The pages of the findings: complete, true when their examples are run, printed by `explain`."""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import re
import string
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from stepguard._errors import EXIT_USAGE, StepguardError
from stepguard.cli.runs import explain as explain_command
from stepguard.diagnose import Case, Rule, UnknownCode, all_rules, explain, rules
from stepguard.diagnose.engine import HEALTHY_SERIES
from stepguard.diagnose.rule import RuleText, parse

ROOT = Path(__file__).resolve().parents[2]
HEADINGS = ["What it means", "Why it happens", "How stepguard knows", "What to do", "Example"]
SAFETY = ["safe", "changes-numbers", "changes-training"]
LAST = {100: 104, 200: 209, 300: 302, 400: 403, 500: 506, 600: 603, 700: 705, 800: 803, 900: 933}
"""The last code of each hundred; forecasts go from 951 to 956."""
CODES = [f"SG{n}" for first, last in LAST.items() for n in range(first + 1, last + 1)]
CODES += [f"SG{n}" for n in range(951, 957)]
OF_BAD_STEPS = [rule for rule in all_rules() if not rule.code.startswith(HEALTHY_SERIES)]
"""test_sg900.py runs the examples of the others."""
Names = dict[str, Any]

# --- complete


def test_every_code_of_the_design_has_exactly_one_rule() -> None:
    assert [rule.code for rule in all_rules()] == CODES


def faults_of(rule: Rule) -> Iterator[str]:
    """What is wrong with a page."""
    text, lines = rule.text, explain(rule.code).splitlines()
    source = (Path(rules.__file__).parent / f"{rule.code.lower()}.md").read_text(encoding="utf-8")
    if lines[0] != f"# {rule.code}: {text.title}" or not source.startswith(f"# {rule.code}: "):
        yield "its heading is not its code and title"
    if [line[3:] for line in lines if line.startswith("## ")][:5] != HEADINGS:
        yield "its headings are not the fixed ones in order"
    if not all((text.title, text.what, text.why, text.how, text.setup, text.bad, text.remedies)):
        yield "a section is empty"
    ranks = [SAFETY.index(remedy.safety) for remedy in rule.text.remedies]
    if ranks != sorted(ranks):
        yield "remedies are not ordered by how little they change"
    public = [see for see in text.see if see.startswith("https://") or "/" in see.partition("#")[0]]
    if not public or len(public) < len(text.see):
        yield "its evidence is not public"
    if rule in OF_BAD_STEPS:
        if rule.fixed != next(remedy.snippet for remedy in rule.text.remedies if remedy.snippet):
            yield "no remedy is code"
        first = rule.text.remedies[0].title.lower()
        if "lower" in first or "learning rate" in first:
            yield "its first advice is a lower learning rate"


def test_every_page_is_complete_and_in_order() -> None:
    assert [f"{rule.code}: {fault}" for rule in all_rules() for fault in faults_of(rule)] == []


FOLDER = Path(rules.__file__).parent
MODULES = sorted(FOLDER.glob("sg*.py"))
PROOFS = ("certain", "likely", "possible", "prove")
FILLED_IN = {"who", "in_batch", "statement", "no_line"}
"""Fields that every remedy of an incident can have (remedies.py)."""


def pages_of(module: Path) -> dict[str, RuleText]:
    """The pages whose rules a module recognises: sg200.py stops where sg300.py begins."""
    found = {}
    for rule in all_rules():
        if max(one.stem for one in MODULES if one.stem < rule.code.lower()) == module.stem:
            found[rule.code] = rule.text
    return found


def test_pages_say_what_their_rules_find_and_know_their_fields() -> None:
    """What a rule names has sentences on its page, and no sentence or field is left over."""
    for module in MODULES:
        nodes = list(ast.walk(ast.parse(module.read_text(encoding="utf-8"))))
        words = {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        called = set()
        for node in nodes:
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            if node.func.id in PROOFS:
                called |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
        said = {name for page in pages_of(module).values() for name in page.evidence}
        assert called <= said and said - {""} <= words, module
        known = {node.arg for node in nodes if isinstance(node, ast.keyword) and node.arg}
        known |= FILLED_IN | set(dir(Case)) | words
        for code, page in pages_of(module).items():
            sentences = [one for some in page.evidence.values() for one in some]
            for condition, remedies in page.incident:
                sentences += ["{" + one.removeprefix("not ") + "}" for one in condition.split(", ")]
                sentences += [text for one in remedies for text in (one.title, one.snippet)]
            for sentence in sentences:
                for _, field, _, _ in string.Formatter().parse(sentence):
                    assert not field or re.split(r"[.\[]", field)[0] in known, (code, sentence)


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


def test_a_page_is_read_from_its_markdown() -> None:
    text = parse(PAGE)
    assert (text.title, text.what) == ("a made-up cause", "Two lines that are one paragraph.")
    assert text.see == ("owner/repository#1", "https://example.org/page")
    nothing, change = text.remedies
    assert (nothing.title, nothing.safety, nothing.snippet) == ("Do nothing", "safe", "")
    assert (change.title, change.safety) == ("Change the numbers (slightly)", "changes-numbers")
    assert change.snippet == "if good:\n    loss = 0.0"
    assert (text.setup, text.bad) == ("import torch", "loss = 1 / 0")
    assert text.evidence["seen"] == ("{place} is bad", "{verdict.summary}")
    (condition, (leave,)), (otherwise, (find,)) = text.incident
    assert (condition, leave.title) == ("in_batch", "Leave {who} out")
    assert (otherwise, find.title) == ("", "Find `{tensor}`")
    name, fix = text.in_line["Rsqrt"]
    assert (name, fix.title, fix.snippet) == ("sqrt", "where {x} is 0: nothing", "safe_sqrt({x})")
    with pytest.raises(KeyError, match="Why it happens"):
        parse(PAGE.replace("## Why it happens", "Why it happens"))


# --- true


def run(rule: Rule, lines: str) -> Names:
    """The example with these lines in the place of the bad ones, and backward where the lines leave
    it to us.
    """
    names: Names = {"__name__": "example"}
    torch.manual_seed(0)
    exec(compile(rule.text.setup, f"{rule.code} setup", "exec"), names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(lines, f"{rule.code} lines", "exec"), names)
        loss = names.get("loss")
        left_to_us = ".backward()" not in rule.text.setup + lines
        if isinstance(loss, torch.Tensor) and loss.requires_grad and left_to_us:
            loss.backward()
    torch.use_deterministic_algorithms(False)
    return names


def tensors(names: Names) -> Iterator[torch.Tensor]:
    """What a training run keeps: the loss, leaves and their gradients, module state, optimizer
    state.
    """
    for value in list(names.values()):
        if isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad:
            yield value
            yield from () if value.grad is None else (value.grad,)
        elif isinstance(value, torch.nn.Module):
            yield from value.state_dict().values()
            yield from (p.grad for p in value.parameters() if p.grad is not None)
        elif isinstance(value, torch.optim.Optimizer):
            kept = [slot for slots in value.state.values() for slot in slots.values()]
            yield from (slot for slot in kept if isinstance(slot, torch.Tensor))
    if isinstance(names.get("loss"), torch.Tensor):
        yield names["loss"].detach()


def is_finite(names: Names) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in tensors(names) if t.is_floating_point())


def learns(names: Names) -> bool:
    """Finite, and some gradient is not 0."""
    leaves = [v for v in names.values() if isinstance(v, torch.Tensor) and v.is_leaf]
    leaves += [p for v in names.values() if isinstance(v, torch.nn.Module) for p in v.parameters()]
    grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
    return is_finite(names) and any(bool(grad.abs().max() > 0) for grad in grads)


def is_small(names: Names) -> bool:
    loss = float(names["loss"].detach())
    return math.isfinite(loss) and loss < 10


def runs_as_configured(names: Names) -> bool:
    return all(group["lr"] == names["configured"] for group in names["optimizer"].param_groups)


def are_copies(names: Names) -> bool:
    first, second = names["ranks"]
    return torch.equal(first.weight, second.weight)


def share_nothing(names: Names) -> bool:
    first, second = names["read"]
    return not set(first) & set(second)


HEALTHY: dict[str, Callable[[Names], bool]] = {
    "SG501": learns,
    "SG504": is_small,
    "SG505": is_small,
    "SG704": are_copies,
    "SG705": share_nothing,
    "SG801": learns,
    "SG802": runs_as_configured,
    "SG803": learns,
}
"""What healthy means where finite is not the question."""


def test_every_example_fails_as_its_page_says() -> None:
    healthy = [r for r in OF_BAD_STEPS if HEALTHY.get(r.code, is_finite)(run(r, r.text.bad))]
    assert [rule.code for rule in healthy] == []


def test_every_remedy_with_a_snippet_cures_its_example() -> None:
    ill = []
    for rule in OF_BAD_STEPS:
        for remedy in rule.text.remedies:
            if remedy.snippet and not HEALTHY.get(rule.code, is_finite)(run(rule, remedy.snippet)):
                ill.append((rule.code, remedy.title))
    assert ill == []


# --- printed


def script() -> ModuleType:
    path = ROOT / "scripts" / "write_findings.py"
    spec = importlib.util.spec_from_file_location("write_findings", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_committed_pages_are_up_to_date() -> None:
    assert script().stale() == [], "run python scripts/write_findings.py"


def test_check_names_a_page_that_lacks_its_rule(tmp_path: Path) -> None:
    writer = script()
    writer.write(tmp_path)
    (tmp_path / "SG999.md").write_text("gone")
    (tmp_path / "SG101.md").write_text("edited by hand")
    assert writer.stale(tmp_path) == ["SG101.md", "SG999.md"]
    writer.write(tmp_path)
    assert writer.stale(tmp_path) == []


def test_code_is_found_in_any_spelling_and_a_wrong_one_is_answered() -> None:
    for spelling in ("SG204", "sg204", " Sg204 ", "204"):
        assert explain(spelling).startswith("# SG204")
    with pytest.raises(
        UnknownCode, match=r"'SG219' is not a finding; near it: .*SG2\d\d"
    ) as raised:
        explain("SG219")
    assert isinstance(raised.value, StepguardError)
    with pytest.raises(UnknownCode, match="SG101 to SG956"):
        explain("why")


def said(*words: str) -> str:
    app = typer.Typer()
    app.command("explain")(explain_command)
    app.command("other")(lambda: None)  # a lone command would swallow its own name
    result = CliRunner().invoke(app, ["explain", *words])
    assert result.exit_code == (EXIT_USAGE if "SG999" in words else 0)
    return result.output


def test_command_prints_pages_lists_and_json() -> None:
    assert said("sg401") == explain("SG401"), "plain text in a pipe"
    assert all(code in said() for code in CODES)
    found = json.loads(said("SG502", "--json"))
    assert (found["code"], found["remedies"][0]["safety"]) == ("SG502", "changes-numbers")
    assert len(json.loads(said("--json"))) == len(CODES)
    assert "is not a finding" in said("SG999")


def test_diagnosing_and_explaining_import_no_torch() -> None:
    lines = (
        "import sys, stepguard.diagnose as d, stepguard.cli.runs\n"
        "d.explain('SG101')\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", lines], check=True)


def test_diagnose_imports_nothing_of_its_own_layer() -> None:
    siblings = ("judge", "report", "journal", "locate", "state", "guard")
    for path in (ROOT / "src" / "stepguard" / "diagnose").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not [name for name in siblings if f"stepguard.{name}" in text], path

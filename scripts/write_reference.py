"""Writes what the docs say about settings and options, from the code that reads them.

python scripts/write_reference.py            write docs/configuration.md, the table of cli.md and
                                             docs/report.schema.json
python scripts/write_reference.py --check    exit 1 and name the pages that are not up to date
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from typer.main import get_command

from stepguard.cli.app import app
from stepguard.cli.schemas import COMMANDS, schema_of
from stepguard.records import GuardConfig, Policy, Probes, Ranks, Snapshots
from stepguard.records.codec import fields_with_text

ROOT = Path(__file__).resolve().parent.parent
CONFIGURATION = ROOT / "docs" / "configuration.md"
COMMAND_LINE = ROOT / "docs" / "cli.md"
REPORT_SCHEMA = ROOT / "docs" / "report.schema.json"
BEGIN = "<!-- commands: written by scripts/write_reference.py -->"
END = "<!-- end of commands -->"
TOPICS = {
    "What is written": ("run_dir", "human_log", "terminal", "sinks"),
    "The step": ("clip_norm", "loss_scale"),
    "Checkpoints": ("checkpoint_every", "keep", "resume_lr", "on_signal"),
    "Capsules": ("capsule", "capsule_limit", "build"),
    "Samples and labels": ("id_key", "labels_key"),
    "Groups": ("policy", "snapshots", "probes", "ranks"),
}
"""The order in which the page tells the fields of GuardConfig."""
FURTHER = "Further settings"
INTRODUCTION = """# Configuration

Every field has a default: `GuardConfig()` vetoes and explains bad steps and writes nothing to disk.

```python
policy = stepguard.Policy(max_total=20)
probes = stepguard.Probes(anomalies="act")
config = stepguard.GuardConfig(run_dir="runs/a", policy=policy, probes=probes)
config = stepguard.GuardConfig.from_file("guard.toml")
```

In a file (TOML, YAML or JSON) the fields have the same names:
[settings of a script](scripts.md#settings-of-a-script-that-stays-as-it-is). An invalid value raises
`ConfigError`. `help(stepguard.GuardConfig)` prints these tables, too
(`python scripts/write_reference.py` writes them from the code).
"""
GROUPS = {
    Policy: "what the guard may do about an incident, and how much a run may lose. "
    "[Recovery](recovery.md) says which fault gets which remedy.",
    Snapshots: "copies of the training state in memory, the targets of a rewind.",
    Probes: "what is measured besides the verdict, and how long locating a cause may take.",
    Ranks: "how long ranks wait for each other, and how often they are compared.",
}


def configuration() -> str:
    """The page of GuardConfig and its groups."""
    fields = fields_with_text(GuardConfig)
    told = {name for names in TOPICS.values() for name in names}
    topics = dict(TOPICS)
    rest = tuple(name for name in fields if name not in told)
    if rest:
        topics[FURTHER] = rest
    parts = [INTRODUCTION]
    for topic, names in topics.items():
        parts.append(f"\n## {topic}\n\n{_fields({name: fields[name] for name in names})}")
    for group, text in GROUPS.items():
        name = group.__name__
        setting = f"`GuardConfig({name.lower()}={name}(...))`"
        parts.append(f"\n## {name}\n\n{setting}: {text}\n\n{_fields(fields_with_text(group))}")
    return "".join(parts)


def _fields(fields: dict[str, tuple[str, str]]) -> str:
    lines = ["| field | values | default | meaning |", "|---|---|---|---|"]
    for name, (declaration, text) in fields.items():
        kind, _, default = declaration.partition(": ")[2].partition(" = ")
        kind = kind.replace("str | PathLike[str]", "path")
        kind = re.sub(r"Literal\[(.*?)\]", lambda found: found[1].replace(", ", " | "), kind)
        default = re.sub(r"field\(default_factory=(\w+)\)", r"\1()", default)
        lines.append(f"| `{name}` | `{_cell(kind)}` | `{_cell(default)}` | {_cell(text)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """Text that does not end its cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def command_line(page: str) -> str:
    """The page of the command line with its table of commands and options as typer knows them."""
    group: Any = get_command(app)
    lines = ["| command | what it does | options |", "|---|---|---|"]
    for name, command in group.commands.items():
        shown = [parameter for parameter in command.params if not parameter.hidden]
        arguments = [p for p in shown if p.param_type_name == "argument"]
        typed = " ".join(["stepguard", name, *(_argument(p) for p in arguments)])
        options = ", ".join(f"`{p.opts[0]}`" for p in shown if p not in arguments)
        summary = " ".join(command.help.split("\n\n")[0].split())
        lines.append(f"| `{typed}` | {_cell(summary)} | {options} |")
    table = "\n".join([BEGIN, "", *lines, "", END])
    between = re.compile(re.escape(BEGIN) + r".*?" + re.escape(END), re.DOTALL)
    if not between.search(page):
        return f"{page}\n{table}\n"
    return between.sub(lambda _: table, page)


def _argument(parameter: Any) -> str:
    """How an argument is typed; one that may be absent stands in brackets."""
    name = str(parameter.metavar or parameter.name.upper())
    return name if parameter.required else f"[{name}]"


def pages() -> dict[Path, str]:
    """File -> what it should say."""
    return {
        CONFIGURATION: configuration(),
        COMMAND_LINE: command_line(COMMAND_LINE.read_text(encoding="utf-8")),
        REPORT_SCHEMA: json.dumps(schema_of(COMMANDS["report"]), indent=1) + "\n",
    }


def stale() -> list[str]:
    """Pages that say something else than the code."""
    found = []
    for path, wanted in pages().items():
        if not path.is_file() or path.read_text(encoding="utf-8") != wanted:
            found.append(str(path.relative_to(ROOT)))
    return found


def main(arguments: list[str]) -> int:
    if arguments == ["--check"]:
        for name in stale():
            print(f"{name} is not up to date; run python scripts/write_reference.py")
        return 1 if stale() else 0
    if arguments:
        print(f"unknown argument {arguments[0]!r}; use --check or nothing")
        return 2
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

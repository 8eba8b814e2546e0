"""Imports point down only, there are no cycles, and the thinking layers know no torch.

The graph is read from the source without running it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import stepguard

PACKAGE = "stepguard"
LAYERS: tuple[tuple[str, ...], ...] = (
    ("_errors",),
    ("records",),
    ("judge", "diagnose", "journal", "ledger"),
    ("report",),
    ("tensors",),
    ("sentinel", "state", "numerics"),
    ("checkpoints",),
    ("locate", "check"),
    ("ranks",),
    ("engine",),
    ("probes",),
    ("port",),
    ("guard",),
    ("watching",),
    ("run",),
    ("integrations", "cli"),
)
"""Lowest first. A unit imports units of lower layers only, never a sibling."""
TORCH_FREE = frozenset(unit for layer in LAYERS[:4] for unit in layer)
FRAMEWORKS = frozenset(
    {"transformers", "accelerate", "lightning", "pytorch_lightning", "peft", "trl", "datasets"}
)
LAZY_TYPES = frozenset({PACKAGE, f"{PACKAGE}._errors"})
"""The facade and the error tree name types of upper layers for the type checker only."""


@dataclass(frozen=True, slots=True, order=True)
class Edge:
    """`importer` imports `target` at `line`."""

    importer: str
    target: str
    line: int

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.target}"


def sources(root: Path) -> dict[str, str]:
    """Module name -> source, for the package below `root`."""
    found = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(
            encoding="utf-8"
        )
    return found


def edges(modules: Mapping[str, str]) -> list[Edge]:
    """Every import of every module, also those inside functions and under TYPE_CHECKING."""
    parents = {name.rpartition(".")[0] for name in modules}
    homes = _facade_homes(modules.get(PACKAGE, ""))
    found = []
    for name, source in modules.items():
        tree = ast.parse(source)
        for node in _imports(tree, skip_types=name in LAZY_TYPES):
            for target in _targets(node, name, name in parents, modules, homes):
                found.append(Edge(name, target, node.lineno))
    return sorted(set(found))


def unit(module: str) -> str:
    """The part of the package a module belongs to: `stepguard.state.rng` -> `state`."""
    parts = module.split(".")
    first = parts[1] if len(parts) > 1 else ""
    return "cli" if first == "__main__" else first


def layer(name: str) -> int | None:
    return next((depth for depth, units in enumerate(LAYERS) if name in units), None)


def wrong_direction(found: Iterable[Edge]) -> list[Edge]:
    """Imports inside the package that do not point down. Anybody may ask the facade for the
    version.
    """
    inside = [
        e
        for e in found
        if _inside(e.target) and e.target != PACKAGE and unit(e.importer) != unit(e.target)
    ]
    return [e for e in inside if not _points_down(unit(e.importer), unit(e.target))]


def without_layer(modules: Iterable[str]) -> list[str]:
    """Modules nobody gave a layer."""
    return [name for name in modules if name != PACKAGE and layer(unit(name)) is None]


def torch_in_pure_layers(found: Iterable[Edge]) -> list[Edge]:
    return [e for e in found if unit(e.importer) in TORCH_FREE and _needs_torch(e.target)]


def frameworks_outside_integrations(found: Iterable[Edge]) -> list[Edge]:
    return [
        e
        for e in found
        if e.target.partition(".")[0] in FRAMEWORKS and unit(e.importer) != "integrations"
    ]


def rich_at_start_outside_report(modules: Mapping[str, str]) -> list[str]:
    """Modules that import rich when they are imported themselves. It draws from `random`, which
    only report hides.
    """
    found = []
    for name, source in modules.items():
        heads = [
            node for node in ast.parse(source).body if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        named = [
            name
            for node in heads
            for name in (getattr(node, "module", None), *(a.name for a in node.names))
        ]
        if unit(name) != "report" and any(str(word).partition(".")[0] == "rich" for word in named):
            found.append(name)
    return found


def cycles(found: Iterable[Edge]) -> list[list[str]]:
    """Groups of modules that import each other, also indirectly (strongly connected)."""
    graph: dict[str, set[str]] = {}
    for edge in found:
        if _inside(edge.target):
            graph.setdefault(edge.importer, set()).add(edge.target)
    reach = {name: _reachable(graph, name) for name in graph}
    knots = {
        frozenset(m for m in reach[n] if n in reach.get(m, ())) for n in graph if n in reach[n]
    }
    return sorted(sorted(knot) for knot in knots)


def _reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    todo = [start]
    while todo:
        for target in graph.get(todo.pop(), ()):
            if target not in seen:
                seen.add(target)
                todo.append(target)
    return seen


def _inside(module: str) -> bool:
    return module.partition(".")[0] == PACKAGE


def _points_down(importer: str, target: str) -> bool:
    above, below = layer(importer), layer(target)
    return importer == "" or (above is not None and below is not None and below < above)


def _needs_torch(target: str) -> bool:
    return target.partition(".")[0] in {"torch", "torchvision", *FRAMEWORKS} or target.startswith(
        "safetensors.torch"
    )


def _imports(
    tree: ast.AST, *, skip_types: bool
) -> Iterator[ast.Import | ast.ImportFrom | ast.Call]:
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import | ast.ImportFrom) or (
            isinstance(node, ast.Call) and _dynamic(node)
        ):
            yield node
        if isinstance(node, ast.If) and skip_types and "TYPE_CHECKING" in ast.unparse(node.test):
            todo.extend(node.orelse)
        else:
            todo.extend(ast.iter_child_nodes(node))


def _dynamic(call: ast.Call) -> bool:
    """`import_module("name")` or `__import__("name")` with the name written out."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    named = (
        bool(call.args)
        and isinstance(call.args[0], ast.Constant)
        and isinstance(call.args[0].value, str)
    )
    return named and name in {"import_module", "__import__"}


def _targets(
    node: ast.Import | ast.ImportFrom | ast.Call,
    importer: str,
    is_package: bool,
    modules: Mapping[str, str],
    homes: Mapping[str, str],
) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.Call):
        assert isinstance(node.args[0], ast.Constant)
        return [str(node.args[0].value)]
    base = _base(node, importer, is_package)
    return [_named(base, alias.name, modules, homes) for alias in node.names]


def _base(node: ast.ImportFrom, importer: str, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    up = node.level - 1 if is_package else node.level
    parts = importer.split(".")
    return ".".join([*parts[: len(parts) - up], *([node.module] if node.module else [])])


def _named(base: str, name: str, modules: Mapping[str, str], homes: Mapping[str, str]) -> str:
    """A name from a package is a submodule, something the facade fetches elsewhere, or the
    package's own.
    """
    if f"{base}.{name}" in modules:
        return f"{base}.{name}"
    return homes.get(name, base) if base == PACKAGE else base


def _facade_homes(source: str) -> dict[str, str]:
    """The facade's literal table of where each public name lives."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOMES":
            homes: dict[str, str] = ast.literal_eval(node.value)
            return homes
    return {}


SOURCES = sources(Path(stepguard.__file__).parents[1])


@cache
def present() -> list[Edge]:
    """The imports of the source as it is."""
    return edges(SOURCES)


def _edges(**modules: str) -> list[Edge]:
    """Edges of a made-up package: `_edges(judge__judge="import torch")`."""
    named = {
        f"stepguard.{name}"
        if name.startswith("__")
        else "stepguard." + name.replace("__", ".", 1): text
        for name, text in modules.items()
    }
    return edges({"stepguard": "", **named})


def test_source_is_really_read() -> None:
    assert "stepguard.records.incident" in SOURCES
    assert ("stepguard.judge.judge", "stepguard.records.incident") in {
        (e.importer, e.target) for e in present()
    }


def test_every_module_has_a_layer() -> None:
    assert without_layer(SOURCES) == []


def test_imports_point_down_only() -> None:
    assert [str(edge) for edge in wrong_direction(present())] == []


def test_modules_form_no_cycle() -> None:
    assert cycles(present()) == []


def test_pure_layers_import_no_torch() -> None:
    assert [str(edge) for edge in torch_in_pure_layers(present())] == []


def test_frameworks_are_imported_by_integrations_only() -> None:
    assert [str(edge) for edge in frameworks_outside_integrations(present())] == []


def test_rich_that_draws_random_numbers_is_imported_at_start_by_report_only() -> None:
    assert rich_at_start_outside_report(SOURCES) == []
    made_up = {
        "stepguard.engine.protect": "from rich.console import Console",
        "stepguard.report.terminal": "import rich",
    }
    assert rich_at_start_outside_report(made_up) == ["stepguard.engine.protect"]


def test_module_without_layer_would_be_caught() -> None:
    assert without_layer(["stepguard", "stepguard.records", "stepguard.utils"]) == [
        "stepguard.utils"
    ]


@pytest.mark.parametrize(
    ("importer", "statement"),
    [
        ("records__origin", "import stepguard.judge.judge"),
        ("judge__judge", "from stepguard.diagnose import engine"),
        ("journal", "from stepguard.report import terminal"),
        ("sentinel__taps", "from stepguard.state.rng import capture_rng"),
        ("state__rng", "from stepguard.sentinel import taps"),
        ("state__rng", "from stepguard.numerics import losses"),
        ("locate__replay", "from stepguard.engine import flow"),
        ("engine__flow", "from stepguard.guard import Guard"),
        ("cli__run", "from stepguard.integrations import transformers"),
        ("run__replay", "import stepguard.cli.app"),
        ("_errors", "from stepguard.records.incident import Incident"),
        ("state__rng", "def f():\n    from stepguard.guard import Guard"),
        (
            "state__rng",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from stepguard.guard import "
            "Guard",
        ),
        ("state__rng", "from ..guard import Guard"),
        ("state__rng", "from .. import guard"),
        ("state__rng", "from importlib import import_module\nimport_module('stepguard.guard')"),
        ("judge__judge", "from stepguard.utils import anything"),
    ],
)
def test_import_that_does_not_point_down_would_be_caught(importer: str, statement: str) -> None:
    found = _edges(**{importer: statement, "guard": "", "utils": ""})
    assert len(wrong_direction(found)) == 1


def test_public_name_counts_as_its_home_module() -> None:
    facade = "_HOMES = {'Guard': 'stepguard.guard'}"
    found = edges(
        {"stepguard": facade, "stepguard.state.rng": "from stepguard import Guard, __version__"}
    )
    assert [edge.target for edge in wrong_direction(found)] == ["stepguard.guard"]


@pytest.mark.parametrize(
    ("importer", "statement"),
    [
        ("records__settings", "from stepguard._errors import ConfigError"),
        ("journal", "from stepguard.records import Reading"),
        ("engine__flow", "from stepguard.locate import replay"),
        ("cli__run", "from stepguard.guard import Guard"),
        ("cli__run", "from stepguard import __version__"),
        ("__main__", "from stepguard.cli.app import main"),
        ("state__rng", "from .buffers import BufferKeeper"),
        (
            "_errors",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from stepguard.records "
            "import Incident",
        ),
    ],
)
def test_import_that_points_down_is_let_through(importer: str, statement: str) -> None:
    assert wrong_direction(_edges(**{importer: statement})) == []


def test_cycle_would_be_caught_however_long() -> None:
    found = _edges(
        state__a="from stepguard.state import b",
        state__b="def late():\n    from stepguard.state.c import thing",
        state__c="from . import a",
        state__d="from stepguard.state import a",
    )
    assert cycles(found) == [["stepguard.state.a", "stepguard.state.b", "stepguard.state.c"]]


def test_module_that_imports_what_its_own_package_exports_is_a_cycle() -> None:
    found = edges(
        {
            "stepguard.judge": "from stepguard.judge.judge import judge",
            "stepguard.judge.judge": "from stepguard.judge import History",
        }
    )
    assert cycles(found) == [["stepguard.judge", "stepguard.judge.judge"]]


@pytest.mark.parametrize(
    "statement",
    [
        "import torch",
        "import torch.nn as nn",
        "from torch import Tensor",
        "from safetensors.torch import save_file",
        "def f():\n    import torch",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
    ],
)
@pytest.mark.parametrize("importer", ["records__origin", "judge__judge", "report__html", "journal"])
def test_torch_in_a_pure_layer_would_be_caught(importer: str, statement: str) -> None:
    assert len(torch_in_pure_layers(_edges(**{importer: statement}))) == 1
    assert torch_in_pure_layers(_edges(state__rng=statement)) == []


def test_framework_in_the_library_would_be_caught() -> None:
    found = _edges(
        engine__flow="import transformers", integrations__transformers="import transformers"
    )
    assert [edge.importer for edge in frameworks_outside_integrations(found)] == [
        "stepguard.engine.flow"
    ]

"""Who imports whom, read from the source without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

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
    name = ast.unparse(call.func).rpartition(".")[2]
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

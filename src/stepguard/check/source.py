"""The user's source, read without running it: which names it mentions, and what it does about its
loss, its gradients and a guard.

A folder often holds several programs, so a line of another one proves nothing: a program is the
script that was named and what it imports from the folder.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

MOST_FILES = 2000
LARGEST = 2**20
SKIPPED = frozenset({"site-packages", "node_modules", "__pycache__", "venv", "build", "dist"})
GUARDS = frozenset({"Guard", "watch", "guard", "GuardCallback", "FabricGuard"})
"""Names of stepguard that put a guard into a program."""
SETTINGS = frozenset({"GuardConfig", "Policy"})
FINITE_TESTS = ("isfinite", "isnan", "isinf")
NORM_NAMES = ("clip_grad_norm_", "get_total_norm", "grad_norm", "total_norm", "vector_norm")
CLIPPING = ("clip_grad_norm_", "clip_grad_norm", "clip_grad_value_", "clip_gradients")
LIMITS = ("max_norm", "clip_value")
NOT_THE_LOSS = frozenset({"fn", "func", "function", "scale", "weight", "weights", "mask"})
"""Last words of names such as `loss_scale` that are not the loss itself."""
CONTAINERS = (ast.Dict, ast.DictComp, ast.Lambda)
"""Values that are not another name for a loss, even if they hold one."""
NOT_A_VALUE = re.compile(r"[\w.]+\((?=[^)])|\w+=(?!=)")
"""`scaler.scale(` of `scaler.scale(loss)`, and `dim=` of a keyword."""


@dataclass(slots=True)
class Source:
    """What some files do, each with the first place of it: `train.py:12`."""

    files: int = 0
    mentions: set[str] = field(default_factory=set)
    """Attributes, strings and names that are used; names that are only assigned do not count."""
    imports: set[str] = field(default_factory=set)
    """First parts of imported names, of modules and from modules."""
    places: dict[str, str] = field(default_factory=dict)
    """First place of `guard`, of `autocast`, of norms by name, and of `isfinite`, `isnan`, `isinf`
    where they are asked of the loss."""
    settings: dict[str, tuple[Any, str]] = field(default_factory=dict)
    """Keywords of stepguard's GuardConfig and Policy, and `clipping`, with the value and the place;
    None for a value that is not written there."""


def read_source(folder: Path, paths: Iterable[Path]) -> Source:
    """Read these files; what cannot be parsed is left out."""
    trees = {}
    for path in islice(paths, MOST_FILES):
        tree = _parsed(path)
        if tree is not None:
            trees[path] = tree
    found = Source(len(trees))
    testers = {name: {name} for name in FINITE_TESTS}
    for tree in trees.values():
        # Add functions of the program that test one of their arguments: `def good(x):
        # isfinite(x)`.
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = {argument.arg for argument in [*node.args.args, *node.args.kwonlyargs]}
                for call in ast.walk(node):
                    if _called(call) in FINITE_TESTS and _values_in(call) & given - {"self"}:
                        testers.setdefault(node.name, set()).add(_called(call))
    for path, tree in trees.items():
        _FileReader(found, testers).read(tree, os.path.relpath(path.resolve(), folder.resolve()))
    return found


def program_files(folder: Path, script: Path | None) -> list[Path]:
    """The script and the modules below the folder that it imports; without a script, all files."""
    if script is None:
        return list(files_below(folder))
    found: list[Path] = []
    waiting = [script]
    while waiting and len(found) < MOST_FILES:
        path = waiting.pop(0).resolve()
        tree = None if path in found else _parsed(path)
        if tree is not None:
            found.append(path)
            waiting += _imported_files(tree, path, folder)
    return found


def files_below(folder: Path) -> Iterator[Path]:
    """Every .py file, hidden and installed ones left out."""
    for place, folders, files in os.walk(folder):
        inside = Path(place)
        # os.walk goes into what is left in the list it gave.
        folders[:] = sorted(name for name in folders if _is_source_folder(inside / name))
        for name in sorted(files):
            path = inside / name
            if name.endswith(".py") and path.is_file() and path.stat().st_size <= LARGEST:
                yield path


def is_source_of(path: Path, folder: Path) -> bool:
    """True for a file below the folder that is neither hidden nor installed there."""
    path, folder = path.resolve(), folder.resolve()
    if folder not in path.parents:
        return False
    inside = path.parents[: path.parents.index(folder)]
    return path.suffix == ".py" and all(map(_is_source_folder, inside))


def _is_source_folder(folder: Path) -> bool:
    # Every virtual environment has the file pyvenv.cfg, whatever its name is.
    skipped = folder.name.startswith(".") or folder.name in SKIPPED
    return not skipped and not (folder / "pyvenv.cfg").exists()


def _parsed(path: Path) -> ast.Module | None:
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError, RecursionError):
        return None


def _imported_files(tree: ast.Module, path: Path, folder: Path) -> Iterator[Path]:
    """Files that this one may import from the current folder, its own, or its package's."""
    package = path.parent
    while (package / "__init__.py").is_file():
        package = package.parent
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        roots = [folder, path.parent, package]
        wanted = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            if node.level:
                roots = [path.parents[min(node.level, len(path.parents)) - 1]]
            base = node.module or ""
            wanted = [f"{base}.{name}".strip(".") for name in wanted]
        for name in wanted:
            parts = name.split(".")
            for depth in range(1, len(parts) + 1):
                for root in roots:
                    place = root.joinpath(*parts[:depth])
                    candidates = (place.with_suffix(".py"), place / "__init__.py")
                    yield from filter(Path.is_file, candidates)


class _FileReader:
    """Adds what one file does to a Source."""

    def __init__(self, found: Source, testers: dict[str, set[str]]) -> None:
        self._found = found
        self._testers = testers
        self._ours: dict[str, str] = {}
        """Local name -> what it is: `sg` -> `stepguard`, `Guard` -> `stepguard.Guard`."""
        self._losses: set[str] = set()
        self._numbers: dict[str, Any] = {}
        """`CLIP = 0.5` at the top of the module."""

    def read(self, tree: ast.Module, name: str) -> None:
        unused = set()
        self._name_values(tree)
        for node in ast.walk(tree):
            place = f"{name}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Attribute):
                mentioned = node.attr
            # `lr = 1` is not a use of lr.
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                mentioned = node.id
            elif (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and node.value.isidentifier()
            ):
                mentioned = node.value
            else:
                mentioned = ""
            self._found.mentions.add(mentioned)
            if isinstance(node, ast.Expr):
                unused.add(getattr(node.value, "func", None))
            # A norm that is computed and dropped is not monitored.
            if mentioned in NORM_NAMES and node not in unused:
                self._found.places.setdefault(mentioned, place)
            if any(self._is_ours(base, GUARDS) for base in getattr(node, "bases", ())):
                self._found.places.setdefault("guard", place)
            if isinstance(node, ast.Call):
                self._call(node, place)

    def _name_values(self, tree: ast.Module) -> None:
        """Which names are stepguard's, which are a loss, and which are a number."""
        assigned = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._import(node)
            elif isinstance(node, ast.Assign) and not isinstance(node.value, CONTAINERS):
                assigned += [(target, node.value) for target in node.targets]
            elif _called(node) in ("backward", "manual_backward"):
                self._losses |= _values_in(node)
        for target, value in assigned * 2:
            name = getattr(target, "id", "")
            if any(map(self._is_loss, _values_in(value))):
                self._losses.add(name)
            if isinstance(value, ast.Constant) and not target.col_offset:
                self._numbers[name] = value.value

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        module = getattr(node, "module", None) or ""
        for alias in node.names:
            self._found.imports |= {module.partition(".")[0], alias.name.partition(".")[0]}
            whole = f"{module}.{alias.name}".strip(".")
            if whole.partition(".")[0] != "stepguard" or getattr(node, "level", None):
                continue
            if alias.name == "*":
                self._ours |= {name: name for name in GUARDS | SETTINGS}
            elif module or alias.asname:
                self._ours[alias.asname or alias.name] = whole
            else:
                self._ours["stepguard"] = "stepguard"

    def _is_ours(self, node: ast.AST, wanted: frozenset[str]) -> bool:
        """Is this one of these names of stepguard?"""
        root, _, rest = _dotted(node).partition(".")
        whole = f"{self._ours.get(root)}.{rest}".strip(".")
        return root in self._ours and whole.rpartition(".")[2] in wanted

    def _call(self, call: ast.Call, place: str) -> None:
        found, called = self._found, _called(call)
        if self._is_ours(call.func, GUARDS):
            found.places.setdefault("guard", place)
        if called == "autocast":
            found.places.setdefault("autocast", place)
        if called in CLIPPING:
            named = [word.value for word in call.keywords if word.arg in LIMITS]
            limit = next(iter(named + call.args[1:2]), None)
            found.settings.setdefault("clipping", (self._written(limit), place))
        if self._is_ours(call.func, SETTINGS):
            for word in call.keywords:
                if word.arg and getattr(word.value, "value", "") is not None:
                    found.settings.setdefault(word.arg, (self._written(word.value), place))
        if called in self._testers and any(map(self._is_loss, _values_in(call))):
            for test in self._testers[called]:
                found.places.setdefault(test, place)

    def _is_loss(self, name: str) -> bool:
        words = name.lower().split("_")
        named = "loss" in words or "losses" in words
        return name in self._losses or (named and words[-1] not in NOT_THE_LOSS)

    def _written(self, value: Any) -> Any:
        """What is written there; None where it is computed."""
        try:
            return self._numbers.get(getattr(value, "id", "")) or ast.literal_eval(value)
        except ValueError:
            return None


def _called(node: ast.AST) -> str:
    """Last part of the name of a called function; empty for what is not a call."""
    if not isinstance(node, ast.Call):
        return ""
    return _dotted(node.func).rpartition(".")[2]


def _dotted(node: ast.AST) -> str:
    """`a.b.c` of such an expression; of `f(x).c` only `.c`."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return getattr(node, "id", "")


def _values_in(node: ast.AST) -> set[str]:
    """Names in an expression, without functions that are called with arguments and keywords."""
    return set(re.findall(r"[A-Za-z_]\w*", NOT_A_VALUE.sub("(", ast.unparse(node))))

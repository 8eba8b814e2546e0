"""The user's source, read without running it: the names a folder mentions, and what one program
does about its loss, its gradients and a guard.

A folder often holds several programs, so a line of another one proves nothing: a program is the
script that was named and what it imports from the folder.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
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
NOT_THE_LOSS = frozenset({"fn", "func", "function", "scale", "weight", "weights", "mask"})
"""Last words of names such as `loss_scale` that are not the loss itself."""


@dataclass(slots=True)
class Project:
    """Names by where they are first used."""

    folder: Path
    files: int = 0
    mentions: dict[str, str] = field(default_factory=dict)
    """Attribute, keyword or string -> `train.py:12`. Names that are only assigned do not count."""


@dataclass(slots=True)
class Program:
    """What the source of one program does, each with the first place of it: `train.py:12`."""

    files: int = 0
    guard: str = ""
    loss_tests: dict[str, str] = field(default_factory=dict)
    """`isfinite`, `isnan`, `isinf`, where they are asked of the loss."""
    norms: dict[str, str] = field(default_factory=dict)
    clipping: str = ""
    clip_norm: float | None = None
    """None where it is not written as a number."""
    autocast: str = ""
    settings: dict[str, tuple[Any, str]] = field(default_factory=dict)
    """Keywords of stepguard's GuardConfig and Policy, with the value and the place; None for a
    value that is not written there."""
    imports: set[str] = field(default_factory=set)
    """First parts of imported names, of modules and from modules."""


def read_project(folder: Path, *, leave_out: frozenset[Path] = frozenset()) -> Project:
    """Read every .py file below the folder, hidden and installed ones left out."""
    project = Project(folder)
    for path in _sources(folder):
        if path.resolve() in leave_out or project.files >= MOST_FILES:
            continue
        tree = _parsed(path)
        if tree is None:
            continue
        project.files += 1
        for node in ast.walk(tree):
            mentioned = _mentioned(node)
            if mentioned:
                place = f"{path.relative_to(folder)}:{getattr(node, 'lineno', 0)}"
                project.mentions.setdefault(mentioned, place)
    return project


def read_program(folder: Path, script: Path | None) -> Program:
    """Read the script and the modules below the folder that it imports; without a script, all."""
    trees: dict[Path, ast.Module] = {}
    waiting = list(_sources(folder)) if script is None else [script]
    while waiting and len(trees) < MOST_FILES:
        path = waiting.pop(0).resolve()
        tree = None if path in trees else _parsed(path)
        if tree is not None:
            trees[path] = tree
            waiting += _imported_files(tree, path, folder)
    program = Program(len(trees))
    testers = {name: {name} for name in FINITE_TESTS}
    for tree in trees.values():
        _note_testers(tree, testers)
    for path, tree in trees.items():
        name = path.name
        if path.is_relative_to(folder.resolve()):
            name = str(path.relative_to(folder.resolve()))
        _note_program(program, tree, name, testers)
    return program


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
        wanted: list[str] = []
        roots = [folder, path.parent, package]
        if isinstance(node, ast.Import):
            wanted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                roots = [path.parents[min(node.level, len(path.parents)) - 1]]
            base = [node.module] if node.module else []
            wanted = base + [".".join([*base, alias.name]) for alias in node.names]
        for name in wanted:
            parts = name.split(".")
            for depth in range(1, len(parts) + 1):
                for root in roots:
                    place = root.joinpath(*parts[:depth])
                    for file in (place.with_suffix(".py"), place / "__init__.py"):
                        if file.is_file():
                            yield file


def _note_program(
    program: Program, tree: ast.Module, name: str, testers: dict[str, set[str]]
) -> None:
    ours = _names_from_stepguard(tree)
    losses = _loss_names(tree)
    numbers = _constants(tree)
    dropped: set[ast.AST] = set()
    for node in ast.walk(tree):
        place = f"{name}:{getattr(node, 'lineno', 0)}"
        program.imports |= _imported_names(node)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            dropped.add(node.value.func)
        mentioned = _mentioned(node)
        if mentioned in NORM_NAMES and node not in dropped:
            program.norms.setdefault(mentioned, place)
        if not program.guard and _is_ours(node, ours, GUARDS):
            program.guard = place
        if not isinstance(node, ast.Call):
            continue
        _note_call(program, node, numbers, place, ours=_is_ours(node, ours, SETTINGS))
        called = _dotted(node.func).rpartition(".")[2]
        if called in testers and any(_is_loss(part, losses) for part in _tested(node)):
            for test in testers[called]:
                program.loss_tests.setdefault(test, place)


def _note_call(
    program: Program, call: ast.Call, numbers: dict[str, float], place: str, *, ours: bool
) -> None:
    """Autocast, clipping, and what a `GuardConfig` or `Policy` (`ours`) is given."""
    called = _dotted(call.func).rpartition(".")[2]
    if called == "autocast" and not program.autocast:
        program.autocast = place
    if called in CLIPPING and not program.clipping:
        program.clipping = place
        program.clip_norm = _clip_norm(call, numbers)
    for word in call.keywords if ours else ():
        if word.arg and getattr(word.value, "value", "") is not None:
            program.settings.setdefault(word.arg, (_literal(word.value, numbers), place))


def _imported_names(node: ast.AST) -> set[str]:
    if not isinstance(node, ast.Import | ast.ImportFrom):
        return set()
    named = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
    return {name.partition(".")[0] for name in named}


def _is_ours(node: ast.AST, ours: dict[str, str], wanted: frozenset[str]) -> bool:
    """Is one of these names of stepguard called here, or a class derived from it?"""
    for base in [node.func] if isinstance(node, ast.Call) else getattr(node, "bases", []):
        root, _, rest = _dotted(base).partition(".")
        if root in ours and f"{ours[root]}.{rest}".strip(".").rpartition(".")[2] in wanted:
            return True
    return False


def _names_from_stepguard(tree: ast.Module) -> dict[str, str]:
    """Local name -> what it is: `sg` -> `stepguard`, `Guard` -> `stepguard.Guard`."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "stepguard":
                    names[alias.asname or "stepguard"] = alias.name if alias.asname else "stepguard"
        elif isinstance(node, ast.ImportFrom) and not node.level:
            module = node.module or ""
            if module.partition(".")[0] == "stepguard":
                for alias in node.names:
                    found = GUARDS | SETTINGS if alias.name == "*" else (alias.name,)
                    for name in found:
                        names[alias.asname or name] = f"{module}.{name}"
    return names


def _dotted(node: ast.AST) -> str:
    """`a.b.c` of such an expression; of `f(x).c` only `.c`."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return ""


def _loss_names(tree: ast.Module) -> set[str]:
    """Names whose backward is called, and what is computed from a loss."""
    losses: set[str] = set()
    assigned = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("backward", "manual_backward"):
                # `accelerator.backward(loss)` has it as an argument, `loss.backward()` in front.
                losses |= _operands(node.args[0] if node.args else node.func.value)
        elif isinstance(node, ast.Assign):
            assigned += [(target, node.value) for target in node.targets]
    for _ in range(2):
        for target, value in assigned:
            parts = _operands(value)
            if isinstance(target, ast.Name) and any(_is_loss(part, losses) for part in parts):
                losses.add(target.id)
    return losses


def _is_loss(name: str, losses: set[str]) -> bool:
    words = name.lower().split("_")
    named = "loss" in words or "losses" in words
    return name in losses or (named and words[-1] not in NOT_THE_LOSS)


def _operands(node: ast.AST) -> set[str]:
    """Names of the values an expression is made of; a function that is called is not one."""
    if isinstance(node, ast.Name):
        return {node.id}
    if isinstance(node, ast.Attribute):
        return {node.attr} | _operands(node.value)
    if isinstance(node, ast.Subscript):
        if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
            return {node.slice.value}
        return _operands(node.value)
    if isinstance(node, ast.Call):
        if not node.args and isinstance(node.func, ast.Attribute):
            return _operands(node.func.value)
        return set().union(*map(_operands, node.args))
    if isinstance(node, ast.BinOp):
        return _operands(node.left) | _operands(node.right)
    if isinstance(node, ast.UnaryOp):
        return _operands(node.operand)
    return set()


def _tested(call: ast.Call) -> set[str]:
    """What `isfinite(x)` or `x.isfinite()` asks about."""
    found = set().union(*map(_operands, [*call.args, *(word.value for word in call.keywords)]))
    if not call.args and isinstance(call.func, ast.Attribute):
        found |= _operands(call.func.value)
    return found


def _note_testers(tree: ast.Module, testers: dict[str, set[str]]) -> None:
    """Add functions of the program that test one of their own arguments."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        given = {argument.arg for argument in [*node.args.args, *node.args.kwonlyargs]} - {"self"}
        for call in ast.walk(node):
            if isinstance(call, ast.Call):
                name = _dotted(call.func).rpartition(".")[2]
                if name in FINITE_TESTS and _tested(call) & given:
                    testers.setdefault(node.name, set()).add(name)


def _constants(tree: ast.Module) -> dict[str, float]:
    """`CLIP = 0.5` at the top of a module."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            value = node.value.value
            for target in node.targets:
                if isinstance(target, ast.Name) and isinstance(value, int | float):
                    found[target.id] = float(value)
    return found


def _clip_norm(call: ast.Call, numbers: dict[str, float]) -> float | None:
    given = [word.value for word in call.keywords if word.arg in ("max_norm", "clip_value")]
    for value in [*given, *call.args[1:2]]:
        found = _literal(value, numbers)
        return float(found) if isinstance(found, int | float) else None
    return None


def _literal(value: ast.AST, numbers: dict[str, float]) -> Any:
    """What is written there; None where it is computed."""
    if isinstance(value, ast.Name):
        return numbers.get(value.id)
    try:
        return ast.literal_eval(value)
    except ValueError:
        return None


def _sources(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        inside = Path(place)
        # os.walk goes into what is left in the list it gave.
        folders[:] = sorted(name for name in folders if _is_source_folder(inside / name))
        for name in sorted(files):
            path = inside / name
            if name.endswith(".py") and path.is_file() and path.stat().st_size <= LARGEST:
                yield path


def is_own_source(path: Path, folder: Path) -> bool:
    """True for a file below the folder that is neither hidden nor installed there."""
    path = path.resolve()
    folder = folder.resolve()
    if not path.is_relative_to(folder):
        return False
    inside = path.parents[: path.parents.index(folder)] if folder in path.parents else ()
    return path.suffix == ".py" and all(map(_is_source_folder, inside))


def _is_source_folder(folder: Path) -> bool:
    if folder.name.startswith(".") or folder.name in SKIPPED:
        return False
    # Every virtual environment has this file, whatever its name is.
    return not (folder / "pyvenv.cfg").exists()


def _mentioned(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    # `lr = 1` is not a use of lr.
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        return node.id
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
        return node.value
    return ""

"""The subject of a check: the objects a run would start with, and its source, which is not run."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from importlib.util import resolve_name
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stepguard._errors import ConfigError
from stepguard.check.settings import Tracked, meant
from stepguard.records.codec import record

# --- The user's source, read without running it: which names it mentions, and what it does about
# its loss, its gradients and a guard.


MOST_FILES = 2000
SKIPPED = frozenset({"site-packages", "node_modules", "__pycache__", "venv", "build", "dist"})
GUARDS = frozenset({"Guard", "watch", "guard", "GuardCallback", "FabricGuard"})
"""Names of stepguard that put a guard into a program."""
FINITE_TESTS = ("isfinite", "isnan", "isinf")
NORM_NAMES = ("clip_grad_norm_", "get_total_norm", "grad_norm", "total_norm", "vector_norm")
CLIPPING = ("clip_grad_norm_", "clip_grad_norm", "clip_grad_value_", "clip_gradients")
LOSS = re.compile(r"(?i)(.*_)?(loss|losses)(_(?!fn|func|function|scale|weights?|mask)\w+)?")
"""Names of a loss; `loss_scale` is not one."""
NOT_A_VALUE = re.compile(r"[\w.]+\((?=[^)])|\w+=(?!=)")
"""`scaler.scale(` of `scaler.scale(loss)`, and `dim=` of a keyword."""


@dataclass(slots=True)
class Source:
    """What some files do, each with the first place of it: `train.py:12`."""

    files: int = 0
    mentions: set[str] = field(default_factory=set)
    """Attributes, strings, imports and names that are used; assigning to a name is no use of it."""
    places: dict[str, str] = field(default_factory=dict)
    """First place of `guard`, of `autocast`, of `clipping`, of norms by name, and of `isfinite`,
    `isnan`, `isinf` where they are asked of the loss."""
    clip: float | None = None
    """The limit at the place of `clipping`; None where it is not written there as a number."""


def read_source(paths: Iterable[Path]) -> Source:
    """Read these files; what cannot be parsed is left out."""
    found = Source()
    for path in islice(paths, MOST_FILES):
        tree = _parsed(path)
        if tree is not None:
            found.files += 1
            _read_file(found, tree, os.path.relpath(path))
    return found


def _read_file(found: Source, tree: ast.Module, file: str) -> None:
    nodes = list(ast.walk(tree))
    # Local name -> what it is: `sg` -> `stepguard`, `Guard` -> `stepguard.Guard`.
    names = dict(_imports(tree, ""))
    found.mentions |= {part for whole in names.values() for part in whole.split(".")}
    # A name that `backward` is called on or with is a loss, whatever it is called.
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    backward = [call for call in calls if _called(call).endswith("backward")]
    losses = set().union(*map(_values_in, backward))
    for call in calls:
        _read_call(found, call, losses, f"{file}:{call.lineno}")
    dropped = {getattr(node.value, "func", None) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        place = f"{file}:{getattr(node, 'lineno', 0)}"
        mentioned = _mentioned(node)
        found.mentions.add(mentioned)
        # A norm that is computed and dropped is not monitored.
        if mentioned in NORM_NAMES and node not in dropped:
            found.places.setdefault(mentioned, place)
        if _starts_guard(node, names):
            found.places.setdefault("guard", place)


def _mentioned(node: ast.AST) -> str:
    """The attribute, name or text that this is; `lr = 1` is not a use of lr."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        return node.id
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return str(getattr(node, "attr", ""))


def _starts_guard(node: ast.AST, names: dict[str, str]) -> bool:
    """Does it call a guard of stepguard, by whatever name, or derive a class from one?"""
    for callee in (getattr(node, "func", None), *getattr(node, "bases", ())):
        root, _, rest = _dotted(callee).partition(".")
        package, _, name = f"{names.get(root, '')}.{rest}".strip(".").rpartition(".")
        if package.partition(".")[0] == "stepguard" and name in GUARDS:
            return True
    return False


def _read_call(found: Source, call: ast.Call, losses: set[str], place: str) -> None:
    called = _called(call)
    if called == "autocast":
        found.places.setdefault("autocast", place)
    elif called in CLIPPING and "clipping" not in found.places:
        found.places["clipping"] = place
        limits = [word.value for word in call.keywords if word.arg in ("max_norm", "clip_value")]
        limit = next(iter(limits + call.args[1:2]), None)
        if isinstance(limit, ast.Constant) and isinstance(limit.value, int | float):
            found.clip = float(limit.value)
    elif called in FINITE_TESTS:
        values = _values_in(call)
        if losses & values or any(map(LOSS.fullmatch, values)):
            found.places.setdefault(called, place)


def program_files(folder: Path, script: Path) -> list[Path]:
    """The script and the modules below the folder that it imports."""
    modules = {}
    for file in files_below(folder):
        path = file.relative_to(folder).with_suffix("")
        modules[".".join(path.parts).removesuffix(".__init__")] = file.resolve()
    known = {file: name for name, file in modules.items()}
    found: list[Path] = []
    waiting = [script.resolve()]
    while waiting and len(found) < MOST_FILES:
        path = waiting.pop(0)
        tree = None if path in found else _parsed(path)
        if tree is None:
            continue
        found.append(path)
        own = known.get(path, path.stem)
        package = own if path.stem == "__init__" else own.rpartition(".")[0]
        for _, whole in _imports(tree, package):
            # `a.b.c` may be a name of the module `a.b`, and importing it runs `a` first.
            parts = whole.split(".")
            wanted = [".".join(parts[: end + 1]) for end in range(len(parts))]
            for name, file in modules.items():
                if any(name == one or name.endswith(f".{one}") for one in wanted):
                    waiting.append(file)
    return found


def _imports(tree: ast.Module, package: str) -> Iterator[tuple[str, str]]:
    """Local names and what they are; a relative import is one of this package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                yield alias.asname or first, alias.name if alias.asname else first
                yield alias.name, alias.name
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                try:
                    module = resolve_name("." * node.level + module, package)
                except ImportError:
                    continue
            for alias in node.names:
                for name in GUARDS if alias.name == "*" else {alias.name}:
                    yield alias.asname or name, f"{module}.{name}"


def files_below(folder: Path) -> Iterator[Path]:
    """Every .py file, hidden and installed ones left out."""
    for place, folders, files in os.walk(folder):
        inside = Path(place)
        # os.walk goes into what is left in the list it gave.
        # Every virtual environment has the file pyvenv.cfg, whatever its name is.
        folders[:] = sorted(
            name
            for name in folders
            if not (
                name.startswith(".") or name in SKIPPED or (inside / name / "pyvenv.cfg").exists()
            )
        )
        for name in sorted(files):
            path = inside / name
            if name.endswith(".py") and path.is_file() and path.stat().st_size <= 2**20:
                yield path


def _parsed(path: Path) -> ast.Module | None:
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError, RecursionError):
        return None


def _called(call: ast.Call) -> str:
    """Last part of the name of a called function."""
    return _dotted(call.func).rpartition(".")[2]


def _dotted(node: Any) -> str:
    """`a.b.c` of such an expression; of `f(x).c` only `.c`."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return getattr(node, "id", "")


def _values_in(node: ast.AST) -> set[str]:
    """Names in an expression, without functions that are called with arguments and keywords."""
    return set(re.findall(r"[A-Za-z_]\w*", NOT_A_VALUE.sub("(", ast.unparse(node))))


WANTED = (
    "return a dict, a stepguard.check.preflight.Subject, the guard, or (model, optimizer, loss_fn, "
    "loader)"
)
IN_ORDER = ("model", "optimizer", "loss_fn", "loader")


@record
class Subject:
    """Everything is optional; an item that misses something says what to give."""

    model: nn.Module | None = None
    optimizer: Optimizer | None = None
    scheduler: Any = None
    scaler: Any = None
    loss_fn: Callable[[Any], Any] | None = None
    """`loss_fn(batch)` gives a scalar or a dict of named scalars, as for `Guard.step`."""
    batch: Any = None
    loader: Iterable[Any] | None = None
    dataset: Any = None
    validation: Any = None
    """A second dataset (or path) that must share no example with the first."""
    data: str | Path | None = None
    """A file or folder to scan instead of a dataset."""
    data_range: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Allowed values by key, `{"image": (-1, 1)}`; without it only outliers are reported."""
    autocast: Any = None
    """A callable that opens the model's real context, or accelerate's Accelerator."""
    config: Any = None
    """A mapping, a dataclass or a namespace."""
    tracked: Tracked | None = None
    """What the program was built with, where `config` is the same before the program changed it."""
    config_file: Path | None = None
    """Where `config` was read from; a configuration in Python is no use of its own keys."""
    script: Path | None = None
    """The program, whose source and that of its modules below the current folder is read."""
    launcher: Mapping[str, Any] | None = None
    launcher_name: str = "launcher"
    checkpoint: str | Path | None = None
    run_dir: str | Path | None = None
    guard: Any = None
    """The `stepguard.GuardConfig` (or the Guard) the run will use."""
    watch: Mapping[str, float] = field(default_factory=dict)
    """Pattern of parameter or buffer names -> largest magnitude allowed."""
    label_key: str | None = None
    ignore_index: int = -100
    steps: int | None = None
    """Optimizer steps of the whole run; None takes them from the configuration."""
    examples: int | None = None
    """Scan at most this many examples; None is a whole dataset, and 1024 of a stream."""


# --- Whatever a build function returns becomes a Subject.


def subject_of(built: Any, named: str) -> Subject:
    """Make a Subject of whatever a build function returns; ConfigError says what is wrong."""
    if isinstance(built, Subject):
        return built
    values = _parts(built, named)
    known = [entry.name for entry in fields(Subject)]
    for name in values.keys() - known:
        raise ConfigError(
            f"{named} returned the key {str(name)!r}, which is not known; use {', '.join(known)}."
        )
    for name in ("model", "optimizer", "scheduler", "scaler"):
        # A guard holds what it was made for.
        if values.get(name) is None:
            values[name] = getattr(values.get("guard"), name, None)
    if not isinstance(values["optimizer"], Optimizer):
        # accelerate and Lightning wrap the optimizer.
        values["optimizer"] = getattr(values["optimizer"], "optimizer", values["optimizer"])
    for name, kind in (("model", nn.Module), ("optimizer", Optimizer)):
        if not isinstance(values[name], kind | None):
            wrong = _described(values[name])
            raise ConfigError(f"{named}: {name} is {wrong}, not a {kind.__name__}; {WANTED}.")
    loss_fn = values.get("loss_fn")
    if loss_fn is not None and not callable(loss_fn):
        raise ConfigError(f"{named}: loss_fn is {_described(loss_fn)}; give a function of a batch.")
    return Subject(**values)


def _parts(built: Any, named: str) -> dict[str, Any]:
    if isinstance(built, Mapping):
        return dict(built)
    # A Guard or that of a framework, known by its parts, so that nothing is imported.
    if hasattr(built, "incidents") and hasattr(built, "close"):
        return {"guard": built}
    parts = built if isinstance(built, tuple) else (built,)
    if not parts or not isinstance(parts[0], nn.Module) or len(parts) > len(IN_ORDER):
        wrong = f"a tuple of {len(parts)}" if parts is built else _described(built)
        raise ConfigError(f"{named} returned {wrong}; {WANTED}.")
    if len(parts) == 2 and isinstance(parts[1], Tensor | tuple | list | Mapping):
        return {"model": parts[0], "batch": parts[1]}
    return dict(zip(IN_ORDER, parts, strict=False))


def _described(value: Any) -> str:
    return f"a {type(value).__name__}"


# --- The framework around a model: the context it opens for the forward pass, and what it declares.


@dataclass(slots=True)
class FrameworkContext:
    """What opens the context, and what its owner declares."""

    name: str = "no context"
    opened: Callable[[], AbstractContextManager[Any]] = nullcontext
    dtype: str | None = None
    """Declared by `Accelerator.mixed_precision`."""
    said: str = ""
    unnamed: str = ""
    """Set if autocast is on without a dtype: then the device's default decides."""
    scaler: Any = None
    facts: dict[str, Any] = field(default_factory=dict)
    """What an Accelerator knows of `distributed_type`, `num_processes` and accumulation."""


def read_framework(given: Any) -> FrameworkContext:
    """Read what the subject calls `autocast`: a function, or accelerate's Accelerator."""
    if given is None:
        return FrameworkContext()
    kind = type(given).__name__
    opener = getattr(given, "autocast", given)
    if not callable(opener):
        raise ConfigError(
            f"autocast is a {kind}; give a function that opens the context, such as lambda: "
            "torch.autocast('cuda', dtype=torch.bfloat16), or an Accelerator."
        )
    name = "the given context" if opener is given else f"the context of {kind}"
    found = FrameworkContext(name, opener, scaler=getattr(given, "scaler", None))
    word = getattr(given, "mixed_precision", None)
    if word:
        found.dtype = meant(word)
        found.said = f"{kind}(mixed_precision={str(word)!r})"
    # accelerate then opens torch.autocast without a dtype.
    if getattr(given, "native_amp", False) and found.dtype == "float32":
        found.unnamed = f"native_amp is on with {found.said}: {default_dtypes()}"
    for fact in ("distributed_type", "num_processes", "gradient_accumulation_steps"):
        if getattr(given, fact, None) is not None:
            found.facts[fact] = getattr(given, fact)
    return found


def default_dtypes() -> str:
    """Say which dtype autocast takes if none is named."""
    cpu, cuda = (str(torch.get_autocast_dtype(kind)).rpartition(".")[2] for kind in ("cpu", "cuda"))
    return f"autocast takes the device's default, {cpu} on cpu and {cuda} on cuda"

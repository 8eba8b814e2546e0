"""The subject of a check: the objects a run would start with, and its source, which is not run."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from stepguard._errors import ConfigError
from stepguard.check.settings import meant
from stepguard.records.settings import GuardConfig
from stepguard.state.rng import kept_rng
from stepguard.tensors.values import dtype_name

# --- The user's source, read without running it: which names it mentions, and what it does about
# its loss, its gradients and a guard.


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
LOSS = re.compile(r"(?i)(.*_)?(loss|losses)(_(?!fn|func|function|scale|weights?|mask)\w+)?")
"""Names of a loss; `loss_scale` is not one."""
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
    trees = {path: tree for path in islice(paths, MOST_FILES) if (tree := _parsed(path))}
    found = Source(len(trees))
    testers = {name: {name} for name in FINITE_TESTS}
    for tree in trees.values():
        # Add functions of the program that test an argument: `def good(x): isfinite(x)`.
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = {argument.arg for argument in [*node.args.args, *node.args.kwonlyargs]}
                for call in ast.walk(node):
                    if _called(call) in FINITE_TESTS and _values_in(call) & given - {"self"}:
                        testers.setdefault(node.name, set()).add(_called(call))
    for path, tree in trees.items():
        file = os.path.relpath(path.resolve(), folder.resolve())
        names = _imported_names(tree)
        found.imports |= {whole.partition(".")[0] for whole in names.values()}
        _read_mentions(found, tree, file)
        _read_calls(found, tree, file, names, testers)
    return found


def program_files(folder: Path, script: Path) -> list[Path]:
    """The script and the modules below the folder that it imports."""
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
        if isinstance(node, ast.ImportFrom) and node.level:
            roots = [path.parents[min(node.level, len(path.parents)) - 1]]
        for alias in node.names:
            place = Path()
            for part in filter(
                None, f"{getattr(node, 'module', '') or ''}.{alias.name}".split(".")
            ):
                place /= part
                for root in roots:
                    module = root / place
                    candidates = (module.with_suffix(".py"), module / "__init__.py")
                    yield from filter(Path.is_file, candidates)


def _imported_names(tree: ast.Module) -> dict[str, str]:
    """Local name -> what it is: `sg` -> `stepguard`, `Guard` -> `stepguard.Guard`."""
    names = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        for alias in node.names:
            if isinstance(node, ast.Import):
                first = alias.name.partition(".")[0]
                names[alias.asname or first] = alias.name if alias.asname else first
            else:
                # A relative import keeps its dots.
                module = "." * node.level + (node.module or "")
                star = GUARDS | SETTINGS if alias.name == "*" else {alias.name}
                for name in star:
                    names[alias.asname or name] = f"{module}.{name}"
    return names


def _read_mentions(found: Source, tree: ast.Module, file: str) -> None:
    unused = set()
    for node in ast.walk(tree):
        mentioned = getattr(node, "attr", "")
        # `lr = 1` is not a use of lr.
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            mentioned = node.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            mentioned = node.value
        found.mentions.add(mentioned)
        if isinstance(node, ast.Expr):
            unused.add(getattr(node.value, "func", None))
        # A norm that is computed and dropped is not monitored.
        if mentioned in NORM_NAMES and node not in unused:
            found.places.setdefault(mentioned, f"{file}:{getattr(node, 'lineno', 0)}")


def _read_calls(
    found: Source, tree: ast.Module, file: str, names: dict[str, str], testers: dict[str, set[str]]
) -> None:
    losses, constants = _known_values(tree)
    node: Any
    for node in ast.walk(tree):
        place = f"{file}:{getattr(node, 'lineno', 0)}"
        for callee in (getattr(node, "func", node), *getattr(node, "bases", ())):
            name = "" if callee is node else _name_of_ours(callee, names)
            if name in GUARDS:
                found.places.setdefault("guard", place)
            for word in node.keywords if name in SETTINGS else ():
                if getattr(word.value, "value", "") is not None:
                    found.settings.setdefault(word.arg, (_written(word.value, constants), place))
        called = _called(node)
        if called == "autocast":
            found.places.setdefault("autocast", place)
        if called in CLIPPING:
            limits = [word.value for word in node.keywords if word.arg in LIMITS]
            limit = _written(next(iter(limits + node.args[1:2]), None), constants)
            found.settings.setdefault("clipping", (limit, place))
        if called in testers and _holds_loss(node, losses):
            for test in testers[called]:
                found.places.setdefault(test, place)


def _name_of_ours(node: ast.AST, names: dict[str, str]) -> str:
    """`Guard` for every way to write stepguard.Guard; empty for what is not stepguard's."""
    root, _, rest = _dotted(node).partition(".")
    whole = f"{names.get(root, '')}.{rest}".strip(".")
    return whole.rpartition(".")[2] if whole.startswith("stepguard.") else ""


def _known_values(tree: ast.Module) -> tuple[set[str], dict[str, Any]]:
    """Names of losses, and the values of constants at the top of the module: `CLIP = 0.5`."""
    losses: set[str] = set()
    constants = {}
    assigned = []
    for node in ast.walk(tree):
        # A dict is not another name for a loss, even if it holds one.
        if isinstance(node, ast.Assign) and not isinstance(node.value, ast.Dict | ast.Lambda):
            assigned.append((getattr(node.targets[0], "id", ""), node.value))
            if isinstance(node.value, ast.Constant) and not node.col_offset:
                constants[assigned[-1][0]] = node.value.value
        elif _called(node) in ("backward", "manual_backward"):
            losses |= _values_in(node)
    for name, value in assigned * 2:
        if _holds_loss(value, losses):
            losses.add(name)
    return losses, constants


def _written(node: Any, constants: dict[str, Any]) -> Any:
    """The value that is written there; None where it is computed."""
    with suppress(ValueError):
        return constants.get(getattr(node, "id", "")) or ast.literal_eval(node)
    return None


def _holds_loss(node: ast.AST, losses: set[str]) -> bool:
    names = _values_in(node)
    return not losses.isdisjoint(names) or any(map(LOSS.fullmatch, names))


def _called(node: ast.AST) -> str:
    """Last part of the name of a called function; empty for what is not a call."""
    return _dotted(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""


def _dotted(node: ast.AST) -> str:
    """`a.b.c` of such an expression; of `f(x).c` only `.c`."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return getattr(node, "id", "")


def _values_in(node: ast.AST) -> set[str]:
    """Names in an expression, without functions that are called with arguments and keywords."""
    return set(re.findall(r"[A-Za-z_]\w*", NOT_A_VALUE.sub("(", ast.unparse(node))))


WANTED = (
    "return (model, optimizer, loss_fn, loader), a dict, a stepguard.check.preflight.Subject, the "
    "guard or a transformers Trainer"
)


@dataclass(frozen=True, slots=True, kw_only=True)
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
    """A callable that opens the model's real context, or an Accelerator, Fabric or Trainer."""
    config: Any = None
    """A mapping, a dataclass or a namespace."""
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
    values["optimizer"] = _unwrapped(values["optimizer"])
    for name, kind in (("model", nn.Module), ("optimizer", Optimizer)):
        if not isinstance(values[name], kind | None):
            wrong = _described(values[name])
            raise ConfigError(f"{named}: {name} is {wrong}, not a {kind.__name__}; {WANTED}.")
    loss_fn = values.get("loss_fn")
    if loss_fn is not None and not callable(loss_fn):
        raise ConfigError(f"{named}: loss_fn is {_described(loss_fn)}; give a function of a batch.")
    return Subject(**values)


def _parts(built: Any, named: str) -> dict[Any, Any]:
    if isinstance(built, Mapping):
        return dict(built)
    if _is_guard(built):
        return {"guard": built}
    # A transformers Trainer, recognised by its parts, so that nothing is imported.
    if isinstance(getattr(built, "model", None), nn.Module) and hasattr(built, "args"):
        return _of_trainer(built)
    if isinstance(built, tuple | list) and built and isinstance(built[0], nn.Module):
        return _of_tuple(built, named)
    raise ConfigError(f"{named} returned {_described(built)}; {WANTED}.")


def _of_tuple(built: Sequence[Any], named: str) -> dict[str, Any]:
    """The model comes first; each further part is known by what it is."""
    parts = {"model": built[0]}
    for position, value in enumerate(built[1:], start=2):
        if value is None:
            continue
        # The order matters: a guard holds an optimizer, and a loss that is a module is callable.
        kinds = {
            "guard": _is_guard(value) or isinstance(value, GuardConfig),
            "scaler": isinstance(value, GradScaler),
            "scheduler": hasattr(value, "get_last_lr"),
            "optimizer": isinstance(_unwrapped(value), Optimizer),
            "loss_fn": callable(value),
            "config": isinstance(value, Mapping),
            "": isinstance(value, str | bytes | Tensor),
            "loader": hasattr(value, "__iter__"),
            "dataset": hasattr(value, "__getitem__"),
        }
        name = next((name for name, fits in kinds.items() if fits), "")
        if not name or name in parts:
            why = f"a second {name}" if name else "which is not a part of a run"
            raise ConfigError(
                f"{named} returned a tuple whose part {position} is {_described(value)}, {why}; "
                f"{WANTED}."
            )
        parts[name] = value
    return parts


def _is_guard(value: Any) -> bool:
    """A Guard or that of a framework, known by its parts, so that nothing is imported."""
    return hasattr(value, "incidents") and hasattr(value, "close")


def _unwrapped(optimizer: Any) -> Any:
    """accelerate and Lightning wrap the optimizer."""
    if isinstance(optimizer, Optimizer):
        return optimizer
    return getattr(optimizer, "optimizer", optimizer)


def _described(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return f"a {type(value).__name__}"


def _of_trainer(trainer: Any) -> dict[str, Any]:
    """The Trainer opens the context; the optimizer it would make is made here, and taken back."""
    dataset: Any = getattr(trainer, "train_dataset", None)
    before = optimizer = trainer.optimizer
    if optimizer is None and hasattr(trainer, "create_optimizer"):
        optimizer = trainer.create_optimizer()
    trainer.optimizer = before
    batch = None
    # The collator may refuse columns that the Trainer drops when it trains.
    with suppress(Exception), kept_rng():
        batch = trainer.data_collator([dataset[index] for index in range(min(2, len(dataset)))])
    return {
        "model": trainer.model,
        "optimizer": optimizer,
        "scheduler": getattr(trainer, "lr_scheduler", None),
        "dataset": dataset,
        "batch": batch,
        "validation": getattr(trainer, "eval_dataset", None),
        "autocast": trainer,
        "config": vars(trainer.args),
    }


# --- The framework around a model: the context it opens for the forward pass, and what it declares.

FACTS = {
    "distributed_type": ("distributed_type",),
    "num_processes": ("num_processes", "world_size"),
    "gradient_accumulation_steps": ("gradient_accumulation_steps", "accumulate_grad_batches"),
    "lr": ("learning_rate",),
}
"""Fact -> what an Accelerator, a Fabric, a Trainer or TrainingArguments call it."""


@dataclass(slots=True)
class FrameworkContext:
    """What opens the context, and what its owner declares."""

    name: str = "no context"
    openers: tuple[Callable[[], AbstractContextManager[Any]], ...] = ()
    dtype: str | None = None
    """Declared by the object (`Accelerator.mixed_precision`, `TrainingArguments.fp16`)."""
    said: str = ""
    unnamed: str = ""
    """Set if autocast is on without a dtype: then the device's default decides."""
    scaler: Any = None
    facts: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def opened(self) -> Iterator[None]:
        with ExitStack() as stack:
            for opener in self.openers:
                stack.enter_context(opener())
            yield


def read_framework(given: Any) -> FrameworkContext:
    """Read what the subject calls `autocast`: a function, or the object of any framework."""
    if given is None:
        return FrameworkContext()
    kind = type(given).__name__
    args = getattr(given, "args", None)
    # A transformers Trainer keeps its Accelerator, Lightning and Fabric keep a precision plugin.
    owner = given if args is None else getattr(given, "accelerator", given)
    plugin = getattr(given, "precision_plugin", getattr(given, "_precision", None))
    opener = getattr(owner, "autocast", getattr(plugin, "forward_context", None))
    if opener is None and callable(given):
        return FrameworkContext("the given context", (given,))
    if not callable(opener):
        raise ConfigError(
            f"autocast is a {kind}; give a function that opens the context, such as lambda: "
            "torch.autocast('cuda', dtype=torch.bfloat16), or an Accelerator, a Fabric or a "
            "Trainer."
        )
    openers = (getattr(given, "compute_loss_context_manager", None), opener)
    found = FrameworkContext(f"the context of {kind}", tuple(filter(None, openers)))
    found.scaler = getattr(owner, "scaler", getattr(plugin, "scaler", None))
    for holder, key in ((owner, "mixed_precision"), (plugin, "precision")):
        word = getattr(holder, key, None)
        if word:
            found.dtype = meant(word)
            found.said = f"{type(owner).__name__}({key}={str(word)!r})"
    # accelerate then opens torch.autocast without a dtype.
    if getattr(owner, "native_amp", False) and found.dtype == "float32":
        found.unnamed = f"native_amp is on with {found.said}: {default_dtypes()}"
    # The Trainer refuses to have both.
    for flag in ("bf16", "fp16"):
        if getattr(args, flag, False):
            found.dtype = meant(flag)
            found.said = f"TrainingArguments({flag}=True)"
    found.facts = _facts_of(owner, given, args)
    return found


def _facts_of(*holders: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for fact, names in FACTS.items():
        for holder in holders:
            for name in names:
                if getattr(holder, name, None) is not None:
                    facts.setdefault(fact, getattr(holder, name))
    return facts


def default_dtypes() -> str:
    """Say which dtype autocast takes if none is named."""
    cpu = dtype_name(torch.get_autocast_dtype("cpu"))
    cuda = dtype_name(torch.get_autocast_dtype("cuda"))
    return f"autocast takes the device's default, {cpu} on cpu and {cuda} on cuda"

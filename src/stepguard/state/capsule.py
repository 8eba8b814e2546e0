"""A bad step on disk: a run state plus a batch, as safetensors and JSON.

`stepguard replay CAPSULE` runs it again in a fresh process, on another machine. The model's code is
not in it: the capsule names the script, or the function that builds model, optimizer and loss, and
that must be there. It is signed with a key of its user's, so that a replay can tell a capsule made
here from one that somebody else has written.
"""

from __future__ import annotations

import getpass
import hashlib
import hmac
import importlib
import importlib.util
import json
import os
import platform
import secrets
import shlex
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from stepguard._errors import CapsuleError, StateError, StepguardError
from stepguard.records import Reading, Verdict
from stepguard.records.codec import dumps, from_jsonable, masked, restore_floats, to_plain
from stepguard.report import phrases
from stepguard.state.batch import LossFn, NotPlainError, Step, tree_from_json, tree_to_json
from stepguard.state.files import new_folder
from stepguard.state.rng import RngState, rng_from_facts, rng_to_facts
from stepguard.state.run_state import RunState, SavedState
from stepguard.tensors.names import named_modules

# --- A bad step on disk: a run state plus a batch, as safetensors and JSON.


SCHEMA = 3

NEEDED = ("step", "scale", "clip_norm", "reading", "rng", "verdict", "state")
SMALL_FACTS = ("numbers", "groups")
"""What of the state's facts a capsule without weights holds: counters and hyperparameters."""
DAMAGE = (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError)
"""What decoding facts raises that this module never wrote."""
LARGEST_FACTS = 1 << 25
"""Bytes of a capsule's JSON."""


@dataclass(slots=True)
class Capsule:
    """A capsule read back. Tensors are still apart; `fill` puts the state into built objects."""

    folder: Path
    facts: dict[str, Any]
    tensors: dict[str, Tensor]
    weights: SavedState | None = None
    """The state of a checkpoint, for a capsule without weights; None: those of what is built."""

    @property
    def without_weights(self) -> dict[str, Any] | None:
        """For a step above the limit: its `bytes`, and `checkpoint` and `step` of the weights."""
        value = self.facts.get("without_weights")
        if isinstance(value, dict):
            return value
        return None

    @property
    def build(self) -> str | None:
        """`module:function` that returns model, optimizer and loss function."""
        return self._text("build")

    @property
    def script(self) -> str | None:
        """The script that was running, relative to the directory it ran in."""
        return self._text("script")

    @property
    def module(self) -> str | None:
        """The name under which `python -m` ran the script, if it did."""
        return self._text("module")

    @property
    def arguments(self) -> list[str]:
        """What the script was called with."""
        return [str(a) for a in self.facts.get("arguments") or []]

    @property
    def command(self) -> str:
        """What a replay runs, as it would be typed; empty where the capsule names no code."""
        if self.build is not None:
            return f"the function {self.build}"
        if self.script is None:
            return ""
        program = self.script if self.module is None else f"-m {self.module}"
        return f"python {program} {shlex.join(self.arguments)}".rstrip()

    @property
    def made_here(self) -> bool:
        """Was it written by this user, on this machine, in this folder, and not changed since?"""
        signature = self.facts.get("signature")
        key = _signing_key(create=False)
        if key is None or not isinstance(signature, str) or self.facts.get("made") != _maker():
            return False
        return hmac.compare_digest(_signature(self.facts, key).encode(), signature.encode())

    def decoded(self) -> tuple[Reading, tuple[Any, ...], list[RngState]]:
        """Return reading, micro-batches and random numbers; damage is one clear CapsuleError."""
        batches = self.facts.get("micro_batches")
        if batches is None:
            why = self.facts.get("left_out", "it was written with capsule='no-data'")
            raise CapsuleError(
                f"{self.folder} holds no batch ({why}); it can be read but not replayed."
            )
        try:
            reading = from_jsonable(Reading, self.facts["reading"])
            rng = [rng_from_facts(facts, self.tensors) for facts in self.facts["rng"]]
            return reading, tuple(tree_from_json(batch, self.tensors) for batch in batches), rng
        except RecursionError:
            raise CapsuleError(
                f"{self.folder} is damaged: its batch is nested endlessly."
            ) from None
        except DAMAGE as fault:
            raise _damaged(self.folder, fault) from None

    def fits(self, roots: Mapping[str, nn.Module], optimizer: Optimizer) -> str:
        """Say why these objects are not those the capsule was written for; empty if they are."""
        wanted = self._text("optimizer")
        if wanted not in (None, type(optimizer).__name__):
            return f"the optimizer is {type(optimizer).__name__}, the capsule's was {wanted}"
        for name in self.tensors:
            prefix, _, root = name.partition("/")[0].partition(":")
            if prefix == "module" and root not in roots:
                return f"there is no module {root!r}"
        try:
            run = RunState(roots, optimizer)
            return run.misfit(self._state(run))
        except DAMAGE as fault:
            raise self._unfilled(fault) from None

    def fill(self, roots: Mapping[str, nn.Module], optimizer: Optimizer) -> None:
        """Put parameters, buffers, modes, optimizer state and settings into the objects."""
        why_not = self.fits(roots, optimizer)
        if why_not:
            raise CapsuleError(f"the capsule does not fit what was built: {why_not}.")
        run = RunState(roots, optimizer)
        try:
            state = self._state(run)
            run.put_back_modules(state)
            if "groups" in state.facts:
                run.put_back_optimizer(state)
            resting = set(self.facts.get("resting", []))
            for name, module in named_modules(roots):
                module.training = name not in resting
        except DAMAGE as fault:
            raise self._unfilled(fault) from None

    def differences(self) -> list[str]:
        """List what is different here from where the step went wrong."""
        then = self.facts.get("environment") or {}
        return [
            f"{key} {then[key]} there, {value} here"
            for key, value in environment().items()
            if key in then and then[key] != value
        ]

    def saved_state(self) -> SavedState:
        """The state before the bad step. Raises CapsuleError where it is not all in it."""
        if self.without_weights is not None:
            raise CapsuleError(
                f"{self.folder} holds no weights: it was above GuardConfig.capsule_limit."
            )
        state = self.facts["state"]
        if not isinstance(state, dict):
            raise _damaged(self.folder, TypeError("its state is not an object"))
        if "groups" not in state:
            why = state.get("optimizer_left_out", "it was not written")
            raise CapsuleError(f"{self.folder} holds no optimizer state: {why}")
        return SavedState(self.tensors, state)

    def _state(self, run: RunState) -> SavedState:
        """What goes into these objects: hyperparameters are the capsule's in any case."""
        own = SavedState(self.tensors, self.facts["state"])
        if self.without_weights is None:
            return own
        weights = self.weights
        if weights is None:
            weights = run.gather_modules()
            if "groups" in own.facts:
                weights.facts.update(run.gather_optimizer(weights.tensors))
        return SavedState({**weights.tensors, **own.tensors}, {**weights.facts, **own.facts})

    def _unfilled(self, fault: Exception) -> CapsuleError:
        return CapsuleError(f"{self.folder} is damaged: its state cannot be filled in ({fault}).")

    def _text(self, key: str) -> str | None:
        value = self.facts.get(key)
        if isinstance(value, str):
            return value
        return None


def _damaged(folder: Path, fault: BaseException) -> CapsuleError:
    what = str(fault).splitlines()[0] if str(fault) else type(fault).__name__
    return CapsuleError(f"{folder} is damaged: {what}.")


def write_capsule(
    folder: Path,
    step: Step,
    reading: Reading,
    *,
    verdict: Verdict,
    build: str | None,
    keep: Literal["full", "no-data"],
    limit_bytes: int,
    checkpoint: Mapping[str, Any],
) -> int:
    """Write the step; returns the bytes that all of it takes.

    Above the limit, parameters, buffers and optimizer state are left out, and the `checkpoint` is
    named that a replay takes them from: `checkpoint`, `step` and `rank`; empty: there is none.
    """
    roots = step.named_roots()
    run = RunState(roots, step.optimizer)
    state = run.gather_modules()
    of_optimizer: dict[str, Tensor] = {}
    try:
        state.facts.update(run.gather_optimizer(of_optimizer))
        state.tensors.update(of_optimizer)
    except StateError as why:
        # Without the optimizer a step can still be run again.
        state.facts["optimizer_left_out"] = str(why)
    tensors: dict[str, Tensor] = {}
    facts: dict[str, Any] = {
        "schema": SCHEMA,
        "step": step.index,
        "scale": step.scale,
        "clip_norm": step.clip_norm,
        "build": build,
        **running_script(),
        "reading": to_plain(reading),
        "verdict": verdict.kind,
        "summary": verdict.summary,
        "environment": environment(),
        "rng": [rng_to_facts(rng, tensors, f"micro_rng/{i}") for i, rng in enumerate(step.rng)],
        "optimizer": type(step.optimizer).__name__,
        "state": state.facts,
        "resting": [name for name, module in named_modules(roots) if not module.training],
    }
    if keep == "full":
        of_batches: dict[str, Tensor] = {}
        try:
            facts["micro_batches"] = [
                tree_to_json(b, of_batches, f"batch/{i}") for i, b in enumerate(step.micro_batches)
            ]
            tensors.update(of_batches)
        except NotPlainError as why:
            facts["left_out"] = str(why)
    data = _size(tensors)
    size = data + _size(state.tensors)
    if data > limit_bytes:
        raise CapsuleError(
            f"the batch and the random numbers take {phrases.size(data)}, "
            f"GuardConfig.capsule_limit allows {phrases.size(limit_bytes)}"
        )
    if size > limit_bytes:
        facts["without_weights"] = {"bytes": size, **checkpoint}
        facts["state"] = {key: state.facts[key] for key in SMALL_FACTS if key in state.facts}
        # a learning rate may be a tensor
        state.tensors = {
            name: tensor for name, tensor in state.tensors.items() if name.startswith("group/")
        }
    write_facts(folder, "capsule.json", facts, {**state.tensors, **tensors})
    return size


def write_facts(
    folder: Path, name: str, facts: dict[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Write a new folder of tensors and of what else there is to know, as JSON of this name.

    Nobody else can read it: it holds training data.
    """
    facts["complex"] = [name for name, t in tensors.items() if t.is_complex()]
    facts["sparse"] = [name for name, t in tensors.items() if t.layout is not torch.strided]
    stored = {name: _storable(tensor) for name, tensor in tensors.items()}
    facts["made"] = _maker()
    key = _signing_key(create=True)
    if key is not None:
        facts["signature"] = _signature(facts, key)
    text = dumps(facts)
    if len(text) > LARGEST_FACTS:
        raise NotPlainError(f"{name} would take {len(text)} bytes, more than {LARGEST_FACTS}.")
    with new_folder(folder) as temporary:
        temporary.chmod(0o700)
        save_file(stored, temporary / "tensors.safetensors")
        (temporary / name).write_text(text, encoding="utf-8")
        for file in temporary.iterdir():
            file.chmod(0o600)


def _signature(facts: Mapping[str, Any], key: bytes) -> str:
    """Sign everything in the JSON, which names the code to run; tensors run nothing."""
    signed = json.loads(dumps({name: facts[name] for name in facts if name != "signature"}))
    return hmac.digest(key, dumps(signed).encode(), hashlib.sha256).hex()


def _maker() -> dict[str, str]:
    """User, machine and folder of this process."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = str(os.getuid()) if hasattr(os, "getuid") else ""
    return {"user": user, "machine": platform.node(), "folder": str(Path.cwd())}


def _signing_key(*, create: bool) -> bytes | None:
    """The user's own key, in a file that only the user can read; None where there is none."""
    try:
        config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
        path = Path(config) / "stepguard" / "capsule-key"
        if create and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
            try:
                temporary.touch(mode=0o600, exist_ok=False)
                temporary.write_bytes(secrets.token_bytes(32))
                # Not a rename: the first writer wins, and all ranks sign with one key.
                os.link(temporary, path)
            except FileExistsError:
                pass
            finally:
                temporary.unlink(missing_ok=True)
        status = path.stat()
        others_read = status.st_mode & 0o077 or status.st_uid != os.geteuid()
        return None if others_read else path.read_bytes()
    except (OSError, RuntimeError, AttributeError):  # no home, a full disk, no user numbers
        return None


def _size(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _storable(tensor: Tensor) -> Tensor:
    """Return what safetensors takes: dense, real, contiguous, on the host, in memory of its own."""
    plain = tensor.detach().cpu()
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj())
    return plain.resolve_neg().contiguous().clone()


def read_capsule(folder: Path) -> Capsule:
    """Open a capsule, or the folder of the incident around it; nothing in it is executed."""
    if not (folder / "capsule.json").exists() and (folder / "capsule").is_dir():
        folder = folder / "capsule"
    facts, tensors = _read_files(folder, load_file)
    try:
        restore_kinds(tensors, facts)
    except DAMAGE as fault:
        raise CapsuleError(f"{folder} is damaged: {fault}") from None
    return Capsule(folder, facts, tensors)


def check_capsule(folder: Path) -> None:
    """Raise CapsuleError for a capsule that cannot be opened; its tensors are not read."""

    def names(path: Path) -> dict[str, Tensor]:
        # safetensors compares the header with the size of the file.
        with safe_open(path, framework="pt"):
            return {}

    _read_files(folder, names)


def _read_files(
    folder: Path, load: Callable[[Path], dict[str, Tensor]]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        facts, tensors = read_facts(folder, "capsule.json", load)
    except (FileNotFoundError, NotADirectoryError) as fault:
        # safetensors raises without a file name.
        name = getattr(fault, "filename", None) or "tensors.safetensors"
        raise CapsuleError(f"{folder} is not a capsule: {Path(name).name} is missing.") from None
    except Exception as fault:
        raise CapsuleError(f"{folder} cannot be read: {fault}") from None
    found = facts.get("schema") if isinstance(facts, dict) else facts
    if found != SCHEMA:
        raise CapsuleError(
            f"{folder} has schema {found!r}; this stepguard reads {SCHEMA}: upgrade it, or replay "
            "with the version that wrote it."
        )
    for key in NEEDED:
        if key not in facts:
            raise CapsuleError(f"{folder} is damaged: capsule.json lacks {key!r}.")
    return facts, tensors


def read_facts(
    folder: Path, name: str, load: Callable[[Path], dict[str, Tensor]] = load_file
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read what `write_facts` wrote, within bounds of memory."""
    for word in (name, "tensors.safetensors"):
        # a FIFO would be waited for, a device read without end, a link lead out of the folder
        if not stat.S_ISREG((folder / word).lstat().st_mode):
            raise ValueError(f"{word} is not a regular file.")
    with (folder / name).open("rb") as file:
        content = file.read(LARGEST_FACTS + 1)
    if len(content) > LARGEST_FACTS:
        raise ValueError(f"{name} has more than {LARGEST_FACTS} bytes.")
    facts = json.loads(content)
    tensors = load(folder / "tensors.safetensors")
    bytes_of = {key: tensor.numel() * tensor.element_size() for key, tensor in tensors.items()}
    wanted = 0
    left = [facts]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            left.extend(value.values())
            named = value.get("tensor")
            wanted += bytes_of.get(named, 0) if isinstance(named, str) else 0
        elif isinstance(value, list):
            left.extend(value)
    # A tensor is written once for each place that holds it; a file that refers to one more often
    # than that on average was not written by us, and would take memory without bound
    if wanted > 4 * sum(bytes_of.values()):
        raise ValueError(f"{name} refers to its tensors so often that they take {wanted} bytes.")
    return facts, tensors


def restore_kinds(tensors: dict[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Make complex and sparse again what `write_facts` has written as plain tensors."""
    for key, change in (("complex", torch.view_as_complex), ("sparse", Tensor.to_sparse)):
        for name in facts.get(key) or []:
            if name in tensors:
                tensors[name] = change(tensors[name])


def environment() -> dict[str, Any]:
    """Return what another machine needs to know to judge a different outcome."""
    here = platform.uname()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        # Not platform.platform(), which starts a process.
        "platform": f"{here.system}-{here.release}-{here.machine}",
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "default_dtype": str(torch.get_default_dtype()),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
    }


def running_script() -> dict[str, Any]:
    """Return name and arguments of the main script, if it is a file below the current directory."""
    if not sys.argv or not sys.argv[0]:
        return {}
    main = Path(sys.argv[0]).resolve()
    here = Path.cwd()
    if main.suffix != ".py" or not main.is_file() or not main.is_relative_to(here):
        return {}
    if "site-packages" in main.parts:
        # an installed program (pytest, a notebook's kernel) in an environment below the project
        return {}
    facts: dict[str, Any] = {
        "script": str(main.relative_to(here)),
        "arguments": masked(sys.argv[1:]),
    }
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None and spec.origin == str(main):
        facts["module"] = spec.name
    return facts


# --- The steps that led to a bad one: the state they began from, their batches and random
# numbers.


FOLDER = "window"
STEP_FACTS = ("index", "loss", "lr", "scale", "clip_norm")
STATE_FACTS = ("numbers", "optimizer", "groups", "optimizer_more")
NOT_OF_THE_MODEL = ("rng/", "loader/", "scaler/", "scheduler", "extra:")
"""Parts of a run's state that no trial touches."""


@dataclass(slots=True)
class WindowStep:
    """One step as it was run: enough to run it again from any state."""

    index: int
    micro_batches: tuple[Any, ...]
    rng: list[RngState]
    """Before each micro-batch."""
    loss: float | None = None
    """What it gave the first time."""
    lr: tuple[float, ...] = ()
    """The rate of each parameter group, empty where it is not known."""
    scale: float = 1.0
    """What the loss was multiplied by."""
    clip_norm: float | None = None
    loss_fn: LossFn | None = None


@dataclass(slots=True)
class Window:
    """A state, the steps that led from it to the bad one, and healthy steps beside them."""

    start: SavedState
    steps: list[WindowStep]
    """Oldest first, without the bad one."""
    others: list[WindowStep] = field(default_factory=list)
    """Healthy steps of the run that are not part of the way: earlier or later ones."""

    @property
    def first(self) -> int | None:
        """Index of the first step; None where the bad step is all there is."""
        if self.steps:
            return self.steps[0].index
        return None


def window_step(step: Step, loss: float | None, lr: tuple[float, ...]) -> WindowStep:
    """What a trial needs of a step, by reference."""
    return WindowStep(
        index=step.index,
        micro_batches=step.micro_batches,
        rng=step.rng,
        loss=loss,
        lr=lr,
        scale=step.scale,
        clip_norm=step.clip_norm,
        loss_fn=step.loss_fn,
    )


def write_window(capsule: Path, window: Window, limit_bytes: int) -> str:
    """Write the window into the capsule's folder; else say in words why not."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in window.start.tensors.items():
        if not name.startswith(NOT_OF_THE_MODEL):
            tensors[f"start/{name}"] = tensor
    try:
        facts = {
            "schema": 1,
            "state": {key: window.start.facts[key] for key in STATE_FACTS},
            "steps": _steps_to_json(window.steps, tensors, "step"),
            "others": _steps_to_json(window.others, tensors, "other"),
        }
    except NotPlainError as why:
        return str(why)
    size = _size(tensors)
    if size > limit_bytes:
        return (
            f"the steps before it take {phrases.size(size)}, {phrases.size(limit_bytes)} are "
            "left for them"
        )
    write_facts(capsule / FOLDER, "window.json", facts, tensors)
    return ""


def read_window(capsule: Path) -> Window | None:
    """Read the window of a capsule; None where it has none. Nothing in it is executed."""
    folder = capsule / FOLDER
    if not (folder / "window.json").is_file():
        return None
    try:
        facts, tensors = read_facts(folder, "window.json")
        facts = restore_floats(facts)
        restore_kinds(tensors, facts)
        start = {
            name.removeprefix("start/"): tensor
            for name, tensor in tensors.items()
            if name.startswith("start/")
        }
        return Window(
            start=SavedState(start, facts["state"]),
            steps=_steps_from_json(facts["steps"], tensors),
            others=_steps_from_json(facts["others"], tensors),
        )
    except (*DAMAGE, OSError, RecursionError) as fault:
        raise _damaged(folder, fault) from None


def _steps_to_json(
    steps: Sequence[WindowStep], tensors: dict[str, Tensor], name: str
) -> list[dict[str, Any]]:
    written = []
    for step in steps:
        where = f"{name}/{step.index}"
        facts = {key: getattr(step, key) for key in STEP_FACTS}
        facts["micro_batches"] = [
            tree_to_json(batch, tensors, f"{where}/batch/{i}")
            for i, batch in enumerate(step.micro_batches)
        ]
        facts["rng"] = [
            rng_to_facts(state, tensors, f"{where}/rng/{i}") for i, state in enumerate(step.rng)
        ]
        written.append(facts)
    return written


def _steps_from_json(facts: list[dict[str, Any]], tensors: dict[str, Tensor]) -> list[WindowStep]:
    steps = []
    for one in facts:
        step = WindowStep(
            **{key: one[key] for key in STEP_FACTS},
            micro_batches=tuple(tree_from_json(batch, tensors) for batch in one["micro_batches"]),
            rng=[rng_from_facts(rng, tensors) for rng in one["rng"]],
        )
        step.lr = tuple(step.lr)
        steps.append(step)
    return steps


# --- Import a function by its name, from below the current directory and nowhere else.


@contextmanager
def importable() -> Iterator[None]:
    """Put the current directory first on the path, as `python -m` does."""
    before = list(sys.path)
    sys.path.insert(0, str(Path.cwd()))
    try:
        yield
    finally:
        sys.path[:] = before


Check = Callable[[Path], None]
"""Raises for a file whose code must not be run."""


def import_function(
    named: str, error: type[StepguardError], check: Check = lambda path: None
) -> Callable[..., Any]:
    """Import `module:function`. Whatever goes wrong is raised as `error`, with the way out."""
    module, _, function = named.partition(":")
    find_module(module, named, error, check)
    try:
        found = getattr(importlib.import_module(module), function, None)
    except Exception as fault:
        raise error(f"{named}: importing it failed: {type(fault).__name__}: {fault}") from fault
    if not callable(found):
        raise error(f"{named}: {module!r} has no function {function!r}.")
    result: Callable[..., Any] = found
    return result


def find_module(
    module: str, named: str, error: type[StepguardError], check: Check = lambda path: None
) -> list[Path]:
    """The module's files, after it and the packages around it were found below the current folder.

    `check` is asked about each before anything is imported.
    """
    parts = module.split(".")
    found: list[Path] = []
    # From the outside in: finding a module imports the packages around it.
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        spec = None
        if all(part.isidentifier() for part in parts[:depth]):
            with suppress(ImportError, ValueError):
                spec = importlib.util.find_spec(name)
        if spec is None:
            raise error(
                f"{named}: there is no module {name!r} below the current directory; run this in "
                f"the project's folder."
            )
        # A package without a file, or a module built into the interpreter, which is not below here.
        places = list(spec.submodule_search_locations or ["/"])
        if spec.has_location and spec.origin:
            places = [spec.origin]
        found = [inside(Path(place), named, error) for place in places]
        for place in found:
            check(place)
    return found


def inside(path: Path, named: str, error: type[StepguardError]) -> Path:
    """Return the resolved path; raise `error` if it is not below the current directory."""
    resolved = path.resolve()
    if not resolved.is_relative_to(Path.cwd()):
        raise error(
            f"{named} lies outside the current directory; run this in the project's folder."
        )
    return resolved

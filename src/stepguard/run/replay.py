"""Replay a capsule: the same step, in a fresh process or on another machine, with the same origin.

The capsule holds no code. Model, optimizer and loss come from the user's own program: a build
function, or the script that was running, executed up to its first guarded step. Either must lie
below the current directory, and neither beside a capsule or a journal: a capsule can name code, it
cannot bring it. Code that a capsule names is run without a question only if this user has written
the capsule here.
"""

from __future__ import annotations

import ast
import difflib
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from stepguard._errors import CapsuleError, JournalError, StateError, StoreError
from stepguard.checkpoints.store import Opened, open_last_good, open_one
from stepguard.diagnose import RunFacts, diagnose
from stepguard.diagnose.source_line import import_of
from stepguard.engine.context import Context
from stepguard.engine.incident.situation import SHORTLY
from stepguard.engine.incident.trials import try_remedies
from stepguard.engine.protect import StepTaken, taking
from stepguard.journal import read_run
from stepguard.locate import locate
from stepguard.locate.origins import place_replayed_exception
from stepguard.locate.replay import LocateBudget
from stepguard.probes.whatif import OwnFix, Progress, TrialSubject, compare_candidates
from stepguard.ranks.saving import state_of_rank
from stepguard.records import Evidence, Incident, Origin, Remedy, Verdict
from stepguard.records.incident import VerdictKind
from stepguard.records.probes import WhatIf
from stepguard.report import phrases
from stepguard.run.guarded_script import as_main
from stepguard.state.batch import LossFn, Step, unwrapped
from stepguard.state.buffers import BufferKeeper
from stepguard.state.capsule import (
    Capsule,
    Check,
    Window,
    find_module,
    import_function,
    importable,
    inside,
    read_capsule,
    read_window,
    window_step,
)
from stepguard.state.files import write_file
from stepguard.state.isolation import rerun
from stepguard.state.run_state import RunState

# --- Replay a capsule: the same step, in a fresh process or on another machine, with the same
# origin.


SAME_LOSS = 1e-4
"""Other kernels and thread counts round differently; a loss that far apart is another one."""
MOST_STEPS = 100
"""Guarded steps that may pass before one fits the capsule: a GAN has two guards."""

INSTALLED = frozenset({"site-packages", "dist-packages"})
RECORDS = ("journal*.jsonl", "capsule.json", "window.json", "seal.json")
"""Files of folders that people send each other: no code of a project is kept beside them."""
MOST_RUNS = 1000.0
"""Runs of the step that trying the fixes may take: nothing waits for it here."""

NOTHING: Mapping[str, nn.Module] = {}
Found = TypeVar("Found")
Inspect = Callable[[Step, Incident], None]
Confirm = Callable[[str], bool]
"""Asked with what would be run, for a capsule that was not made here."""


def replay(
    capsule: str | Path,
    *,
    build: str | Callable[[], Any] | None = None,
    script: str | None = None,
    inspect: Inspect | None = None,
    confirm: Confirm = lambda command: False,
) -> Incident:
    """Run the bad step again and locate its first harmful value. Raises CapsuleError.

        incident = stepguard.replay("runs/a/incidents/00000048-nonfinite_loss", script="train.py")

    This runs code: `build` or `script` where given, else what the capsule names. `confirm` is asked
    before code that a capsule of somebody else, another machine or another folder names.
    `inspect` is called with the step and the incident while the script's objects are still alive.
    """

    def locate_again(again: CapsuleReplay[Incident], step: Step) -> Incident:
        incident = again.located(step)
        if inspect is not None:
            inspect(step, incident)
        return incident

    return with_step(capsule, locate_again, build=build, script=script, confirm=confirm)


def with_step(
    capsule: str | Path,
    use: Callable[[CapsuleReplay[Found], Step], Found],
    *,
    build: str | Callable[[], Any] | None = None,
    script: str | None = None,
    confirm: Confirm = lambda command: False,
) -> Found:
    """Return what `use` makes of the capsule's step, while the script's objects are alive."""
    content = read_capsule(Path(capsule))
    again = CapsuleReplay(content, use)
    again.take_weights(built=build is not None)
    if callable(build):
        return again.from_built(build())
    if build is not None:
        with importable():
            return again.from_built(import_function(build, CapsuleError)())
    if script is not None:
        return again.from_script(script, None)
    check: Check = lambda path: None  # noqa: E731
    if not content.made_here:
        check = partial(_refuse_brought, content)
        if content.command and not confirm(content.command):
            raise CapsuleError(
                f"{content.folder} was not made by you, on this machine, in this folder, and names "
                f"code to run: {content.command}. Look at it, then pass --yes, or name the code "
                "yourself with --script or --build (script=, build=)."
            )
    if content.build is not None:
        with importable():
            return again.from_built(import_function(content.build, CapsuleError, check)())
    if content.script is None:
        raise CapsuleError(
            f"{content.folder} names neither a script nor a build function; pass "
            "script='train.py', or build='module:function' that returns (model, optimizer, "
            "loss_fn)."
        )
    return again.from_script(content.script, content.module, check)


class CapsuleReplay(Generic[Found]):
    """Replays one capsule with the objects of the user's program."""

    def __init__(
        self, capsule: Capsule, use: Callable[[CapsuleReplay[Found], Step], Found]
    ) -> None:
        self.capsule = capsule
        self._use = use
        self._decoded = capsule.decoded()
        self._found: list[Found] = []
        """What `use` has returned."""
        self._offers = 0
        self._seen: list[Context] = []
        """Contexts of the script's guards."""
        self._why_not = ""
        self._weights = ""
        """Whose weights the step is run with, where they are not those it began from."""

    def take_weights(self, *, built: bool) -> None:
        """Read the weights of a capsule without any; `built`: what is built may have its own."""
        capsule = self.capsule
        missing = capsule.without_weights
        if missing is None:
            return
        self._weights = "the weights are those of the build function"
        named = missing.get("checkpoint")
        if named is None and built:
            return
        folder = _run_of(capsule) / "checkpoints"
        opened: Opened | None = None
        try:
            if named is not None:
                with suppress(StoreError):  # it is gone, or damaged
                    opened = open_one(folder / Path(str(named)).name)
            opened = opened or open_last_good(folder)
        except StoreError as fault:
            if built:
                return
            taken = missing.get("bytes")
            raise CapsuleError(
                f"{capsule.folder} holds no weights (the step takes "
                f"{phrases.size(taken) if isinstance(taken, int) else '?'}, more than "
                f"GuardConfig.capsule_limit), and no sealed checkpoint has them: {fault} "
                "Pass --build (build=) with a function whose model has weights: those are "
                "used."
            ) from None
        capsule.weights = state_of_rank(opened.tensors, opened.facts, missing.get("rank", 0))
        bad = self._decoded[0].step
        self._weights = ""
        if opened.step != bad:
            self._weights = f"weights of step {opened.step}, the bad step was {bad}"

    def from_built(self, built: Any) -> Found:
        """Replay with what a build function returned."""
        what = ""
        if not isinstance(built, tuple):
            what = type(built).__name__
        elif len(built) not in (3, 4) or not isinstance(built[0], nn.Module):
            what = f"a tuple of {len(built)}"
        if what:
            raise CapsuleError(
                f"the build function returned {what}; return (model, optimizer, loss_fn)."
            )
        model, optimizer, loss_fn, *modules = built
        return self._use(self, self._step(model, optimizer, loss_fn, *modules))

    def from_script(
        self, script: str, module: str | None, check: Check = lambda path: None
    ) -> Found:
        """Run the script up to a guarded step that fits, and replay with its objects."""
        # A capsule may name code of the user's project, nothing else on the machine.
        path = inside(Path(script), script, CapsuleError)
        if not path.is_file():
            raise CapsuleError(
                f"{script} does not exist here; run this in the project's folder, or pass script= "
                "or build=."
            )
        check(path)
        if module is not None:
            with importable():
                files = find_module(module, module, CapsuleError, check)
            if files != [path]:
                raise CapsuleError(
                    f"{self.capsule.folder} names the script {script} and the module {module}, "
                    "which is another file; pass script= or build=."
                )
        program = as_main(module or script, self.capsule.arguments, module=module is not None)
        grad = torch.is_grad_enabled()
        try:
            with program as start, taking(self._take):
                start()
        except StepTaken:
            pass
        except CapsuleError:
            raise
        except SystemExit as ending:
            self._why_not = self._why_not or f"it ended with exit code {ending.code!r}"
        except Exception as fault:
            raise CapsuleError(
                f"{path.name} failed before its step could be taken: {type(fault).__name__}: "
                f"{fault}"
            ) from fault
        finally:
            torch.set_grad_enabled(grad)
            # The script ends here without having closed its guards.
            for context in self._seen:
                context.resources.close()
        if not self._found:
            why = self._why_not or "it ended without calling guard.step"
            raise CapsuleError(
                f"{path.name} gave nothing to run the capsule with: {why}; pass script= or build=."
            )
        return self._found[0]

    def _take(self, context: Context, loss_fn: LossFn) -> bool:
        """Take the first step whose model and optimizer fit the capsule."""
        self._offers += 1
        if not any(context is one for one in self._seen):
            self._seen.append(context)
        why_not = self.capsule.fits(context.roots, context.optimizer)
        if why_not and self._offers < MOST_STEPS:
            self._why_not = why_not
            return False
        if not why_not:
            taken = self._step(context.model, context.optimizer, loss_fn, context.modules)
            self._found.append(self._use(self, taken))
        return True

    def _step(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: LossFn,
        modules: Mapping[str, nn.Module] = NOTHING,
    ) -> Step:
        """Fill the objects with the capsule's state."""
        capsule = self.capsule
        reading, batches, rng = self._decoded
        roots = {"": unwrapped(model), **modules}
        capsule.fill(roots, optimizer)
        buffers = BufferKeeper(roots.values())
        buffers.remember()
        return Step(
            index=reading.step,
            model=model,
            optimizer=optimizer,
            modules=dict(modules),
            buffers=buffers,
            loss_fn=loss_fn,
            micro_batches=batches,
            rng=rng,
            scale=float(capsule.facts["scale"]),
            clip_norm=capsule.facts["clip_norm"],
        )

    def located(self, step: Step) -> Incident:
        """Replay the step and locate its first harmful value."""
        capsule = self.capsule
        reading = self._decoded[0]
        kind: VerdictKind = capsule.facts["verdict"]
        summary = str(capsule.facts.get("summary", ""))
        verdict = Verdict(kind=kind, severity="incident", summary=summary)
        incident = Incident(
            id=f"{reading.step:08d}-replay", step=reading.step, verdict=verdict, reading=reading
        )
        if kind == "exception":
            origin = place_replayed_exception(step)
        elif verdict.finite_anomaly:
            # Nothing is non-finite here, so the replay shows the loss: that is what was wrong
            # with it.
            losses = rerun(step).losses
            now = math.fsum(losses)
            said = "the replay gives loss"
            same = reading.loss is not None and math.isclose(now, reading.loss, rel_tol=SAME_LOSS)
            if now == reading.loss:
                remark = f"{said} {now:.9g}, the same to the last bit"
            elif reading.loss is None:
                remark = f"{said} {now:.9g}; the loss of the step was not observed"
            else:
                remark = f"{said} {now:.9g}, in training it was {reading.loss:.9g}"
            departs = None if same else remark
            origin = Origin(
                step=step.index,
                phase="loss",
                method="rerun",
                reproduced=same,
                evidence=Evidence(departs=departs),
                remarks=(remark,) if same else (),
            )
        else:
            origin = locate(step, reading)
        if self._weights:
            # None: a clean replay with other weights does not mean a transient fault
            origin = replace(
                origin,
                reproduced=origin.reproduced or None,
                remarks=(*origin.remarks, f"{self._weights}: the origin may differ"),
            )
        incident = replace(incident, origin=origin, capsule=str(capsule.folder))
        incident = replace(incident, findings=diagnose(incident, RunFacts()))
        budget = LocateBudget(steps=MOST_RUNS)
        budget.begin(step)
        return try_remedies(incident, step, RunFacts(), budget)


def _run_of(capsule: Capsule) -> Path:
    """The run whose `incidents/<id>/capsule` it is; else its own folder."""
    folder = capsule.folder.resolve()
    if folder.parent.parent.name == "incidents":
        return folder.parents[2]
    return folder


def _refuse_brought(capsule: Capsule, path: Path) -> None:
    """Raise for code that came with a capsule or a run, or that is installed."""
    resolved = path.resolve()
    run = _run_of(capsule)
    here = Path.cwd()
    between = [here, *(up for up in resolved.parents if up.is_relative_to(here))]
    beside = any(any(up.glob(name)) for up in between for name in RECORDS)
    if INSTALLED.intersection(resolved.parts) or resolved.is_relative_to(run) or beside:
        raise CapsuleError(
            f"{path} is not code of your project: it is installed, or lies in the folder of a run "
            "or a capsule. To run it anyway, name it with --script or --build."
        )


# --- Try on a capsule what would have helped, with the objects of the user's own program.


def whatif(
    path: str | Path,
    *,
    build: str | Callable[[], Any] | None = None,
    script: str | None = None,
    own: str | OwnFix | None = None,
    progress: Progress = lambda done, total, name: None,
    confirm: Confirm = lambda command: False,
) -> WhatIf:
    """Train the steps of a capsule, or of the last chain of incidents of a run.

    Raises CapsuleError.
    """
    folder, failed_next = capsule_of(Path(path))
    content = read_capsule(folder)
    window = read_window(folder) or Window(start=content.saved_state(), steps=[])
    fix = own
    if isinstance(own, str):
        with importable():
            fix = import_function(own, CapsuleError)
    assert not isinstance(fix, str)
    found: list[WhatIf] = []

    def try_all(step: Step, incident: Incident) -> None:
        named = content.folder
        if named.name == "capsule":
            named = named.resolve().parent
        subject = TrialSubject(
            step=step,
            bad=window_step(step, incident.reading.loss, incident.reading.lr),
            window=window,
            run_state=RunState(step.named_roots(), step.optimizer),
            incident=replace(incident, id=named.name),
            failed_next=failed_next,
        )
        try:
            found.append(compare_candidates(subject, own=fix, progress=progress))
        except StateError as why:
            raise CapsuleError(f"{folder} cannot be tried: {why}") from None

    replay(folder, build=build, script=script, inspect=try_all, confirm=confirm)
    return found[0]


def capsule_of(
    path: Path, wanted: Callable[[Incident], bool] = lambda incident: True
) -> tuple[Path, int | None]:
    """The capsule at this path; of a run, the first one of its last chain of incidents.

    The first that is `wanted`, if any is. Beside it the step after that one, where the journal
    shows that it failed as well.
    """
    folder = path.parent if path.name == "journal.jsonl" else path
    if not _is_run(folder):
        incident = folder.resolve().parent if folder.name == "capsule" else folder.resolve()
        return folder, _failed_next(_incidents(incident.parent.parent), incident.name)
    known = _incidents(folder)
    with_capsule = [one for one in known if one.capsule and (folder / one.capsule).is_dir()]
    if not with_capsule:
        return newest_capsule(folder)[0], None
    chain = len(known) - 1
    # a rewind leads back to earlier steps
    while chain and known[chain - 1].step >= known[chain].step - SHORTLY:
        chain -= 1
    kept = [one for one in known[chain:] if one in with_capsule] or with_capsule[-1:]
    chosen = next(filter(wanted, kept), kept[0])
    return folder / str(chosen.capsule), _failed_next(known, chosen.id)


def newest_capsule(path: Path) -> tuple[Path, int]:
    """The capsule at this path; of a run, the one that was recorded last.

    Beside it how many capsules the run holds; 0 where the path is not a run.
    """
    folder = path.parent if path.name == "journal.jsonl" else path
    if not _is_run(folder):
        return folder, 0
    recorded = [folder / one.capsule for one in _incidents(folder) if one.capsule]
    found = [capsule for capsule in recorded if capsule.is_dir()]
    if not found:
        # without a journal: by its name, which begins with its step
        written = sorted(folder.glob("incidents/*/capsule/capsule.json"))
        found = [capsule.parent for capsule in written]
    if not found:
        raise CapsuleError(
            f"{folder} holds no capsule: steps of guard.step with a batch that can be kept have "
            "one, unless GuardConfig(capsule='off')."
        )
    return found[-1], len(found)


def _is_run(folder: Path) -> bool:
    return any((folder / of_run).exists() for of_run in ("incidents", "journal.jsonl"))


def _incidents(run: Path) -> list[Incident]:
    """What the journal tells of a run; nothing where there is none."""
    try:
        return read_run(run).incidents
    except (OSError, JournalError):
        return []


def _failed_next(known: list[Incident], name: str) -> int | None:
    step = next((one.step for one in known if one.id == name), None)
    if step is None or all(one.step != step + 1 for one in known):
        return None
    return step + 1


# --- Write the fix of an incident as a change of the user's files, proven by running the step.


@dataclass(slots=True, kw_only=True)
class ProvenFix:
    """A change with which the bad step was run and was finite."""

    incident: Incident
    """The incident as the replay found it: before the change."""
    remedy: Remedy
    code: str
    """Code of the finding that it answers."""
    files: dict[Path, tuple[str, str]]
    """Each file as it is, and as it is to be."""

    @property
    def diff(self) -> str:
        """The change as a unified diff, for `git apply` or `patch -p1`."""
        parts: list[str] = []
        for path, (old, new) in self.files.items():
            name = path.relative_to(Path.cwd()).as_posix()
            parts += difflib.unified_diff(
                old.splitlines(keepends=True),
                new.splitlines(keepends=True),
                f"a/{name}",
                f"b/{name}",
            )
        return "".join(parts)

    def apply(self) -> list[Path]:
        """Write the files. Raises CapsuleError if one has changed since the step was run."""
        for path, (old, _) in self.files.items():
            if _read(path) != old:
                raise CapsuleError(f"{path} has changed since the step was run; run this again.")
        for path, (_, new) in self.files.items():
            mode = path.stat().st_mode
            write_file(path, new.encode())
            path.chmod(mode)
        return list(self.files)


def fix(
    path: str | Path,
    *,
    build: str | Callable[[], Any] | None = None,
    script: str | None = None,
    confirm: Confirm = lambda command: False,
) -> ProvenFix:
    """Replay the capsule and return the fix with which its step is finite. Raises CapsuleError.

    Of a run, the first incident of its last chain for which the run itself has found a fix, else
    the first of all.
    """

    def has_fix(incident: Incident) -> bool:
        return any(remedy.proven for one in incident.findings[:1] for remedy in one.remedies)

    folder, _ = capsule_of(Path(path), has_fix)
    incident = replay(folder, build=build, script=script, confirm=confirm)
    if incident.origin is None or not incident.origin.reproduced:
        raise CapsuleError(
            f"{folder} is not reproduced here: there is no bad step to try a fix on."
        )
    untried = ""
    for finding in incident.findings[:1]:
        for remedy in finding.remedies:
            if remedy.proven:
                files = _changed_files(remedy)
                return ProvenFix(incident=incident, remedy=remedy, code=finding.code, files=files)
            untried = untried or remedy.tried or remedy.title
    raise CapsuleError(
        f"no change of your code is known to fix {folder}: {untried or 'no cause was found'}."
    )


def _changed_files(remedy: Remedy) -> dict[Path, tuple[str, str]]:
    files: dict[Path, tuple[str, str]] = {}
    for name in dict.fromkeys(edit.file for edit in remedy.edits):
        if not Path(name).is_file():
            raise CapsuleError(f"{name} is not a file: change the cell by hand: {remedy.snippet}")
        path = inside(Path(name), name, CapsuleError)
        old = _read(path)
        lines = old.splitlines(keepends=True)
        newline = "\r\n" if lines and lines[0].endswith("\r\n") else "\n"
        edits = [edit for edit in remedy.edits if edit.file == name]
        for edit in sorted(edits, key=lambda one: one.line, reverse=True):
            first = edit.line - 1
            last = first + len(edit.old)
            if tuple(line.rstrip("\r\n") for line in lines[first:last]) != edit.old:
                raise CapsuleError(f"{path} has changed since it was loaded; run this again.")
            lines[first:last] = [line + newline for line in edit.new]
        place, known = _after_imports("".join(lines))
        needs = tuple(function for function in remedy.needs if function not in known)
        if needs:
            lines.insert(place, import_of(needs) + newline)
        files[path] = (old, "".join(lines))
    return files


def _after_imports(text: str) -> tuple[int, set[str]]:
    """The line before which one more import can stand, and what is imported of ours already."""
    place = 0
    known: set[str] = set()
    for position, node in enumerate(ast.parse(text).body):
        imports = isinstance(node, ast.Import | ast.ImportFrom)
        docstring = position == 0 and isinstance(node, ast.Expr)
        if not imports and not docstring:
            break
        place = node.end_lineno or node.lineno
        if isinstance(node, ast.ImportFrom) and node.module == "stepguard.numerics":
            known |= {name.name for name in node.names if name.asname is None}
    return place, known


def _read(path: Path) -> str:
    # bytes, so that the ends of lines stay what they are
    return path.read_bytes().decode()

"""Items about the data, and about the project: configuration, launcher, program, checkpoint."""

from __future__ import annotations

import math
import platform
import shutil
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import torch

from stepguard import __version__
from stepguard.check.data import LabelFacts, Measured, in_example, overlap
from stepguard.check.inspection import (
    Answer,
    Inspection,
    NotApplicable,
    NotGiven,
    failed,
    passed,
    peak_rates,
    warned,
)
from stepguard.check.settings import (
    Setting,
    UnquotedNumber,
    as_number,
    flat,
    plain,
    spells_number,
    unread,
)
from stepguard.check.subject import FINITE_TESTS, NORM_NAMES
from stepguard.diagnose.case import largest
from stepguard.report.phrases import count, first_few, size
from stepguard.state.files import free_memory

# --- Items about data: bad, missing, constant or far-off values, repeated examples, and targets.


OUTLIER = 1000.0
"""Times the median example."""
RARE = 0.1
"""Of the examples."""
LEAST_EXAMPLES = 8
"""With fewer examples neither a constant column nor an outlier says anything."""
LEAST_ELEMENTS = {"real": 16, "ids": 8}
"""A tensor with fewer may be constant by chance."""


def data_finite(run: Inspection) -> Answer:
    data = run.data
    if not data.nonfinite:
        return passed(f"no NaN and no Inf in {data.scope}", *data.remarks)
    return failed(
        f"{count(len(data.nonfinite), 'place')} in {data.scope}: {first_few(data.nonfinite, 4)}",
        fix="Repair or leave out these examples; clean before the model, never after (0 * NaN is "
        "NaN).",
    )


def data_missing(run: Inspection) -> Answer:
    data = run.data
    if not data.numbers:
        raise NotApplicable("the data has no columns of numbers")
    gaps = []
    for key, names in data.missing.items():
        # A column of texts may be empty by right.
        if data.numbers[key]:
            total = len(names) + data.numbers[key]
            gaps.append(f"{key}: {len(names)} of {total} ({first_few(names, 3)})")
    if gaps:
        return warned(
            f"empty values in {first_few(gaps, 4)}",
            fix="Fill them or leave these examples out, and say which.",
        )
    return passed(f"no empty value in {data.scope}")


def data_constant(run: Inspection) -> Answer:
    data = run.data
    said = []
    names = []
    columns = []
    for key, values in data.values.items():
        low, high = _span(values)
        places: dict[str, list[str]] = {"real": [], "ids": []}
        for name, least, most, elements, kind in values:
            # The chance that whole numbers agree is smaller.
            if least == most and elements >= LEAST_ELEMENTS.get(kind, math.inf):
                place = in_example(name, key)
                places[kind].append(f"{place} = {least:g} in all {elements:,} places")
        names += places["real"]
        # Masks are 0 or 1 throughout by right, and so are types of tokens and class maps: only a
        # row that is unlike nearly all others is one that went wrong.
        if high - low > 1 and len(places["ids"]) <= RARE * len(values):
            names += places["ids"]
        # Whole numbers are ids or classes, which may all be the same.
        measured = values[0].kind == "real" and values[0].size == 1 and not low.is_integer()
        if measured and low == high and len(values) >= LEAST_EXAMPLES:
            columns.append(f"{key} = {low:g}")
    if names:
        said.append(f"{count(len(names), 'input')} in {data.scope}: {first_few(names, 4)}")
    if columns:
        said.append(f"the same value in every example: {first_few(columns, 4)}")
    if not said:
        return passed(f"no constant input in {data.scope}")
    return warned(
        *said,
        fix="Look at these files: a failed recording or conversion. A constant has no variance.",
    )


def _span(values: list[Measured]) -> tuple[float, float]:
    return min(value.low for value in values), max(value.high for value in values)


def _magnitudes(values: list[Measured]) -> list[tuple[float, str]]:
    """Largest magnitude of each example with real numbers, the largest first."""
    real = [value for value in values if value.kind == "real"]
    return sorted(((max(-v.low, v.high), v.example) for v in real), reverse=True)


def data_range(run: Inspection) -> Answer:
    values = run.data.values
    outside = []
    for key, (low, high) in run.subject.data_range.items():
        if not values[key]:
            outside.append(f"data_range names {key!r}, which no example has")
            continue
        least, most = _span(values[key])
        if least < low or most > high:
            said = f"{key} spans {least:.4g} to {most:.4g}, allowed is {low:g} to {high:g}"
            outside.append(f"{said}; largest in {_magnitudes(values[key])[0][1]}")
    if outside:
        return failed(
            *outside, fix="Correct the scaling of these examples, or the range that is declared."
        )
    dtype = "float64"
    with suppress(NotGiven):
        dtype = run.probe.dtype
    too_large = []
    outliers = []
    spans = []
    for key, found in values.items():
        sizes = _magnitudes(found)
        if not sizes:
            continue
        name = key or "values"
        largest_size, example = sizes[0]
        if largest_size > largest(dtype):
            said = f"{name} {largest_size:.4g} in {example} is infinite in {dtype}"
            too_large.append(f"{said}, which the step runs in")
        outliers += _outliers(name, sizes)
        low, high = _span(found)
        spans.append(f"{name} {low:.3g} to {high:.3g}")
    if not spans:
        raise NotApplicable("the data has no real numbers")
    if too_large:
        return failed(*too_large, fix="Scale the inputs, or run in bfloat16 or float32.")
    if outliers:
        return warned(*outliers[:4], fix="Look at these examples: a wrong unit or a corrupt value.")
    return passed(first_few(spans, 4))


def _outliers(name: str, sizes: list[tuple[float, str]]) -> list[str]:
    usual = median(size for size, _ in sizes)
    far = [f"{example} ({size:.4g})" for size, example in sizes if size > OUTLIER * usual]
    # If most examples are all 0, any other is infinitely far from the median.
    if not far or not usual or len(sizes) < LEAST_EXAMPLES:
        return []
    beyond = f"{len(far)} of {len(sizes)} beyond {OUTLIER:g} x {usual:.3g}, the usual"
    return [f"{name}: {beyond}: {first_few(far, 3)}"]


def data_unreadable(run: Inspection) -> Answer:
    data = run.data
    if data.unreadable:
        return failed(
            f"{count(len(data.unreadable), 'example')} of {data.seen:,}: "
            f"{first_few(data.unreadable, 3)}",
            fix="Restore these files, or leave them out: the run dies when it comes to them.",
        )
    if not data.seen:
        return failed(
            f"the {data.what} gave no example", fix="Give a dataset or path that holds some."
        )
    return passed(f"{data.scope} can be read", *data.remarks)


def data_duplicates(run: Inspection) -> Answer:
    repeated = run.data.duplicates
    if not repeated:
        return passed(f"{run.data.scope}, all different")
    share = 100 * len(repeated) / run.data.seen
    return warned(
        f"{count(len(repeated), 'repeated example')} ({share:.3g} %): {first_few(repeated, 4)}",
        fix="Remove the repetitions, or weight them on purpose.",
    )


def data_leak(run: Inspection) -> Answer:
    validation = run.validation
    shared = overlap(run.data, validation)
    if not shared:
        return passed(
            f"none of {validation.seen:,} validation examples is among {run.data.seen:,} training "
            "examples"
        )
    return failed(
        f"{count(len(shared), 'example')} of {validation.seen:,} in the validation data are "
        f"training examples: {first_few(shared, 4)}",
        fix="Split before augmenting, by source and not by row.",
    )


# --- Targets.


def _labels(run: Inspection) -> LabelFacts:
    """Statistics of the targets, for data that has integer targets."""
    if run.data.labels.lengths:
        return run.data.labels
    usual = "key labels, label, target or y, nor in the last part of a tuple"
    key = f"key {run.subject.label_key!r}" if run.subject.label_key else usual
    raise NotApplicable(f"no integer targets under the {key}; --label-key names another")


def labels_empty(run: Inspection) -> Answer:
    labels = _labels(run)
    share = f"{labels.supervised:,} of {labels.total:,} targets count"
    if not labels.empty:
        return passed(f"each of {run.data.scope} has a target that counts; {share}")
    evidence = [
        f"{count(len(labels.empty), 'example')} of {len(labels.lengths):,} without a target other "
        f"than {labels.ignore_index}: {first_few(labels.empty)}"
    ]
    longest = max(labels.lengths)
    full = list(labels.empty.values()).count(longest)
    if full and min(labels.lengths) != longest:
        evidence.append(
            f"{full} of them fill the whole length of {longest}: the prompt alone was too long"
        )
    return failed(
        *evidence,
        share,
        fix="Leave these examples out before batching, or cut the prompt and keep the answer "
        "(truncation_side='left'); see `stepguard explain SG102`.",
    )


def labels_range(run: Inspection) -> Answer:
    labels = _labels(run)
    if not labels.supervised:
        raise NotApplicable("no target counts")
    (low, low_name), (high, high_name) = labels.low, labels.high
    spans = f"targets span {low} to {high}"
    fix = "Correct the labels, the number of classes, or the ignore_index."
    if low < 0:
        return failed(
            f"{spans}: {low} in example {low_name} is not a class and not the ignore_index", fix=fix
        )
    classes = None
    with suppress(NotGiven):
        classes = run.traced_step.classes
    if classes is None:
        return passed(f"{spans}; the number of classes was not seen in a cross-entropy")
    if high >= classes:
        return failed(
            f"{spans}, but the loss has {classes} classes: {high} in example {high_name}", fix=fix
        )
    return passed(f"{spans}, the loss has {classes} classes")


def _end_token(run: Inspection) -> int | None:
    """From the configuration, else from the model, where transformers keeps it."""
    found = run.number("eos")
    if found is None:
        found = getattr(getattr(run.subject.model, "config", None), "eos_token_id", None)
    # transformers may keep a list of several.
    return int(found) if isinstance(found, int | float) else None


def labels_truncated(run: Inspection) -> Answer:
    labels = _labels(run)
    shortest, longest = min(labels.lengths), max(labels.lengths)
    configured = run.number("max_length")
    if labels.total == len(labels.lengths):
        raise NotApplicable("the targets are single classes, not sequences")
    if not labels.masked:
        raise NotApplicable("every token counts: packed text has no end that could be cut off")
    if configured is None and shortest == longest:
        raise NotApplicable(
            f"all examples are {longest} long, and no max_length is configured to compare with"
        )
    end = _end_token(run)
    limit = int(configured or longest)
    cut = [name for name, length, last in labels.cuts if length >= limit and last != end]
    lengths = f"lengths {shortest} to {longest}, limit {limit}"
    if configured is None and end is None:
        lengths += (
            " (the longest; name max_length and eos_token_id in the configuration to be exact)"
        )
        # One example is always the longest.
        if len(cut) == 1:
            cut = []
    if not cut:
        return passed(f"no answer ends at the limit; {lengths}")
    how = "to the last token" if end is None else f"without the end token {end}"
    return warned(
        f"{count(len(cut), 'answer')} of {len(labels.lengths):,} run into the limit {how}: "
        f"{first_few(cut)}",
        lengths,
        fix="Raise the maximal length, or leave out what is longer: a cut answer teaches to stop "
        "nowhere.",
    )


# --- The configuration and the launcher.


def config_types(run: Inspection) -> Answer:
    leaves = list(flat(run.needed_config()))
    numbers = []
    doubtful = []
    switches = []
    for leaf in leaves:
        if not isinstance(leaf.value, str) or leaf.means("text"):
            continue
        if isinstance(leaf.value, UnquotedNumber):
            # Does the program read such a text as a number? OmegaConf does, and the optimizer
            # shows it.
            if run.program.imports & {"omegaconf", "hydra"}:
                became_a_number = True
            elif run.subject.optimizer is None or run.setting("lr") != leaf:
                became_a_number = False
            else:
                rate = float(leaf.value)
                became_a_number = any(
                    math.isclose(rate, peak, rel_tol=1e-3) for peak in peak_rates(run.optimizer)
                )
            if not became_a_number:
                doubtful.append(f"{leaf.key}: {leaf.value}")
        elif spells_number(leaf.value):
            numbers.append(f"{leaf.key}: {leaf.value!r}")
        # Only these: a `no` in quotes is often the name of a strategy.
        elif leaf.value.strip().lower() in ("true", "false"):
            switches.append(f"{leaf.key}: {leaf.value!r}")
    said = [
        *_listed("a number for YAML 1.2 and OmegaConf, but text for PyYAML", doubtful),
        *_listed("numbers in quotes", numbers),
        *_listed("read as text, and every text is true", switches),
    ]
    if numbers or switches:
        return failed(*said, fix="Write numbers, true and false without quotes.")
    if doubtful:
        return warned(
            *said, fix="Write 1.0e-4 instead of 1e-4, which every reader takes for a number."
        )
    return passed(f"{len(leaves)} values, none of them a number or switch in disguise")


def _listed(label: str, names: list[str], most: int = 4) -> list[str]:
    """`missing: a, b and 3 more` as the only sentence; no sentence for no names."""
    return [f"{label}: {first_few(names, most)}"] if names else []


def config_values(run: Inspection) -> Answer:
    leaves = list(flat(run.needed_config()))
    wrong = []
    for leaf in leaves:
        value = as_number(leaf.value)
        if isinstance(leaf.value, float) and math.isnan(leaf.value):
            wrong.append(f"{leaf.key} is NaN")
        elif value is not None and leaf.means("positive") and value <= 0:
            wrong.append(f"{leaf} must be above 0")
        elif value is not None and leaf.means("share") and not 0 <= value <= 1:
            wrong.append(f"{leaf} must lie between 0 and 1")
    if wrong:
        return failed(first_few(wrong, 4), fix="Correct these values.")
    return passed(f"{len(leaves)} values within what they can be")


def config_unread(run: Inspection) -> Answer:
    """A key counts as read if the program took it, or if its source names it (a training loop)."""
    tracked = run.context.tracked
    if tracked is None:
        raise NotGiven(run.context.why_untracked)
    total = len(list(flat(plain(tracked))))
    left = unread(tracked)
    nowhere = _named_nowhere(run, left)
    if not nowhere:
        return passed(
            f"{total - len(left)} of {total} keys were read, {len(left)} are named elsewhere in "
            "the source"
        )
    return warned(
        f"{count(len(nowhere), 'key')} of {total} not read, nor named in "
        f"{count(run.project.files, 'source file')}: {first_few(nowhere)}",
        fix="Remove them, or correct their names: changing them has no effect.",
    )


def _named_nowhere(run: Inspection, keys: list[str]) -> list[str]:
    return [key for key in keys if key.rpartition(".")[2] not in run.project.mentions]


def config_changed(run: Inspection) -> Answer:
    new = dict(flat(run.needed_config()))
    stored = run.checkpoint
    old = dict(flat(stored.config))
    if not old:
        raise NotApplicable(f"{stored.path.name} holds no configuration that can be read")
    differences = []
    for key in sorted(new.keys() & old.keys()):
        same = _comparable(old[key]) == _comparable(new[key])
        if not same and not Setting(key, None).means("of_one_start"):
            differences.append(f"{key}: {old[key]!r} -> {new[key]!r}")
    said = _listed("changed", differences, 8)
    said += _listed("only in the checkpoint", sorted(old.keys() - new.keys()))
    said += _listed("new", sorted(new.keys() - old.keys()))
    if not said:
        return passed(f"{len(new)} values equal those stored in {stored.path.name}")
    return warned(
        *said,
        fix="Make sure that each change is meant, and that loading the checkpoint does not undo "
        "it.",
    )


def _comparable(value: Any) -> Any:
    """Equal as a setting: 1 is 1.0 is "1", and a tuple is a list."""
    number = as_number(value)
    if number is not None:
        return number
    return list(value) if isinstance(value, tuple) else value


def launcher_agrees(run: Inspection) -> Answer:
    launcher = run.launcher
    if not launcher.values:
        raise NotGiven("give --launcher FILE, or start the check the way the run is started")
    good: list[str] = []
    bad: list[str] = []
    accumulation = run.setting("accumulation")
    for name in ("gradient_accumulation_steps", "num_processes"):
        asked = as_number(launcher.values.get(name))
        real = run.framework.facts.get(name)
        others = {}
        if accumulation and name.startswith("gradient"):
            others[f"configured {accumulation}"] = as_number(accumulation.value)
        if isinstance(real, int):
            others[f"the object in the program has {real}"] = real
        for said, value in others.items():
            if asked is not None and value is not None:
                (good if asked == value else bad).append(f"{launcher.said[name]}, {said}")
    if bad:
        return failed(
            *bad, fix="Leave the value to one place, or set both alike; the program's wins."
        )
    return passed(*(good or [f"nothing contradicts {', '.join(launcher.said.values())}"]))


def checklist_accumulation(run: Inspection) -> Answer:
    setting = run.setting("accumulation")
    real = run.framework.facts.get("gradient_accumulation_steps")
    tracked = run.context.tracked
    nowhere = [] if tracked is None else _named_nowhere(run, unread(tracked))
    if setting and setting.key in nowhere and not isinstance(real, int):
        return warned(f"{setting} is read by nothing", fix="Use it in the loop, or remove it.")
    steps = int(run.number("accumulation") or real or 1)
    if steps == 1:
        raise NotApplicable("no accumulation is configured: one batch is one step")
    batch = ""
    each = run.number("batch_size")
    if each:
        batch = f", effective batch {steps * int(each)} = {steps} x {int(each)} on each rank"
    usual = "within" if 2 <= steps <= 4 else "outside"
    return passed(
        f"{steps} micro-batches a step, {usual} the usual 2 to 4{batch}; it enlarges the batch, "
        "not memory"
    )


# --- What the program does, from its guard, its configuration and its source.

LARGEST_CLIP = 0.5
RAREST_CHECKPOINTS = 1000


def _guard_setting(run: Inspection, name: str) -> tuple[Any, str]:
    """A field of the GuardConfig or Policy, and where the source writes it.

    It is that of the returned guard, else what the program's source gives; None if it is computed.
    """
    guard = getattr(run.subject.guard, "config", run.subject.guard)
    if guard is not None:
        return getattr(guard, name, getattr(getattr(guard, "policy", None), name, None)), ""
    if run.context.script is None:
        return None, ""
    return run.program.settings.get(name, (None, ""))


def _guarded_or_configured(run: Inspection, name: str, meaning: str) -> tuple[float | None, str]:
    """A number of the GuardConfig, else of the configuration, and which of them names it."""
    value, place = _guard_setting(run, name)
    if isinstance(value, int | float):
        return float(value), f"GuardConfig.{name}={value:.12g}{place and f' at {place}'}"
    return run.number(meaning), str(run.setting(meaning))


def _guarded_at(run: Inspection) -> str:
    """Where the program starts a guard of stepguard; empty if it does not."""
    if run.subject.guard is not None:
        return "the returned `guard`"
    if run.subject.model is None and run.subject.config is None:
        raise NotGiven("give TARGET as module:function, or a configuration in the project's folder")
    if not run.program.files:
        raise NotGiven("start the check in the project's folder: there is no source below this one")
    place = run.program.places.get("guard", "")
    if place:
        _needs_script(run, f"a guard at {place}")
    return place


def _needs_script(run: Inspection, found: str) -> None:
    """Raise NotGiven where what was found may be a line of another program in the folder."""
    if run.context.script is None:
        raise NotGiven(
            f"{found} may belong to another program: give TARGET as module:function of this one"
        )


def checklist_clip(run: Inspection) -> Answer:
    value, said = _guarded_or_configured(run, "clip_norm", "clip")
    place = ""
    if value is None and run.context.script is not None:
        unclipped = _guard_setting(run, "clip_norm")
        value, place = run.program.settings.get("clipping", unclipped)
        said = f"the program clips at {place}" + (f" to {value:g}" if value is not None else "")
    if not place and (value or 0) <= 0:
        if run.subject.config is None and run.subject.guard is None and run.context.script is None:
            raise NotGiven("give TARGET as module:function, --config FILE, or return `guard`")
        return warned(
            "no clipping norm is configured, and the program clips nowhere",
            fix=f"GuardConfig(clip_norm={LARGEST_CLIP}), or clip_grad_norm_(model.parameters(), "
            f"{LARGEST_CLIP}) before optimizer.step().",
        )
    if value is None:
        return passed(f"{said}, to a norm that is not written there as a number")
    if value <= LARGEST_CLIP:
        return passed(said)
    name = type(run.subject.optimizer).__name__ if run.subject.optimizer else "an unknown optimizer"
    if "adam" in name.lower():
        return passed(
            f"{said}; above {LARGEST_CLIP}, but {name}'s update does not depend on the gradient's "
            "scale"
        )
    return warned(
        f"{said} with {name}", fix=f"{LARGEST_CLIP}, or a threshold from the run's own norms."
    )


def checklist_loss_checked(run: Inspection) -> Answer:
    place = _guarded_at(run)
    if place:
        return passed(f"stepguard reads the loss and every gradient of each step ({place})")
    tests = {name: at for name, at in run.program.places.items() if name in FINITE_TESTS}
    said = ", ".join(f"{name} at {place}" for name, place in tests.items())
    if "isfinite" in tests or {"isnan", "isinf"} <= tests.keys():
        _needs_script(run, said)
        return passed(f"{said}, of the loss")
    why = "nothing tests the loss"
    if said:
        why = f"only {said}: an infinite loss passes isnan, a NaN passes isinf"
    return warned(
        f"{why} in {count(run.program.files, 'source file')}",
        fix="guard = stepguard.watch(model, optimizer), one line before the loop, or start it with "
        "`stepguard run`.",
    )


def checklist_norms(run: Inspection) -> Answer:
    place = _guarded_at(run)
    if place:
        return passed(f"stepguard records the norm of every step ({place})")
    for name in NORM_NAMES:
        place = run.program.places.get(name, "")
        if place:
            _needs_script(run, f"{name} at {place}")
            return passed(f"{name} at {place}")
    return warned(
        f"no gradient norm is computed in {count(run.program.files, 'source file')}",
        fix="guard = stepguard.watch(model, optimizer) records it; clip_grad_norm_ returns it.",
    )


def checklist_checkpoints(run: Inspection) -> Answer:
    every, said = _guarded_or_configured(run, "checkpoint_every", "save_every")
    place = _guard_setting(run, "checkpoint_every")[1]
    if every is None and place:
        raise NotGiven(
            f"return `guard`: its checkpoint_every is not written as a number at {place}"
        )
    if every is None and run.subject.config is None and run.subject.guard is None:
        raise NotGiven("give --config FILE, or return `guard`")
    fix = f"checkpoint_every={RAREST_CHECKPOINTS} or less."
    if every is None or every <= 0:
        return warned("no interval between checkpoints is configured", fix=fix)
    cost = f"{int(every):,} steps"
    if run.steps:
        cost += f" of {run.steps:,}"
    if every <= min(RAREST_CHECKPOINTS, run.steps or math.inf):
        return passed(f"{said}: a crash costs at most {cost}")
    return warned(f"{said}: a crash costs up to {cost}", fix=fix)


def checklist_recovery(run: Inspection) -> Answer:
    actions = ", ".join(map(str, _guard_setting(run, "actions")[0] or ()))
    if actions and "rewind" not in actions.split(", "):
        return warned(
            f"the policy is {actions}, without rewind", fix="Add 'rewind' to Policy.actions."
        )
    place = _guarded_at(run)
    if not place:
        return warned(
            "nothing goes back to a good state by itself in "
            f"{count(run.program.files, 'source file')}",
            fix="guard = stepguard.Guard(model, optimizer, config=GuardConfig(run_dir=..., "
            "checkpoint_every=1000)).",
        )
    folder, written = _guard_setting(run, "run_dir")
    kept = folder or run.subject.run_dir or (written and f"its run_dir ({written})")
    where = (
        f", checkpoints below {kept}"
        if kept
        else "; without a run_dir nothing survives the process"
    )
    return passed(f"stepguard's policy ({place}): {actions or 'skip, rewind, stop'}{where}")


# --- The checkpoint: whole and finite, of this model, and written by the code that would run now.


def checkpoint_sound(run: Inspection) -> Answer:
    found = run.verified
    said = f"{found.format}: {count(found.tensors, 'tensor')}, {size(found.bytes)}"
    more = f"stepguard verify {run.subject.checkpoint} lists everything."
    if found.errors:
        return failed(
            f"{said}; {count(len(found.errors), 'problem')}: {first_few(found.errors, 2)}",
            fix=f"Do not resume from it; {more}",
        )
    if found.warnings:
        return warned(f"{said}; {first_few(found.warnings, 2)}", fix=more)
    return passed(f"{said}, whole and finite")


def checkpoint_fits(run: Inspection) -> Answer:
    stored = run.checkpoint
    if not stored.shapes:
        raise NotApplicable(
            f"{stored.path.name} holds no model state that can be read "
            f"({first_few(stored.unread, 1) or 'empty'})"
        )
    # Modules may keep objects that are not tensors in their state (get_extra_state).
    state = run.model.state_dict()
    had = {_bare(name): shape for name, shape in stored.shapes.items()}
    wanted = {_bare(name): tuple(t.shape) for name, t in state.items() if hasattr(t, "shape")}
    said = _listed("missing", sorted(wanted.keys() - had.keys()))
    said += _listed("not in the model", sorted(had.keys() - wanted.keys()))
    other = []
    for name in sorted(wanted.keys() & had.keys()):
        if wanted[name] != had[name]:
            other.append(f"{name} {had[name]} for {wanted[name]}")
    said += _listed("other shape", other, 2)
    if not said:
        return passed(
            f"{count(len(wanted), 'tensor')} of {stored.path.name} match the model in name and "
            "shape"
        )
    return failed(
        *said, fix="Build the model with the settings of the checkpoint; strict=False hides this."
    )


def _bare(name: str) -> str:
    """Without what DistributedDataParallel and torch.compile put before every name."""
    return name.removeprefix("module.").removeprefix("_orig_mod.")


def code_current(run: Inspection) -> Answer:
    now = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "stepguard": __version__,
    }
    said = [", ".join(f"{name} {version}" for name, version in now.items())]
    with suppress(NotGiven):
        times = sorted(run.traced_step.ops.items())
        shown = ", ".join(f"{name} ({number})" for name, number in times)
        said.append(f"the step runs {shown or 'no exponential, logarithm, root or softmax'}")
    other = []
    with suppress(NotGiven):
        for name, then in run.checkpoint.versions.items():
            if str(then) != now.get(name, str(then)):
                other.append(f"{name} {then} -> {now[name]}")
    if not other:
        return passed(*said)
    return warned(
        *said,
        f"since the checkpoint: {', '.join(other)}",
        fix="Resume with the versions of the checkpoint, or start with a short comparison of the "
        "loss.",
    )


# --- Resources: space on the disk for checkpoints, and memory for the step.

KEPT_CHECKPOINTS = 2
"""Kept if the configuration does not say how many."""
TIGHT = 1.5
"""Times what is needed; less free space than that is a warning."""
SLOTS = {
    **dict.fromkeys(["adam", "adamw", "nadam", "radam", "adamax", "adadelta"], 2),
    **dict.fromkeys(["lion", "muon", "adagrad", "rmsprop"], 1),
}
"""Tensors of a parameter's size that an optimizer keeps for each parameter."""


def _bytes_needed(run: Inspection) -> tuple[int, int, int, str]:
    """Bytes of weights, gradients and optimizer state, before they exist, and how known."""

    def total(tensors: Any) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    optimizer = run.subject.optimizer
    weights = total((*run.model.parameters(), *run.model.buffers()))
    gradients = total(p for p in run.model.parameters() if p.requires_grad)
    if optimizer is None:
        return weights, gradients, 2 * gradients, "two moments assumed"
    held = total(run.optimizer_tensors.values())
    if held:
        return weights, gradients, held, "as it is"
    name = type(optimizer).__name__.lower()
    slots = SLOTS.get(name, 0)
    if name in ("sgd", "rmsprop") and optimizer.param_groups[0].get("momentum"):
        slots += 1
    trained = total(
        p for group in optimizer.param_groups for p in group["params"] if p.requires_grad
    )
    return weights, gradients, slots * trained, f"{slots} slots a parameter"


def disk_space(run: Inspection) -> Answer:
    setting = run.setting("run_dir")
    given = run.subject.run_dir or (setting and setting.value)
    if not given:
        raise NotGiven("give --run-dir PATH")
    folder = Path(str(given)).absolute()
    while not folder.exists():
        folder = folder.parent
    weights, _, state, how = _bytes_needed(run)
    keep = int(run.number("keep") or KEPT_CHECKPOINTS)
    # A new checkpoint is written beside those that are kept, before the oldest goes.
    needed = (weights + state) * (max(keep, 1) + 1)
    said = (
        f"one checkpoint {size(weights + state)} (weights {size(weights)}, optimizer "
        f"{size(state)}, {how}); {keep} kept and one being written need {size(needed)}"
    )
    return _judge_space(
        said,
        needed,
        shutil.disk_usage(folder).free,
        "",
        "Keep fewer checkpoints, write to another disk, or free space: a full disk ends a run "
        "while it saves.",
    )


def memory_estimate(run: Inspection) -> Answer:
    weights, gradients, state, how = _bytes_needed(run)
    needed = weights + gradients + state
    free = available_memory(run.device)
    if free is None:
        raise NotGiven(f"the free memory of {run.device.type} is not known to torch")
    said = (
        f"{size(needed)} = weights {size(weights)}, gradients {size(gradients)}, optimizer "
        f"{size(state)} ({how}); a snapshot takes {size(weights + state)} more of the host's "
        "memory; activations come on top"
    )
    return _judge_space(
        said,
        needed,
        free,
        f" on {run.device.type}",
        "A smaller model or optimizer state (8-bit, Adafactor), sharding (FSDP), or a larger "
        "device.",
    )


def _judge_space(said: str, needed: int, free: int, where: str, fix: str) -> Answer:
    evidence = (said, f"{size(free)} free{where}")
    if free < needed:
        return failed(*evidence, fix=fix)
    if free < TIGHT * needed:
        return warned(*evidence, fix=fix)
    return passed(*evidence)


def available_memory(device: torch.device) -> int | None:
    """Free bytes of an accelerator, or of the host for a CPU; None if unknown."""
    if device.type == "meta":
        # Not placed yet: the model will go to the accelerator, if there is one.
        device = torch.accelerator.current_accelerator() or torch.device("cpu")
    if device.type == "cpu":
        return free_memory()
    module = torch.get_device_module(device)
    return int(module.mem_get_info(device)[0]) if hasattr(module, "mem_get_info") else None

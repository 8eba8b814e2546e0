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
from stepguard.check.data import held_out, in_example, rows_of_the_whole, source_of
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
    as_number,
    flat,
    plain,
    unread,
)
from stepguard.check.subject import FINITE_TESTS, NORM_NAMES
from stepguard.diagnose.case import largest
from stepguard.records.codec import NUMBER, UnquotedNumber
from stepguard.report.phrases import count, first_few, size
from stepguard.state.files import free_memory

# --- Items about data: bad, missing, constant or far-off values, repeated examples, and targets.


OUTLIER = 1000.0
"""Times the median example."""
FEWEST = 16
"""With fewer elements or examples a constant or an outlier says nothing."""


def data_finite(run: Inspection) -> Answer:
    bad, scope = run.data.nonfinite, run.data.scope
    if not bad:
        return passed(f"no NaN and no Inf in {scope}", *run.data.remarks)
    return failed(
        f"{count(len(bad), 'place')} in {scope}: {first_few(bad, 4)}",
        fix="Repair or drop these examples. Clean the data before the model, never its "
        "output (0 * NaN is NaN).",
    )


def data_constant(run: Inspection) -> Answer:
    scope = run.data.scope
    names = []
    for key, values in run.data.values.items():
        for name, least, most, elements, is_real in values:
            # Masks and types of tokens are whole numbers, which may all be the same.
            if least == most and elements >= FEWEST and is_real:
                names.append(f"{in_example(name, key)} = {least:g} in all {elements:,} places")
    if not names:
        return passed(f"no constant input in {scope}")
    return warned(
        f"{count(len(names), 'input')} in {scope}: {first_few(names, 4)}",
        fix="Check these files for a failed recording or conversion: a constant input has "
        "no variance.",
    )


def data_range(run: Inspection) -> Answer:
    data, declared = run.data.values, run.subject.data_range
    dtype = "float64"
    with suppress(NotGiven):
        dtype = run.probe.dtype
    outside = [f"data_range names {key!r}, which no example has" for key in declared.keys() - data]
    too_large = []
    outliers = []
    spans = []
    for key, values in data.items():
        low, high = min(value.low for value in values), max(value.high for value in values)
        least, most = declared.get(key, (-math.inf, math.inf))
        sizes = sorted(((max(-v.low, v.high), v.example) for v in values), reverse=True)
        farthest, example = sizes[0]
        if low < least or high > most:
            said = (
                f"{key} spans {low:.4g} to {high:.4g}; the allowed range is {least:g} to {most:g}"
            )
            outside.append(f"{said}; largest in {example}")
        if not values[0].is_real:
            continue
        name = key or "values"
        spans.append(f"{name} {low:.3g} to {high:.3g}")
        if farthest > largest(dtype):
            said = f"{name} {farthest:.4g} in {example} is infinite in {dtype}"
            too_large.append(f"{said}, which the step runs in")
        outliers += _outliers(name, sizes)
    if outside:
        return failed(*outside, fix="Correct the scaling of these examples, or the declared range.")
    if too_large:
        return failed(*too_large, fix="Scale the inputs, or run in bfloat16 or float32.")
    if outliers:
        return warned(
            *outliers[:4], fix="Check these examples for a wrong unit or a corrupt value."
        )
    if not spans:
        raise NotApplicable("the data has no real numbers")
    return passed(first_few(spans, 4))


def _outliers(name: str, sizes: list[tuple[float, str]]) -> list[str]:
    usual = median(size for size, _ in sizes)
    far = [f"{example} ({size:.4g})" for size, example in sizes if size > OUTLIER * usual]
    # If most examples are all 0, any other is infinitely far from the median.
    if not far or not usual or len(sizes) < FEWEST // 2:
        return []
    beyond = f"{len(far)} of {len(sizes)} beyond {OUTLIER:g} x {usual:.3g}, the usual"
    return [f"{name}: {beyond}: {first_few(far, 3)}"]


def data_unreadable(run: Inspection) -> Answer:
    data = run.data
    if data.unreadable:
        return failed(
            f"{count(len(data.unreadable), 'example')} of {data.seen:,}: "
            f"{first_few(data.unreadable, 3)}",
            fix="Restore or drop these files: the run fails when it reaches them.",
        )
    if not data.seen:
        return failed(
            f"the {data.what} gave no example", fix="Give a dataset or path that has examples."
        )
    return passed(f"{data.scope} can be read", *data.remarks)


def data_leak(run: Inspection) -> Answer:
    ours, theirs = run.data.prints, run.validation.prints
    shared = [f"{name} = {ours[key]}" for key, name in theirs.items() if key in ours]
    fix = "Split before augmenting, by source and not by row."
    rows = [rows_of_the_whole(one) for one in (source_of(run.subject), held_out(run.subject))]
    # augmentation changes the values of a row, and not its index
    if rows[0] is not None and rows[1] is not None and rows[0][0] is rows[1][0]:
        both = sorted(set(rows[0][1]) & set(rows[1][1]), key=str)
        if len(both) > len(shared):
            named = first_few([str(index) for index in both], 4)
            return failed(
                f"{count(len(both), 'row')} of {len(rows[1][1]):,} in the validation data are "
                f"training rows of the same data set: {named}",
                fix=fix,
            )
    of = f"of {run.validation.seen:,}"
    if not shared:
        return passed(f"none {of} validation examples is among {run.data.seen:,} training examples")
    said = (
        f"{count(len(shared), 'example')} {of} in the validation data are training examples: "
        f"{first_few(shared, 4)}"
    )
    # data of few values has equal rows anyway
    usual = 1.0 - len(ours) / max(run.data.seen, 1)
    if len(shared) <= 2.0 * usual * run.validation.seen:
        return warned(
            said, f"{usual:.0%} of the training examples repeat another one as well", fix=fix
        )
    return failed(said, fix=fix)


# --- Targets.


def labels_empty(run: Inspection) -> Answer:
    data = run.data
    if not data.targets:
        usual = "key labels, label, target or y, nor in the last part of a tuple"
        key = f"key {run.subject.label_key!r}" if run.subject.label_key else usual
        raise NotApplicable(f"no integer targets under the {key}; --label-key names another")
    share = f"{data.supervised:,} of {data.targets:,} targets count"
    if not data.empty:
        return passed(f"each of {data.scope} has a target that counts; {share}")
    return failed(
        f"{count(len(data.empty), 'example')} of {data.seen:,} without a target other "
        f"than {run.subject.ignore_index}: {first_few(data.empty)}",
        share,
        fix="Drop these examples before batching, or truncate the prompt and keep the answer "
        "(truncation_side='left'); see `stepguard explain SG102`.",
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
            rates = []
            if run.subject.optimizer is not None and run.setting("lr") == leaf:
                rates = peak_rates(run.optimizer)
            became = any(math.isclose(float(leaf.value), rate, rel_tol=1e-3) for rate in rates)
            if not became and not run.project.mentions & {"omegaconf", "hydra"}:
                doubtful.append(f"{leaf.key}: {leaf.value}")
        elif NUMBER.fullmatch(leaf.value):
            numbers.append(f"{leaf.key}: {leaf.value!r}")
        # Only these: a `no` in quotes is often the name of a strategy.
        elif leaf.value.strip().lower() in ("true", "false"):
            switches.append(f"{leaf.key}: {leaf.value!r}")
    said = [
        *_listed("a number for YAML 1.2 and OmegaConf, but text for PyYAML", doubtful),
        *_listed("numbers in quotes", numbers),
        *_listed("read as text, and any non-empty text is true", switches),
    ]
    if numbers or switches:
        return failed(*said, fix="Write numbers, true and false without quotes.")
    if doubtful:
        return warned(
            *said, fix="Write 1.0e-4 instead of 1e-4: every reader takes it for a number."
        )
    return passed(f"{count(len(leaves), 'value')}, no number or switch written as text")


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
    return passed(f"{count(len(leaves), 'value')} within the possible range")


def _unused(run: Inspection) -> list[str]:
    """Keys that the program has not taken, and that its source does not name (a training loop)."""
    if run.tracked is None:
        raise NotGiven("give --config FILE, and TARGET as module:function whose function takes it")
    left = unread(run.tracked)
    return [key for key in left if key.rpartition(".")[2] not in run.project.mentions]


def config_unread(run: Inspection) -> Answer:
    unused = _unused(run)
    total = len(list(flat(plain(run.tracked))))
    if not unused:
        return passed(f"{count(total, 'key')}, each read or named in the source")
    return warned(
        f"{count(len(unused), 'key')} of {total} not read, nor named in "
        f"{count(run.project.files, 'source file')}: {first_few(unused)}",
        fix="Remove them, or correct their names: changing them has no effect.",
    )


def config_changed(run: Inspection) -> Answer:
    new = dict(flat(run.needed_config()))
    stored = run.checkpoint
    old = dict(flat(stored.config))
    if not old:
        raise NotApplicable("the checkpoint holds no configuration that can be read")
    differences = []
    for key in sorted(new.keys() & old.keys()):
        same = _comparable(old[key]) == _comparable(new[key])
        if not same and not Setting(key, None).means("of_one_start"):
            differences.append(f"{key}: {old[key]!r} -> {new[key]!r}")
    said = _listed("changed", differences, 8)
    said += _listed("only in the checkpoint", sorted(old.keys() - new.keys()))
    said += _listed("new", sorted(new.keys() - old.keys()))
    if not said:
        return passed(f"{count(len(new), 'value')}, the same as in the checkpoint")
    return warned(
        *said,
        fix="Make sure that each change is intended, and that loading the checkpoint does not undo "
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
    for name, meaning in (("gradient_accumulation_steps", "accumulation"), ("num_processes", "")):
        asked = as_number(launcher.values.get(name))
        setting = run.setting(meaning) if meaning else None
        real = run.framework.facts.get(name)
        others = {f"configured {setting}": setting and as_number(setting.value)}
        others[f"the object in the program has {real}"] = as_number(real)
        for said, value in others.items():
            if asked is not None and value is not None:
                (good if asked == value else bad).append(f"{launcher.said[name]}, {said}")
    if bad:
        return failed(
            *bad,
            fix="Set the value in one place, or set both to the same value; the program's "
            "value wins.",
        )
    return passed(*(good or [f"nothing contradicts {', '.join(launcher.said.values())}"]))


def checklist_accumulation(run: Inspection) -> Answer:
    setting = run.setting("accumulation")
    real = as_number(run.framework.facts.get("gradient_accumulation_steps"))
    with suppress(NotGiven):
        if setting and real is None and setting.key in _unused(run):
            return warned(f"nothing reads {setting}", fix="Use it in the loop, or remove it.")
    steps = int(run.number("accumulation") or real or 1)
    if steps == 1:
        raise NotApplicable("no accumulation is configured: every batch is a step")
    usual = "within" if 2 <= steps <= 4 else "outside"
    return passed(
        f"{steps} micro-batches a step, {usual} the usual 2 to 4; this enlarges the batch, not "
        "the memory"
    )


# --- What the program does, from its guard, its configuration and its source.

LARGEST_CLIP = 0.5
RAREST_CHECKPOINTS = 1000


def _guarded_or_configured(run: Inspection, name: str, meaning: str) -> tuple[float | None, str]:
    """A number of the returned GuardConfig, else of the configuration, and which names it."""
    value = getattr(run.guard, name, None)
    if value is not None:
        return float(value), f"GuardConfig.{name}={value:.12g}"
    return run.number(meaning), str(run.setting(meaning))


def checklist_clip(run: Inspection) -> Answer:
    value, said = _guarded_or_configured(run, "clip_norm", "clip")
    place = ""
    if value is None and run.subject.script is not None:
        place = run.program.places.get("clipping", "")
        value = run.program.clip
        said = f"the program clips at {place}" + ("" if value is None else f" to {value:g}")
    if not place and (value or 0) <= 0:
        if run.subject.config is None and run.guard is None and run.subject.script is None:
            raise NotGiven("give TARGET as module:function, --config FILE, or return `guard`")
        return warned(
            "no clipping norm is configured, and the program does not clip",
            fix=f"GuardConfig(clip_norm={LARGEST_CLIP}), or clip_grad_norm_(model.parameters(), "
            f"{LARGEST_CLIP}) before optimizer.step().",
        )
    if value is None:
        return passed(f"{said}, to a norm that is not a literal number")
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
    if run.guarded_at:
        return passed(
            f"stepguard reads the loss and every gradient of each step ({run.guarded_at})"
        )
    tests = {name: at for name, at in run.program.places.items() if name in FINITE_TESTS}
    said = ", ".join(f"{name} at {place}" for name, place in tests.items())
    if "isfinite" in tests or {"isnan", "isinf"} <= tests.keys():
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
    if run.guarded_at:
        return passed(f"stepguard records the norm of every step ({run.guarded_at})")
    for name in NORM_NAMES:
        if name in run.program.places:
            return passed(f"{name} at {run.program.places[name]}")
    return warned(
        f"no gradient norm is computed in {count(run.program.files, 'source file')}",
        fix="guard = stepguard.watch(model, optimizer) records it; clip_grad_norm_ returns it.",
    )


def checklist_checkpoints(run: Inspection) -> Answer:
    every, said = _guarded_or_configured(run, "checkpoint_every", "save_every")
    if every is None and run.subject.config is None and run.guard is None:
        raise NotGiven("give --config FILE, or return `guard`")
    fix = f"checkpoint_every={RAREST_CHECKPOINTS} or less."
    if every is None or every <= 0:
        return warned("no interval between checkpoints is configured", fix=fix)
    said += f": a crash costs at most {int(every):,} steps"
    if run.steps:
        said += f" of {run.steps:,}"
    if every <= min(RAREST_CHECKPOINTS, run.steps or math.inf):
        return passed(said)
    return warned(said, fix=fix)


def checklist_recovery(run: Inspection) -> Answer:
    actions = list(map(str, run.guard.policy.actions)) if run.guard is not None else []
    if actions and "rewind" not in actions:
        return warned(
            f"the policy is {', '.join(actions)}, without rewind",
            fix="Add 'rewind' to Policy.actions.",
        )
    if not run.guarded_at:
        return warned(
            "no automatic rewind to a good state was found in "
            f"{count(run.program.files, 'source file')}",
            fix="guard = stepguard.Guard(model, optimizer, config=GuardConfig(run_dir=..., "
            "checkpoint_every=1000)).",
        )
    kept = getattr(run.guard, "run_dir", None) or run.subject.run_dir
    where = f", checkpoints below {kept}" if kept else ""
    return passed(f"a guard rewinds automatically ({run.guarded_at}){where}")


# --- The checkpoint: complete and finite, and written by the code that would run now.


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
    return passed(f"{said}, complete and finite")


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
        fix="Resume with the checkpoint's versions, or compare the loss over a few steps first.",
    )


# --- Resources: space on the disk for checkpoints, and memory for the step.

SLOTS = {
    **dict.fromkeys(["adam", "adamw", "nadam", "radam", "adamax", "adadelta"], 2),
    **dict.fromkeys(["lion", "adagrad", "rmsprop"], 1),
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
    slots = SLOTS.get(name, 0) + bool(optimizer.param_groups[0].get("momentum"))
    return weights, gradients, slots * gradients, f"{slots} slots a parameter"


def disk_space(run: Inspection) -> Answer:
    setting = run.setting("run_dir")
    given = run.subject.run_dir or (setting and setting.value)
    if not given:
        raise NotGiven("give --run-dir PATH")
    folder = Path(str(given)).absolute()
    while not folder.exists():
        folder = folder.parent
    weights, _, state, how = _bytes_needed(run)
    # Two are kept where the configuration does not say how many
    keep = int(run.number("keep") or 2)
    # A new checkpoint is written beside those that are kept, before the oldest goes.
    needed = (weights + state) * (max(keep, 1) + 1)
    free = shutil.disk_usage(folder).free
    return _judge_space(
        needed,
        free,
        f"one checkpoint {size(weights + state)} (weights {size(weights)}, optimizer "
        f"{size(state)}, {how}); {keep} kept and one being written need {size(needed)}",
        f"{size(free)} free",
        fix="Keep fewer checkpoints, write to another disk, or free space: on a full disk "
        "the run fails while it saves.",
    )


def memory_estimate(run: Inspection) -> Answer:
    weights, gradients, state, how = _bytes_needed(run)
    needed = weights + gradients + state
    free = available_memory(run.device)
    if free is None:
        raise NotGiven(f"the free memory of {run.device.type} is not known to torch")
    return _judge_space(
        needed,
        free,
        f"{size(needed)} = weights {size(weights)}, gradients {size(gradients)}, optimizer "
        f"{size(state)} ({how}); a snapshot takes {size(weights + state)} more of the "
        "host's memory; activations are not included",
        f"{size(free)} free on {run.device.type}",
        fix="A smaller model or optimizer state (8-bit, Adafactor), sharding (FSDP), or a larger "
        "device.",
    )


def _judge_space(needed: int, free: int, *evidence: str, fix: str) -> Answer:
    if free < needed:
        return failed(*evidence, fix=fix)
    # Less than half as much again as is needed is tight
    if free < 1.5 * needed:
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

"""The configuration: types, values, unread keys, changes since the checkpoint, and the launcher."""

from __future__ import annotations

import math
from typing import Any

from stepguard.preflight.inspection import Inspection, item
from stepguard.preflight.settings import (
    Setting,
    UnquotedNumber,
    as_number,
    flat,
    last_part,
    names,
    spells_number,
)
from stepguard.preflight.subject import (
    Answer,
    NotApplicable,
    NotGiven,
    failed,
    listed,
    passed,
    peak_rates,
    plain,
    unread,
    warned,
)
from stepguard.report.phrases import count, first_few

SWITCHES = ("true", "false")
"""Only these: a `no` in quotes is often the name of a strategy."""
TEXTS = names("mixed_precision precision save_strategy eval_strategy version id name seed_name tag")
"""Last parts of keys that are texts by right: `mixed_precision: "no"`, `precision: "16"`."""
POSITIVE = names(
    "lr learning_rate max_lr peak_lr base_lr init_lr batch_size train_batch_size "
    "gradient_accumulation_steps eps adam_epsilon epochs num_epochs num_train_epochs hidden_size "
    "num_layers"
)
"""Keys that must be above 0."""
SHARES = names("beta1 beta2 adam_beta1 adam_beta2 dropout ema_decay momentum label_smoothing")
"""Keys that must lie in [0, 1]."""
DIFFERENT_EVERY_START = names(
    "output_dir run_dir logging_dir resume resume_from_checkpoint checkpoint run_name"
)
"""Keys that differ between any two starts of one run."""


@item("config.types", "numbers are numbers")
def types(run: Inspection) -> Answer:
    leaves = list(flat(run.needed_config()))
    numbers = []
    doubtful = []
    switches = []
    for leaf in leaves:
        if not isinstance(leaf.value, str) or leaf.key.rpartition(".")[2] in TEXTS:
            continue
        if spells_number(leaf.value):
            if isinstance(leaf.value, UnquotedNumber):
                if not _became_a_number(run, leaf):
                    doubtful.append(f"{leaf.key}: {leaf.value}")
            else:
                numbers.append(f"{leaf.key}: {leaf.value!r}")
        elif leaf.value.strip().lower() in SWITCHES:
            switches.append(f"{leaf.key}: {leaf.value!r}")
    said = []
    if doubtful:
        said.append(
            f"a number for YAML 1.2 and OmegaConf, but text for PyYAML: {first_few(doubtful, 4)}"
        )
    if numbers:
        said.append(f"numbers in quotes: {first_few(numbers, 4)}")
    if switches:
        said.append(f"read as text, and every text is true: {first_few(switches, 4)}")
    if numbers or switches:
        return failed(*said, fix="Write numbers, true and false without quotes.")
    if doubtful:
        return warned(
            *said, fix="Write 1.0e-4 instead of 1e-4, which every reader takes for a number."
        )
    return passed(f"{len(leaves)} values, none of them a number or switch in disguise")


def _became_a_number(run: Inspection, leaf: Setting) -> bool:
    """Does the program read such a text as a number? OmegaConf does, and the optimizer shows it."""
    if run.program.imports & {"omegaconf", "hydra"}:
        return True
    if run.subject.optimizer is None or run.setting("lr") != leaf:
        return False
    wanted = as_number(leaf.value)
    return wanted is not None and any(
        math.isclose(rate, wanted, rel_tol=1e-3) for rate in peak_rates(run.subject.optimizer)
    )


@item("config.values", "values are possible")
def values(run: Inspection) -> Answer:
    leaves = list(flat(run.needed_config()))
    wrong = list(filter(None, map(_impossible, leaves)))
    if wrong:
        return failed(first_few(wrong, 4), fix="Correct these values.")
    return passed(f"{len(leaves)} values within what they can be")


def _impossible(leaf: Setting) -> str:
    """Say what is wrong with a value; empty if nothing is."""
    if isinstance(leaf.value, float) and math.isnan(leaf.value):
        return f"{leaf.key} is NaN"
    value = as_number(leaf.value)
    if value is None:
        return ""
    name = last_part(leaf.key)
    if name in POSITIVE and value <= 0:
        return f"{leaf} must be above 0"
    if name in SHARES and not 0 <= value <= 1:
        return f"{leaf} must lie between 0 and 1"
    return ""


@item("config.unread", "every key of the configuration is read", last=True)
def unread_keys(run: Inspection) -> Answer:
    """A key counts as read if the program took it, or if its source names it (a training loop)."""
    tracked = run.context.tracked
    if tracked is None:
        raise NotGiven(run.context.why_untracked)
    total = len(list(flat(plain(tracked))))
    left = unread(tracked)
    nowhere = [key for key in left if key.rpartition(".")[2] not in run.project.mentions]
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


@item("config.changed", "the configuration equals the checkpoint's")
def changed(run: Inspection) -> Answer:
    now = run.needed_config()
    stored = run.checkpoint
    if not stored.config:
        raise NotApplicable(f"{stored.path.name} holds no configuration that can be read")
    new = dict(flat(now))
    old = dict(flat(stored.config))
    differences = []
    for key in sorted(new.keys() & old.keys()):
        if key.rpartition(".")[2] not in DIFFERENT_EVERY_START and not _same(old[key], new[key]):
            differences.append(f"{key}: {old[key]!r} -> {new[key]!r}")
    said = listed("changed", differences, 8)
    said += listed("only in the checkpoint", sorted(old.keys() - new.keys()))
    said += listed("new", sorted(new.keys() - old.keys()))
    if not said:
        return passed(f"{len(new)} values equal those stored in {stored.path.name}")
    return warned(
        *said,
        fix="Make sure that each change is meant, and that loading the checkpoint does not undo "
        "it.",
    )


def _same(first: Any, second: Any) -> bool:
    """Equal as a setting: 1 is 1.0 is "1", and a tuple is a list."""
    if type(first) is not type(second) and as_number(first) is not None:
        return as_number(first) == as_number(second)
    if isinstance(first, tuple | list) and isinstance(second, tuple | list):
        return list(first) == list(second)
    return bool(first == second)


@item("launcher.agrees", "launcher and program agree")
def launcher_agrees(run: Inspection) -> Answer:
    if not run.launcher:
        raise NotGiven("give --launcher FILE, or start the check the way the run is started")
    good: list[str] = []
    bad: list[str] = []
    for text, same in _comparisons(run):
        if same:
            good.append(text)
        else:
            bad.append(text)
    if bad:
        return failed(
            *bad, fix="Leave the value to one place, or set both alike; the program's own wins."
        )
    if good:
        return passed(*good)
    shown = ", ".join(run.launcher.said(name) for name in run.launcher.values)
    return passed(f"nothing contradicts {shown}")


def _comparisons(run: Inspection) -> list[tuple[str, bool]]:
    """Every value that the launcher and the program both have: a sentence, and if they agree."""
    found = []
    asked = run.launcher.number("gradient_accumulation_steps")
    configured = run.number("accumulation")
    if asked is not None and configured is not None:
        said = run.launcher.said("gradient_accumulation_steps")
        found.append((f"{said}, configured {run.setting('accumulation')}", asked == configured))
    for name in ("gradient_accumulation_steps", "num_processes"):
        asked = run.launcher.number(name)
        real = run.framework.facts.get(name)
        if asked is not None and isinstance(real, int):
            said = f"{run.launcher.said(name)}, the object in the program has {real}"
            found.append((said, asked == real))
    return found

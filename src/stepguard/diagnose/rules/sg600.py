"""SG601 to SG603: stored state that was bad before the step. SG701 to SG705: ranks, hardware and
the compiler. SG801 to SG803: configuration.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stepguard.diagnose.case import NARROW, Case, plain
from stepguard.diagnose.rule import Found, Proof, certain, likely, possible, rule, spell
from stepguard.diagnose.rules.sg500 import above_configured

# --- Stored state.


@rule()
def sg601(case: Case) -> Found:
    """A parameter was bad before the step."""
    evidence = case.evidence
    first_step = case.facts.committed == 0 or case.reading.step == 0
    bad = case.bad_operand
    huge = evidence.huge_parameter is not None
    stored = evidence.huge_parameter or case.tensor or case.stored("param:")
    fields = {
        "name": stored.partition(":")[2],
        "first_step": first_step,
        "step_before": case.reading.step - 1,
        # some elements are fine: it was filled, and then damaged or loaded that way
        "partly": bad is not None and bad.min is not None and not huge,
    }
    if evidence.uninitialised:
        # the memory itself was seen; which parameter or table should have filled it was not
        return likely("uninitialised", **fields)
    if huge and case.facts.committed == 0:
        return certain("huge", **fields)
    which = case.stored("param:")
    before = not case.reading.state_born and case.phase in ("", "state")
    if which and before:
        return _bad_parameter(case, which, fields)
    return None


def _bad_parameter(case: Case, which: str, fields: dict[str, Any]) -> Proof:
    count = sum(name.startswith("param:") for name in case.reading.bad_state)
    # bad optimizer state makes bad parameters with the next update: then SG503 knows more
    by_optimizer = any(name.startswith("opt:") for name in case.reading.bad_state)
    prove = likely if by_optimizer and not fields["first_step"] else certain
    return prove("not finite", which=which, several=count > 1, count=count, **fields)


@rule()
def sg602(case: Case) -> Found:
    """A buffer is NaN or Inf, or finite garbage that overflows what is computed with it."""
    evidence = case.evidence
    if evidence.attribute is not None and evidence.constant is not None:
        # a tensor that a module keeps as a plain attribute: it is neither saved nor restored
        owner, _, name = evidence.attribute.rpartition(".")
        label = f"self.{name}"
        shown = [replace(operand, label=label) for operand in case.inputs if not operand.finite]
        return certain("attribute", owner=owner, name=name, shown=shown)
    return _bad_buffer(case)


def _bad_buffer(case: Case) -> Found:
    evidence = case.evidence
    which = case.stored("buffer:")
    path = (case.tensor or which).partition(":")[2]
    module, _, name = path.rpartition(".")
    fields = {"path": path, "module": module, "running": name.startswith("running_")}
    if evidence.huge_buffer is not None:
        # finite values that no buffer holds on purpose, as memory that nobody filled does
        known = tuple(one for one in case.inputs if one.name == evidence.huge_buffer)
        in_norm = case.reading.grads_finite and case.loss_finite
        return likely("huge", known=known, in_norm=in_norm, **fields)
    if not which or (not case.tensor and case.phase not in ("", "state")):
        return None
    # what the model itself writes into a buffer has a cause of its own; torch writes statistics
    statistics = "running_" in which
    made_here = case.reading.state_born and case.where.op and not statistics
    hidden = statistics and case.loss_finite
    bad = case.bad_operand
    named = None if bad is None else replace(bad, label=which)
    prove = possible if made_here else certain
    return prove("not finite", which=which, hidden=hidden, named=named, **fields)


@rule(shown_by="record")
def sg603(case: Case) -> Found:
    """A checkpoint that must not be used."""
    if case.phase == "checkpoint":
        return certain("checkpoint")
    # state that was loaded in this process and is bad before its first step
    fresh = case.facts.resumed and (case.facts.just_loaded or case.facts.committed == 0)
    if not fresh or case.phase != "state" or not case.tensor or case.reading.state_born:
        return None
    return likely("loaded")


# --- Ranks, hardware and the compiler.


@rule(shown_by="record")
def sg701(case: Case) -> Found:
    """One rank made it, all ranks have it."""
    ranks = case.reading.bad_ranks
    # the size of the world is not known after the fact, but a rank number bounds it from below
    world = max(case.facts.world_size, max(ranks, default=0) + 1)
    if not ranks or world < 2 or len(ranks) >= world:
        return None
    # where the place is known, its cause says more than the rank
    prove = possible if case.operated else likely
    return prove(world=world)


@rule(shown_by="inference")
def sg702(case: Case) -> Found:
    """The replay of the bad step is clean."""
    evidence = case.evidence
    if case.where.reproduced is not False or evidence.compiled_only:
        return None
    if case.phase in ("input", "state", "checkpoint"):
        return None
    if case.impure:
        # the second call of the loss function was not the first: nothing else need be wrong
        shown = evidence.different_losses is not None or evidence.departs is not None
        return likely("not a function", shown=shown, losses=evidence.different_losses or ())
    different = evidence.same_bits is False
    return certain("transient", different=different, bad_grads=case.reading.bad_grads[:3])


@rule(shown_by="record")
def sg703(case: Case) -> Found:
    """Only the compiled graph makes it."""
    # inductor fuses and reorders, so its rounding and its masks may differ from eager's
    if case.evidence.compiled_only:
        return certain()
    return None


@rule(shown_by="record")
def sg704(case: Case) -> Found:
    """Copies of one model no longer hold the same weights, or are not updated alike."""
    if case.verdict.kind != "replica_drift":
        return None
    agree = str(case.said.get("agree") or "")
    # the first rank of the majority, to copy the weights from
    return certain(agree=agree, nobody=not agree, source=agree.partition(",")[0] or "0")


@rule(shown_by="record")
def sg705(case: Case) -> Found:
    """Two ranks train on the same samples."""
    if case.verdict.kind == "same_data":
        return certain()
    return None


# --- Configuration.


@rule(shown_by="record")
def sg801(case: Case) -> Found:
    """Precision settings that contradict each other."""
    facts = case.facts
    autocast = plain(case.evidence.autocast or "")
    traced = case.where.method == "replay" and bool(case.where.op)
    # the launcher asks for one precision, and the replay has seen another
    wanted = plain(facts.configured_dtype or "")
    real = autocast or "float32"
    disagrees = wanted not in ("", real)
    unscaled = autocast in NARROW and facts.scaling == "none"
    # GradScaler.unscale_ raises on float16 gradients: it expects float32 weights under autocast
    half = tuple(name for name in facts.param_dtypes if plain(name) in NARROW)
    if facts.scaling != "dynamic":
        half = ()
    if not (disagrees and traced) and not unscaled and not half:
        return None
    prove = likely if case.origin is None and not case.verdict.bad else possible
    fields = {"traced": traced, "disagrees": disagrees, "unscaled": unscaled}
    return prove(wanted=wanted, real=real, half=half, **fields)


@rule(shown_by="record")
def sg802(case: Case) -> Found:
    """Loading state brought an old learning rate back."""
    rates = []
    lines = []
    changes = []
    for rise in above_configured(case, climbing=True):
        group, configured, now = rise.group, spell(rise.before), spell(rise.now)
        rates.append(f"group {group} is configured with lr {configured} but runs with {now}")
        lines.append(f'optimizer.param_groups[{group}]["lr"] = {rise.before!r}')
        changes.append(f"{configured} for group {group} (it runs with {now})")
    mismatch = case.verdict.kind == "lr_mismatch"
    if not case.facts.resumed or not (rates or mismatch):
        return None
    prove = certain if mismatch else possible
    return prove(rates=tuple(rates), lines="\n".join(lines), changes=tuple(changes))


@rule(shown_by="record")
def sg803(case: Case) -> Found:
    """Nothing is learned."""
    if case.verdict.kind not in ("zero_loss", "no_labels"):
        return None
    return certain(no_label=case.reading.labels == 0)

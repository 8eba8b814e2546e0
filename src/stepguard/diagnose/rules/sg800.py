"""SG801 to SG803: configuration."""

from __future__ import annotations

from stepguard.diagnose.case import NARROW, Case, plain
from stepguard.diagnose.rule import Proof, certain, likely, possible, rule, spell
from stepguard.diagnose.rules.sg500 import above_configured


@rule(shown_by="record")
def sg801(case: Case) -> Proof | None:
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
def sg802(case: Case) -> Proof | None:
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
def sg803(case: Case) -> Proof | None:
    """Nothing is learned."""
    if case.verdict.kind not in ("zero_loss", "no_labels"):
        return None
    return certain(no_label=case.reading.labels == 0)

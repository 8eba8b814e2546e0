"""SG801: precision settings that contradict each other."""

from __future__ import annotations

from stepguard.diagnose.case import NARROW, Case, plain
from stepguard.diagnose.rule import Proof, Rule, certain, likely, possible, spell
from stepguard.diagnose.trends import ABOVE_CONFIGURED

# --- SG801: precision settings that contradict each other.


def recognise_sg801(case: Case) -> Proof | None:
    sentences = (_disagrees(case), _unscaled(case), _half_weights(case))
    if not any(sentences):
        return None
    alone = case.origin is None and not case.verdict.bad
    if alone:
        return likely(*sentences)
    return possible(*sentences)


def _disagrees(case: Case) -> str:
    """The launcher asks for one precision, and the replay has seen another."""
    wanted = plain(case.facts.configured_dtype or "")
    traced = case.origin is not None and case.origin.method == "replay" and bool(case.origin.op)
    real = plain(case.evidence.autocast or "float32")
    if not wanted or not traced or wanted == real:
        return ""
    return f"{wanted} is configured, but inside the step autocast gives {real}"


def _unscaled(case: Case) -> str:
    real = plain(case.evidence.autocast or "")
    if real not in NARROW or case.facts.scaling != "none":
        return ""
    return f"autocast runs in {real} without a loss scale: gradients below 6e-08 are 0"


def _half_weights(case: Case) -> str:
    # GradScaler.unscale_ raises on float16 gradients: it expects float32 weights under autocast
    half = [name for name in case.facts.param_dtypes if plain(name) in NARROW]
    if not half or case.facts.scaling != "dynamic":
        return ""
    return (
        f"parameters are {', '.join(half)} under a GradScaler, which refuses to unscale "
        f"half-precision gradients"
    )


SG801 = Rule(code="SG801", recognise=recognise_sg801, shown_by="record")


# --- SG802: loading state brought an old learning rate back.


def recognise_sg802(case: Case) -> Proof | None:
    if not case.facts.resumed:
        return None
    rates = _rates_above_configured(case)
    mismatch = case.verdict.kind == "lr_mismatch"
    if not rates and not mismatch:
        return None
    loaded = (
        "optimizer or scheduler state was loaded in this process: it carries the old run's rates"
    )
    prove = possible
    if mismatch:
        prove = certain
    return prove(*rates, case.verdict.summary, loaded)


def _rates_above_configured(case: Case) -> list[str]:
    pairs = zip(case.facts.configured_lr, case.reading.lr, strict=False)
    sentences = []
    for group, (allowed, rate) in enumerate(pairs):
        if allowed > 0 and rate > ABOVE_CONFIGURED * allowed:
            sentences.append(
                f"group {group} is configured with lr {spell(allowed)} but runs with {spell(rate)}"
            )
    return sentences


SG802 = Rule(code="SG802", recognise=recognise_sg802, shown_by="record")


# --- SG803: nothing is learned.


def recognise_sg803(case: Case) -> Proof | None:
    if case.verdict.kind not in ("zero_loss", "no_labels"):
        return None
    labels = ""
    if case.reading.labels == 0:
        labels = "0 targets of this step count"
    zero = f"loss is {spell(case.reading.loss)}, gradient norm is {spell(case.reading.grad_norm)}"
    return certain(labels, zero, case.verdict.summary)


SG803 = Rule(code="SG803", recognise=recognise_sg803, shown_by="record")

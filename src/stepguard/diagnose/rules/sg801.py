"""SG801: precision settings that contradict each other."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.dtypes import NARROW, plain
from stepguard.diagnose.rule import Proof, Rule, likely, possible


def recognise(case: Case) -> Proof | None:
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


RULE = Rule(code="SG801", recognise=recognise, shown_by="record")

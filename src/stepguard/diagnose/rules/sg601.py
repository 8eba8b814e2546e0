"""SG601: a parameter was bad before the step."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, code, prose
from stepguard.diagnose.wording import at_index, counts
from stepguard.records import Remedy


def _evidence(case: Case) -> Proof | None:
    if case.evidence.uninitialised:
        text = f"{case.place} read memory that torch.empty left uninitialised"
        return Proof(confidence=0.95, evidence=(text, _amount(case)))
    if case.evidence.huge_parameter and case.facts.committed == 0:
        text = f"`{case.evidence.huge_parameter}` holds values of 1e15 and more before the first update"
        more = (
            f"{case.place} overflowed on it; no initialisation gives such values, memory that "
            f"nobody filled does"
        )
        return Proof(confidence=0.93, evidence=(text, more))
    stored = [name for name in case.reading.bad_state if name.startswith("param:")]
    named = case.tensor.startswith("param:") and case.phase == "state"
    if case.reading.state_born or not (
        named or (stored and (case.origin is None or case.phase == "state"))
    ):
        return None
    if not named and case.tensor and not case.tensor.startswith("param:"):
        return None
    which = case.tensor if named else stored[0]
    early = case.facts.committed == 0 or case.reading.step == 0
    when = (
        "before the first step: it was never initialised, or loaded that way"
        if early
        else "before this step"
    )
    more = f"{len(stored)} parameters are non-finite in all" if len(stored) > 1 else ""
    by_optimizer = not early and any(name.startswith("opt:") for name in case.reading.bad_state)
    confidence = 0.9 if by_optimizer else 0.96
    return Proof(
        confidence=confidence, evidence=(f"`{which}` was non-finite {when}", _amount(case), more)
    )


def _amount(case: Case) -> str:
    bad = next((o for o in (*case.inputs, case.output) if o is not None and not o.finite), None)
    if bad is None:
        return ""
    kinds = ", ".join(
        part for part in (counts(bad, kind) for kind in ("nan", "posinf", "neginf")) if part
    )
    return (
        f"it holds {kinds}, the first{at_index(bad)}"
        if bad.index is not None
        else f"it holds {kinds}"
    )


RULE = Rule(
    code="SG601",
    title="uninitialised or corrupted parameter",
    what=prose(
        """
        A parameter held NaN, Inf or absurdly large values before the step began: neither this batch nor this
        update made them.
        """
    ),
    why=prose(
        """
        torch.empty was never filled (a custom layer, a resized embedding, a meta-device load with missing
        keys): the memory then holds whatever was there, and some runs work. Or an earlier bad update, a
        damaged checkpoint or an in-place edit left it so.
        """
    ),
    how=prose(
        """
        Parameters are scanned at the first step and whenever something is wrong. The rule fires when one is
        non-finite although this step's update has not run, or when an operation overflows on one that reaches
        1e15 before the first update.
        """
    ),
    evidence=_evidence,
    remedies=(
        Remedy(
            title="Initialise every parameter explicitly",
            snippet=code(
                """
                background = torch.nn.Parameter(torch.empty(4))
                torch.nn.init.normal_(background, std=0.02)
                loss = (x + background).pow(2).mean()
                """
            ),
        ),
        Remedy(
            title="Check what was loaded: no key may be missing, nothing may be non-finite",
            snippet=code(
                """
                background = torch.nn.Parameter(torch.zeros(4))
                holder = torch.nn.ParameterDict({'background': background})
                report = holder.load_state_dict({'background': torch.ones(4)}, strict=True)
                assert not report.missing_keys and all(p.isfinite().all() for p in holder.values())
                loss = (x + background).pow(2).mean()
                """
            ),
        ),
    ),
    setup=code(
        """
        import torch

        x = torch.randn(3, 4)
        torch.use_deterministic_algorithms(True)  # fills uninitialised memory with NaN: the bug shows every time
        """
    ),
    bad=code(
        """
        background = torch.nn.Parameter(torch.empty(4))
        loss = (x + background).pow(2).mean()
        """
    ),
    see=(
        "sauradip/STALE#16",
        "gordicaleksa/pytorch-GAT#11",
        "kmkurn/pytorch-crf#1",
    ),
)

"""SG503: the optimizer's own state is NaN or Inf."""

from __future__ import annotations

from dataclasses import replace

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import PLAUSIBLE, Proof, Rule, code, prose
from stepguard.diagnose.rules.sg504 import FINITE_ANOMALIES
from stepguard.diagnose.wording import describe
from stepguard.records import Remedy

MEMORY = 100.0
"""Steps that a momentum without a decay of its own is taken to remember."""


def _evidence(case: Case) -> Proof | None:
    proof = _not_finite(case) or _without_squares(case)
    outlier = _outlier(case)
    if proof is not None and outlier:
        return replace(proof, evidence=(*proof.evidence, outlier))
    return proof or _after_outlier(case, outlier)


def _outlier(case: Case) -> str:
    """A committed outlier still weighs in the second moment for some 1 / (1 - beta2) steps."""
    if case.facts.outlier is None:
        return ""
    step, name, times = case.facts.outlier
    memory = (
        1.0 / (1.0 - max(case.facts.betas))
        if case.facts.betas and max(case.facts.betas) < 1.0
        else MEMORY
    )
    if not 0 < case.reading.step - step <= memory:
        return ""
    return (
        f"moments poisoned by step {step}: the gradient of `{name}` was {times:.3g} times its "
        f"usual largest"
    )


def _after_outlier(case: Case, outlier: str) -> Proof | None:
    """Finite, and worse since: the outlier is still part of every update."""
    if not outlier or case.verdict.kind not in FINITE_ANOMALIES:
        return None
    why = (
        "an update divides by the root of the second moment, which keeps the outlier while the "
        "first one forgets it"
    )
    return Proof(confidence=0.6, evidence=(case.verdict.summary, outlier, why))


def _without_squares(case: Case) -> Proof | None:
    """Finite, and yet no state that training can lead to."""
    lost = case.facts.lost_squares
    if not lost or case.verdict.kind not in FINITE_ANOMALIES:
        return None
    text = (
        f"{lost} element{'s' if lost > 1 else ''} of exp_avg {'have' if lost > 1 else 'has'} an "
        f"exp_avg_sq of exactly 0"
    )
    why = (
        "such an element moves by lr * exp_avg / eps; squares below 6e-08 vanish in a float16 "
        "checkpoint"
    )
    return Proof(confidence=0.95, evidence=(case.verdict.summary, text, why))


def _not_finite(case: Case) -> Proof | None:
    stored = [name for name in case.reading.bad_state if name.startswith("opt:")]
    named = case.tensor.startswith("opt:")
    if not named and (
        not stored or (case.origin is not None and case.phase not in ("state", "optimizer"))
    ):
        return None
    which = case.tensor if named else stored[0]
    if case.reading.state_born:
        text = f"`{which}` became non-finite in this step's update, from finite gradients"
        born_by_op = bool(case.origin and case.origin.op)
        return Proof(
            confidence=PLAUSIBLE + 0.1 if born_by_op else 0.85, evidence=(text, _operand(case))
        )
    text = f"`{which}` was non-finite before this step, while the gradients of this step are " + (
        "finite" if case.reading.grads_finite else "not looked at"
    )
    params = [name for name in case.reading.bad_state if name.startswith("param:")]
    weights = "the parameters themselves are finite: they were restored without it"
    if params:
        weights = (
            f"it took {len(params)} parameters along, first `{params[0]}`: no committed "
            f"gradient was non-finite"
        )
    return Proof(confidence=0.95, evidence=(text, weights, _operand(case)))


def _operand(case: Case) -> str:
    bad = next((o for o in (*case.inputs, case.output) if o is not None and not o.finite), None)
    return describe(bad) if bad is not None else ""


RULE = Rule(
    code="SG503",
    title="poisoned optimizer state",
    what=prose(
        """
        A slot of the optimizer (exp_avg, exp_avg_sq, momentum_buffer ...) holds NaN or Inf. Every further
        update takes it along, however clean the gradients are. Or it is finite but impossible: a mean gradient
        without a mean square, which moves the weight by lr * exp_avg / eps.
        """
    ),
    why=prose(
        """
        A bad step was undone by restoring the weights only; a NaN gradient went through optimizer.step()
        while the weights were repaired by hand; a squared gradient overflowed the second moment; or a
        checkpoint kept the second moment in float16, where everything below 6e-08 is 0.
        """
    ),
    how=prose(
        """
        The state of the optimizer is scanned once something is wrong: the slot is non-finite before the
        update while gradients and weights are finite. After a finite spike, elements are counted whose
        exp_avg is not 0 while their exp_avg_sq is.
        """
    ),
    evidence=_evidence,
    remedies=(
        Remedy(
            title="Restore the optimizer together with the weights",
            snippet=code(
                """
                model.load_state_dict(good_model)
                optimizer.load_state_dict(good_optimizer)
                loss = model(x).pow(2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                """
            ),
        ),
        Remedy(
            title="Clear the damaged slots: they are rebuilt within 1 / (1 - beta) steps",
            snippet=code(
                """
                model.load_state_dict(good_model)
                for p in model.parameters():
                    if any(not s.isfinite().all() for s in optimizer.state[p].values()):
                        del optimizer.state[p]
                loss = model(x).pow(2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                """
            ),
            safety="changes-training",
        ),
    ),
    setup=code(
        """
        import copy
        import torch

        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.Adam(model.parameters())
        x = torch.randn(4, 3)
        model(x).pow(2).mean().backward()
        optimizer.step()
        good_model, good_optimizer = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        model.weight.grad.fill_(float('nan'))
        optimizer.step()  # the bad step
        """
    ),
    bad=code(
        """
        model.load_state_dict(good_model)  # exp_avg is still NaN
        loss = model(x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        """
    ),
    see=(
        "facebookresearch/maskrcnn-benchmark#464",
        "Project-MONAI/monai-physio#137",
    ),
)

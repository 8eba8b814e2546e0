"""SG104: a target the loss is not defined for."""

from __future__ import annotations

from stepguard.diagnose.arithmetic import counts_nothing, log_argument, negative_root, zero_divisor
from stepguard.diagnose.case import Case, high, low, met
from stepguard.diagnose.ops import words
from stepguard.diagnose.rule import STRONG, Proof, Rule, code, prose
from stepguard.diagnose.rules.sg102 import NLL
from stepguard.diagnose.wording import at_index, describe, spell
from stepguard.records import Remedy

CURVES = words(
    "cos sin tan exp exp2 expm1 sigmoid tanh erf erfc softmax _softmax softplus acos asin atan"
)
"""What comes out of these is no target any more: its range is theirs, and they round."""
BCE = frozenset({"binary_cross_entropy", "binary_cross_entropy_with_logits"})


def _evidence(case: Case) -> Proof | None:
    if case.unselected:
        return None
    tests = (_noted, _ctc, _class_index, _probability, _from_batch, _ruled_out)
    return next((proof for proof in (test(case) for test in tests) if proof is not None), None)


def _noted(case: Case) -> Proof | None:
    if case.evidence.target_out_of_domain is None:
        return None
    operand = next(
        (o for o in case.inputs if o.value is not None), case.inputs[0] if case.inputs else None
    )
    numbers = f"{case.place} got a target it is not defined for"
    if operand is not None:
        numbers += f": {describe(operand)}"
        numbers += (
            f"; the offending one is {spell(operand.value)}{at_index(operand)}"
            if operand.value is not None
            else ""
        )
    worst = case.evidence.target_out_of_domain
    numbers += f" ({spell(worst)})" if worst is not None else ""
    return Proof(confidence=0.94, evidence=(numbers, case.confirmed_samples))


def _ctc(case: Case) -> Proof | None:
    if case.op not in ("_ctc_loss", "ctc_loss", "_cudnn_ctc_loss") or not case.makes_inf:
        return None
    inputs, targets = case.argument("input_lengths", 2), case.argument("target_lengths", 3)
    lengths = ""
    if inputs is not None and targets is not None:
        lengths = (
            f"inputs are {spell(low(inputs))} long or more, targets up to {spell(high(targets))}"
        )
    numbers = (
        f"{case.place} is infinite: a target cannot be aligned with an input that short "
        f"(repeats need a blank each)"
    )
    how_many = case.evidence.ctc_infeasible
    short = f"{how_many} targets of the batch are too long" if how_many else ""
    return Proof(confidence=0.94, evidence=(numbers, lengths, short, case.confirmed_samples))


def _class_index(case: Case) -> Proof | None:
    if case.op not in NLL:
        return None
    scores, target = case.argument("self", 0), case.argument("target", 1)
    if scores is None or target is None:
        return None
    classes = scores.shape[1] if len(scores.shape) > 1 else 0
    if classes and high(target) >= classes:
        text = (
            f"a target is {spell(high(target))}, but there are {classes} classes (0 to "
            f"{classes - 1})"
        )
        return Proof(confidence=0.95, evidence=(text,))
    if case.evidence.zero_target_probability or (
        scores.neginf and case.makes_inf and not scores.nan
    ):
        text = (
            f"a target names a class whose score is -inf ({scores.neginf} scores are): its "
            f"probability is exactly 0"
        )
        return Proof(confidence=STRONG, evidence=(text, case.confirmed_samples))
    return None


def _probability(case: Case) -> Proof | None:
    target = case.argument("target", 1)
    if case.op in BCE and target is not None and (low(target) < 0 or high(target) > 1):
        text = f"{case.place} needs targets in [0, 1]: {describe(target)}"
        return Proof(confidence=0.94, evidence=(text, case.confirmed_samples))
    mine, other = case.argument("self", 0), case.argument("other", 1)
    same = mine is not None and other is not None and (mine.min, mine.max) == (other.min, other.max)
    if case.op == "xlogy" and mine is not None and same and low(mine) < 0:
        text = f"a target probability is negative ({spell(low(mine))}): t * log t does not exist"
        return Proof(confidence=0.94, evidence=(text, case.confirmed_samples))
    return None


def _ruled_out(case: Case) -> Proof | None:
    """A loss that adds up what a mask has set to -inf, such as label smoothing over all classes."""
    masked = next((o for o in case.inputs if o.neginf and not o.nan and not o.posinf), None)
    if (
        masked is None
        or case.phase != "loss"
        or not case.evidence.intended_inf
        or case.output is None
        or case.output.nan
    ):
        return None
    text = (
        f"{case.place} counts {masked.neginf} entries that were set to -inf on purpose: their "
        f"loss is infinite"
    )
    return Proof(confidence=0.8, evidence=(text, describe(masked), case.confirmed_samples))


def _from_batch(case: Case) -> Proof | None:
    """A logarithm, root or division in the loss whose operand is computed from the batch alone."""
    root = case.evidence.argument_root or case.evidence.denominator_root
    broken = (
        log_argument(case) is not None
        or negative_root(case) is not None
        or zero_divisor(case) is not None
    )
    if case.phase != "loss" or not root or not broken:
        return None
    divisor = zero_divisor(case)
    if divisor is not None and counts_nothing(case, divisor):
        return None
    value = divisor or next((o for o in case.inputs if o.index is not None), case.inputs[0])
    text = (
        f"{case.place} got {spell(met(value)[0])}{at_index(value)}, which is computed from "
        f"`{root}` alone"
    )
    rounded = case.short and any(
        o.zeros for o in case.inputs
    )  # more likely 0 by rounding than in the data
    confidence = 0.94 if log_argument(case) is not None and not rounded else 0.8
    if (case.evidence.argument_from or "").removeprefix("aten.") in CURVES:
        confidence = 0.7
    return Proof(confidence=confidence, evidence=(text, describe(value), case.confirmed_samples))


RULE = Rule(
    code="SG104",
    title="target outside the loss's domain",
    what=prose(
        """
        A target has a value for which the loss is not defined: a box of negative width under a logarithm, a
        class whose score is masked to -inf, a probability outside [0, 1], a CTC target longer than its input.
        """
    ),
    why=prose(
        """
        Wrong annotations (x2 < x1, label 255 for void), labels scaled twice, a vocabulary mask that also
        hides the right answer, or augmentation that shrinks the input below what its target needs.
        """
    ),
    how=prose(
        """
        The first bad value is born in the loss from values that come straight from the batch's targets and
        lie outside what the operation accepts; the sample is confirmed by leaving it out.
        """
    ),
    evidence=_evidence,
    remedies=(
        Remedy(
            title="Drop or repair such annotations in the dataset, and count them",
            snippet=code(
                """
                size = box[:, 2:] - box[:, :2]
                valid = (size > 0).all(dim=1)
                loss = (prediction[valid] - size[valid].log()).abs().mean()  # log (~valid).sum()
                """
            ),
        ),
        Remedy(
            title="Order the corners when the boxes are read",
            snippet=code(
                """
                low, high = torch.minimum(box[:, :2], box[:, 2:]), torch.maximum(box[:, :2], box[:, 2:])
                loss = (prediction - (high - low).clamp_min(1e-3).log()).abs().mean()
                """
            ),
            safety="changes-numbers",
        ),
    ),
    setup=code(
        """
        import torch

        box = torch.tensor([[0.0, 0.0, 4.0, 4.0], [6.0, 2.0, 2.0, 8.0]])  # the second has x2 < x1
        prediction = torch.zeros(2, 2, requires_grad=True)
        """
    ),
    bad=code(
        """
        size = box[:, 2:] - box[:, :2]
        loss = (prediction - size.log()).abs().mean()
        """
    ),
    see=(
        "open-mmlab/mmdetection#3397",
        "open-mmlab/mmdetection#3013",
        "pytorch/pytorch#31557",
    ),
)

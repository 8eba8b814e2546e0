"""SG102: a mean over no element at all."""

from __future__ import annotations

from stepguard.diagnose.arithmetic import counts_nothing, zero_divisor
from stepguard.diagnose.case import Case, elements, high, low, reach
from stepguard.diagnose.ops import words
from stepguard.diagnose.rule import CERTAIN, STRONG, Proof, Rule, code, prose
from stepguard.diagnose.wording import describe, spell
from stepguard.records import Operand, Remedy

NLL = words(
    "nll_loss_forward nll_loss2d_forward nll_loss nll_loss2d nll_loss_nd cross_entropy_loss"
)
NLL_BACKWARD = frozenset({"nll_loss_backward", "nll_loss2d_backward"})
REDUCTIONS = words(
    """
    mean mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits
    soft_margin_loss kl_div median nanmedian nanmean segment_reduce logsumexp poisson_nll_loss amax amin
    """
)


def _evidence(case: Case) -> Proof | None:
    return _no_label(case) or _nothing_reduced(case) or _count_is_zero(case)


def _no_label(case: Case) -> Proof | None:
    total = case.argument("total_weight", 6)
    if case.op in NLL_BACKWARD and total is not None and reach(total) == 0:
        return Proof(
            confidence=STRONG,
            evidence=(f"{case.place} divides by the weight of all targets, which is 0",),
        )
    if case.op not in NLL or not case.makes_nan or not case.finite_inputs:
        return None
    return _all_left_out(case) or _weightless(case)


def _all_left_out(case: Case) -> Proof | None:
    target, ignored = case.argument("target", 1), case.argument("ignore_index", 4)
    same = target is not None and _all_ignored(target, ignored)
    if not (same or case.evidence.valid_targets == 0 or case.reading.labels == 0):
        return None
    first = f"0 of {elements(target)} targets count" if target is not None else "no target counts"
    if target is not None and same:
        first += f": every one is {spell(low(target))}, the ignore_index"
    return Proof(
        confidence=CERTAIN, evidence=(first, f"{case.place} took the mean over none: 0 / 0")
    )


def _weightless(case: Case) -> Proof:
    weight = case.argument("weight", 2)
    if weight is not None and low(weight) == 0:
        text = (
            f"{describe(weight)}: the classes in this batch all weigh 0, so {case.place} "
            f"divides by 0"
        )
    else:
        text = f"{case.place} made NaN from finite scores: no target of the batch counts"
    return Proof(confidence=STRONG, evidence=(text,))


def _all_ignored(target: Operand, ignored: Operand | None) -> bool:
    if not elements(target) or low(target) != high(target):
        return False
    return low(target) == (
        ignored.value if ignored is not None and ignored.value is not None else -100
    )


def _nothing_reduced(case: Case) -> Proof | None:
    lengths = case.argument("lengths", 1)
    if case.op == "segment_reduce" and case.makes_nan and lengths is not None and lengths.zeros:
        text = (
            f"{lengths.zeros} of {elements(lengths)} segments have length 0: {case.place} took "
            f"the mean of none"
        )
        return Proof(confidence=CERTAIN, evidence=(text,))
    empty = next((o for o in case.inputs if o.dtype and o.shape and elements(o) == 0), None)
    if case.op not in REDUCTIONS or not (empty is not None or case.evidence.reduced_elements == 0):
        return None
    what = (
        f"`{empty.name or 'self'}` has shape {empty.shape}"
        if empty is not None
        else "the reduced dimension is empty"
    )
    return Proof(confidence=CERTAIN, evidence=(f"{what}: {case.place} reduced 0 elements",))


def _count_is_zero(case: Case) -> Proof | None:
    divisor = zero_divisor(case)
    if divisor is None or not case.forward or case.unselected or not counts_nothing(case, divisor):
        return None
    made_by = case.evidence.denominator_from
    source = (
        f"the divisor comes from {made_by}"
        if made_by
        else "the divisor takes whole values only, as a count does"
    )
    said = source if elements(divisor) > 1 or made_by else ""
    numbers = f"{case.place} divided by a count of valid elements that is 0: {describe(divisor)}"
    return Proof(confidence=0.93, evidence=(numbers, said, case.confirmed_samples))


RULE = Rule(
    code="SG102",
    title="empty reduction (all labels ignored, mask sums to 0)",
    what=prose(
        """
        A mean was taken over no element: every label is ignored, the mask sums to 0, or a selection is empty.
        0 / 0 is NaN.
        """
    ),
    why=prose(
        """
        Truncation cut off every supervised token, a sample holds only padding, a detector found no object, a
        class weight of 0 covers all targets of the batch. It is rare per batch and certain per epoch.
        """
    ),
    how=prose(
        """
        The operation is a loss whose valid targets number 0, a reduction whose operand has no element, or a
        division whose divisor is a count (an integer, a mask's sum, whole values only) that is 0. A zero norm
        or standard deviation is SG201 instead.
        """
    ),
    evidence=_evidence,
    remedies=(
        Remedy(
            title="Sum, and divide by the count but at least by 1: an empty batch gives loss 0 "
            "with gradient 0",
            snippet=code(
                """
                token_loss = torch.nn.functional.cross_entropy(logits, labels, reduction='sum')
                loss = token_loss / labels.ne(-100).sum().clamp_min(1)
                """
            ),
        ),
        Remedy(
            title="Leave samples without a target out before they are batched, and count them",
            snippet=code(
                """
                keep = labels.ne(-100)
                if keep.any():
                    loss = torch.nn.functional.cross_entropy(logits[keep], labels[keep])
                else:
                    loss = logits.sum() * 0  # still part of the graph, so DDP stays in step
                """
            ),
        ),
    ),
    setup=code(
        """
        import torch

        logits = torch.randn(4, 8, requires_grad=True)
        labels = torch.full((4,), -100)
        """
    ),
    bad=code(
        """
        token_loss = torch.nn.functional.cross_entropy(logits, labels, reduction='none')
        mask = labels.ne(-100).float()
        loss = (token_loss * mask).sum() / mask.sum()
        """
    ),
    see=(
        "pytorch/pytorch#70348",
        "karpathy/nanochat#618",
        "NVIDIA-NeMo/Automodel#3796",
        "allenai/OLMo-core#452",
    ),
)

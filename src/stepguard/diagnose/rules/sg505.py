"""SG505: the run diverges because its steps are too large."""

from __future__ import annotations

from stepguard.diagnose.arithmetic import overflow
from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import LIKELY, PLAUSIBLE, Proof, Rule, code, prose
from stepguard.diagnose.rules.sg103 import EXTREME_INPUT, EXTREME_OPERAND
from stepguard.diagnose.rules.sg504 import FINITE_ANOMALIES
from stepguard.diagnose.trends import growth, lr_climb, lr_jump, lr_not_a_number, rising
from stepguard.diagnose.wording import spell
from stepguard.records import Remedy


def _evidence(case: Case) -> Proof | None:
    jumped = lr_jump(case) is not None or lr_not_a_number(case) is not None
    norm_overflowed = case.verdict.kind == "infinite_norm"
    if jumped or (norm_overflowed and not rising(case)):
        return None
    if case.verdict.kind in FINITE_ANOMALIES or norm_overflowed or case.evidence.weights_ruined:
        confidence = 0.92 if norm_overflowed or _shown(case) else LIKELY
    elif overflow(case) and not case.narrow:  # bfloat16 has the range of float32
        confidence = _overflowed(case)
    elif case.phase == "optimizer" and rising(case):
        confidence = 0.85
    else:
        return None
    if not confidence:
        return None
    if case.impure or _number_explains(case) or _stood_still(case):
        confidence = min(confidence, PLAUSIBLE)
    return Proof(confidence=confidence, evidence=_numbers(case), remedies=_bound_the_schedule(case))


STILL = 1e-5
"""Of their norm: an update so small moves no loss by itself."""


def _stood_still(case: Case) -> bool:
    """The last update hardly changed the weights, so it is not what made this loss."""
    ratio = (case.verdict.evidence or {}).get("update_ratio", case.facts.update_ratio)
    return (
        case.verdict.kind in FINITE_ANOMALIES and isinstance(ratio, int | float) and ratio < STILL
    )


def _shown(case: Case) -> bool:
    """Something was measured that speaks for the weights: an earlier batch, older weights, the
    update, the rate.
    """
    said = case.verdict.evidence or {}
    measured = any(key in said for key in ("repeat_loss", "older_loss", "update_ratio", "moved"))
    climb = lr_climb(case)
    return measured or case.reading.repeat_loss is not None or (climb is not None and climb.runaway)


EXTREME_NUMBER = 1e6
"""A factor that no loss function means: a temperature annealed to almost 0, or its reciprocal."""


def _number_explains(case: Case) -> bool:
    """A Python number that went in is extreme by itself: it, and not the weights, may be what ran
    away.
    """
    numbers = [
        abs(o.value) for o in case.inputs if not o.shape and o.value and o.dtype in ("float", "int")
    ]
    return any(value >= EXTREME_NUMBER or value <= 1 / EXTREME_NUMBER for value in numbers)


def _bound_the_schedule(case: Case) -> tuple[Remedy, ...]:
    climb = lr_climb(case)
    if climb is None or not climb.runaway:
        return ()
    title = "Let the schedule end: this rate is above everything that was declared and still grows"
    snippet = "schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup_steps))"
    return (Remedy(title=title, snippet=snippet, safety="changes-training"),)


def _overflowed(case: Case) -> float:
    """float32 does not overflow on ordinary weights and data: one of the two has run away."""
    if abs(case.evidence.batch_max or 0.0) >= EXTREME_INPUT or case.facts.committed == 0:
        return 0.0  # the batch, or the weights as they came: no step has been taken yet
    if rising(case):
        return 0.95 if case.short else 0.9  # what bfloat16 cannot hold, float32 can only just hold
    return 0.7 if case.magnitude >= EXTREME_OPERAND and not case.confirmed_samples else 0.0


def _numbers(case: Case) -> tuple[str, ...]:
    losses, norms, facts = case.facts.losses, case.facts.grad_norms, case.facts
    said = [case.verdict.summary]
    if growth(losses) > 1:
        said.append(
            f"over the last {len(losses)} steps the loss went from {spell(min(losses))} to "
            f"{spell(losses[-1])}"
        )
    if growth(norms) > 1:
        said.append(f"the gradient norm went from {spell(min(norms))} to {spell(norms[-1])}")
    if case.reading.repeat_loss is not None and "older_loss" not in (case.verdict.evidence or {}):
        said.append(
            f"an earlier batch, evaluated again on the present weights, gives "
            f"{spell(case.reading.repeat_loss)}"
        )
    if facts.update_ratio is not None:
        said.append(
            f"the last update changed the weights by {facts.update_ratio:.3g} of their norm; 0.001 "
            f"is usual"
        )
    said.append(_rates(case))
    if case.impure:
        moved = ", ".join(case.evidence.moves) or "its losses differ"
        said.append(f"but the loss function changes by itself ({moved})")
    if overflow(case):
        said.append(
            f"{case.place} overflowed on operands up to {case.magnitude:.3g}, which no sample "
            f"explains"
        )
    return tuple(said)


def _rates(case: Case) -> str:
    climb = lr_climb(case)
    if climb is not None:
        return climb.sentence
    return (
        f"lr is {', '.join(spell(rate) for rate in case.reading.lr)} and did not jump"
        if case.reading.lr
        else ""
    )


RULE = Rule(
    code="SG505",
    title="divergence: the step size is too large",
    what=prose(
        """
        The weights themselves have got worse: the loss grows over several steps, and batches that were fine
        before are bad on the present weights. Left alone it ends in an overflow.
        """
    ),
    why=prose(
        """
        The update is larger than the curvature allows: no warm-up, a rate copied from another batch size or
        model, a momentum or beta2 that does not fit, a weight that turned a loss term up. Clipping does not
        help Adam, whose step does not depend on the gradient's scale.
        """
    ),
    how=prose(
        """
        The loss is far above its history, an earlier batch repeated on the present weights has lost as much,
        and the learning rate did not jump (that would be SG504); or an operation overflowed after losses or
        gradient norms had grown tenfold, with no extreme value in the batch.
        """
    ),
    evidence=_evidence,
    remedies=(
        Remedy(
            title="Warm up: the first steps are where the curvature is highest",
            snippet=code(
                """
                warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, 0.01 * 1.1**step))
                for step in range(25):
                    optimizer.zero_grad()
                    loss = (model(x) - y).pow(2).mean()
                    loss.backward()
                    optimizer.step()
                    warmup.step()
                """
            ),
            safety="changes-training",
        ),
        Remedy(
            title="Rewind to a state that was good by loss, and take smaller steps from there",
            snippet=code(
                """
                optimizer.param_groups[0]['lr'] = 0.02
                for step in range(25):
                    optimizer.zero_grad()
                    loss = (model(x) - y).pow(2).mean()
                    loss.backward()
                    optimizer.step()
                """
            ),
            safety="changes-training",
        ),
        Remedy(
            title="With SGD, clip the gradient norm: it bounds the step",
            snippet=code(
                """
                for step in range(25):
                    optimizer.zero_grad()
                    loss = (model(x) - y).pow(2).mean()
                    loss.backward()
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                """
            ),
            safety="changes-training",
        ),
    ),
    setup=code(
        """
        import torch

        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        x = torch.randn(64, 4) * 2
        y = x.sum(1, keepdim=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        """
    ),
    bad=code(
        """
        for step in range(25):
            optimizer.zero_grad()
            loss = (model(x) - y).pow(2).mean()
            loss.backward()
            optimizer.step()
        """
    ),
    see=(
        "facebookresearch/detectron2#1128",
        "karpathy/nanoGPT#136",
        "facebookresearch/fairseq#282",
    ),
)

"""SG101: the batch already held NaN or Inf."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import CERTAIN, HINT, STRONG, Proof, Rule, code, prose
from stepguard.diagnose.wording import at_index, counts, spell
from stepguard.records import Operand, Remedy


def _evidence(case: Case) -> Proof | None:
    named = case.tensor.startswith("batch:")
    if case.origin is not None and (
        case.phase == "input" or (named and case.tensor in case.reading.bad_inputs)
    ):
        which = case.tensor or ", ".join(case.reading.bad_inputs) or "an input"
        return Proof(confidence=CERTAIN, evidence=(_holds(case, which), case.confirmed_samples))
    if case.evidence.number is not None and not case.unselected:
        return Proof(confidence=0.95, evidence=_number(case))
    if case.evidence.constant is not None and case.evidence.attribute is None:
        text = (
            f"a tensor from outside model and batch was already {case.evidence.constant} when "
            f"{case.place} read it"
        )
        return Proof(confidence=0.85, evidence=(text, case.confirmed_samples))
    if not case.reading.bad_inputs:
        return None
    listed = f"the batch holds NaN or Inf in {', '.join(case.reading.bad_inputs)}"
    if case.origin is None:
        return Proof(confidence=STRONG, evidence=(listed, case.verdict.summary))
    if case.verdict.kind == "nonfinite_input":
        return Proof(
            confidence=HINT,
            evidence=(listed, f"but the first harmful value was born in {case.place}"),
        )
    return None


def _number(case: Case) -> tuple[str, ...]:
    argument = case.evidence.number_argument
    value = case.evidence.number
    first = (
        f"{case.place} was given the number {argument}={value}: a Python number from outside "
        f"model and batch"
    )
    kept_as = case.evidence.attribute
    where = f"the attribute `{kept_as}` of the model is {value}" if kept_as else ""
    return first, where, "every tensor that went in is finite" if case.finite_inputs else ""


def _holds(case: Case, which: str) -> str:
    bad = next((o for o in (*case.inputs, case.output) if o is not None and not o.finite), None)
    if bad is None:
        number = case.evidence.bad_elements
        amount = f"holds {number} non-finite elements" if number else "was non-finite"
        return f"`{which}` {amount} before the model saw it"
    amount = ", ".join(
        part for part in (counts(bad, kind) for kind in ("nan", "posinf", "neginf")) if part
    )
    return f"`{which}` holds {amount} before the model saw it{_where(bad)}"


def _where(bad: Operand) -> str:
    return f"; the first is {spell(bad.value)}{at_index(bad)}" if bad.index is not None else ""


RULE = Rule(
    code="SG101",
    title="non-finite input",
    what=prose(
        """
        A tensor of the batch contains NaN or Inf before the model has done anything with it. The same code is
        given to a number from outside: a loss weight or a temperature that is NaN when it is multiplied in.
        """
    ),
    why=prose(
        """
        Missing values read as NaN (CSV, rolling means, sensor gaps), a division or logarithm during
        preprocessing, a fill value that overflowed on conversion, or a file that was damaged or decoded
        wrongly. One such element is enough: the mean over the batch makes the loss NaN, and backward makes
        every gradient NaN. A number goes bad in Python: a schedule that divides 0.0 by 0.0, `math.inf - math.inf`,
        a metric of an empty epoch used as a weight, a setting read as `nan`.
        """
    ),
    how=prose(
        """
        Once a step is bad, every floating-point tensor of the batch is scanned. The rule fires when the bad
        value that reached the loss is one of them; the sample is confirmed by leaving it out. NaN in the
        batch that never reaches the loss (masked targets) is not reported. A number is named when an operation
        of the replay was given it and no tensor explains the result.
        """
    ),
    evidence=_evidence,
    remedies=(
        Remedy(
            title="Leave the bad samples out in the collate function, and count them",
            snippet=code(
                """
                good = batch.isfinite().all(dim=1)
                loss = (batch[good] @ weight - target[good]).pow(2).mean()  # log (~good).sum()
                """
            ),
        ),
        Remedy(
            title="Impute before the model; replacing NaN in the loss or the output is too late "
            "for the gradient",
            snippet=code(
                """
                known = batch.isfinite()
                mean = batch.where(known, 0.0).sum(0) / known.sum(0).clamp_min(1)
                loss = (batch.where(known, mean) @ weight - target).pow(2).mean()
                """
            ),
            safety="changes-numbers",
        ),
    ),
    setup=code(
        """
        import torch

        batch = torch.tensor([[1.0, 2.0], [float('nan'), 0.5], [0.2, 0.1]])
        target = torch.tensor([1.0, 0.0, 1.0])
        weight = torch.zeros(2, requires_grad=True)
        """
    ),
    bad="loss = (batch @ weight - target).pow(2).mean()",
    see=(
        "unit8co/darts#1977",
        "unit8co/darts#1438",
        "NVIDIA/Megatron-LM#780",
    ),
)

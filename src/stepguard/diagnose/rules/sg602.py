"""SG602: a buffer is NaN or Inf."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import PLAUSIBLE, Proof, Rule, code, prose
from stepguard.diagnose.wording import counts, describe
from stepguard.records import Remedy


def _evidence(case: Case) -> Proof | None:
    return _kept_outside(case) or _buffer(case)


def _kept_outside(case: Case) -> Proof | None:
    """A tensor that a module keeps as a plain attribute: nobody saves it and nobody puts it back."""
    attribute = case.evidence.attribute
    if attribute is None or case.evidence.constant is None:
        return None
    owner, _, name = attribute.rpartition(".")
    which = f"module `{owner}`" if owner else "the model"
    first = f"`self.{name}` of {which} was already non-finite when {case.place} read it"
    bad = next((operand for operand in case.inputs if not operand.finite), None)
    amount = describe(bad, f"self.{name}") if bad is not None else ""
    kept = (
        f"it is a tensor kept by {which} outside its buffers: no checkpoint holds it and no "
        f"gradient repairs it"
    )
    return Proof(confidence=0.95, evidence=(first, amount, kept))


def _buffer(case: Case) -> Proof | None:
    stored = [name for name in case.reading.bad_state if name.startswith("buffer:")]
    named = case.tensor.startswith("buffer:")
    if not named and (
        not stored or case.tensor or (case.origin is not None and case.phase != "state")
    ):
        return None
    which = case.tensor if named else stored[0]
    bad = next((o for o in (*case.inputs, case.output) if o is not None and not o.finite), None)
    amount = ""
    if bad is not None:
        kinds = ", ".join(
            part for part in (counts(bad, kind) for kind in ("nan", "posinf", "neginf")) if part
        )
        amount = f"it holds {kinds}: {describe(bad, which)}"
    hidden = (
        "training does not read running statistics, so its loss looks healthy; evaluation "
        "will be NaN"
    )
    statistics = "running_" in which and case.loss_finite
    text = f"`{which}` is non-finite; no gradient ever repairs a buffer"
    made_here = case.reading.state_born and bool(case.origin and case.origin.op)
    confidence = PLAUSIBLE if made_here and "running_" not in which else 0.96
    return Proof(confidence=confidence, evidence=(text, amount, hidden if statistics else ""))


RULE = Rule(
    code="SG602",
    title="non-finite buffer",
    what=prose(
        """
        A buffer of the model (BatchNorm's running_mean or running_var, an EMA, a codebook) holds NaN or Inf.
        No gradient flows into it, so training never repairs it.
        """
    ),
    why=prose(
        """
        A bad batch went through the forward pass and was skipped afterwards: BatchNorm had already absorbed
        it. Or the value was saved into a checkpoint and came back. Training itself looks perfect, evaluation
        is NaN.
        """
    ),
    how=prose(
        """
        Running statistics of norm layers must always be finite and are scanned at the first step and on
        suspicion; any other buffer counts only if it turned non-finite during the run or feeds a bad value (a
        sentinel such as -inf is fine).
        """
    ),
    evidence=_evidence,
    remedies=(
        Remedy(
            title="Reset the running statistics; they are rebuilt within 1 / momentum steps",
            snippet=code(
                """
                for module in model.modules():
                    if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
                        module.reset_running_stats()
                loss = model(x).pow(2).mean()
                """
            ),
            safety="changes-training",
        ),
        Remedy(
            title="When a step is skipped, roll the buffers back with it (stepguard does)",
            snippet=code(
                """
                before = {name: value.clone() for name, value in good.items()}
                model.load_state_dict(before)
                loss = model(x).pow(2).mean()
                """
            ),
        ),
    ),
    setup=code(
        """
        import copy
        import torch

        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        good = copy.deepcopy(model.state_dict())
        x = torch.randn(6, 3)
        batch = x.clone()
        batch[4, 0] = float('nan')
        model(batch)  # the loop skips this step, but the forward pass has run
        """
    ),
    bad="loss = model(x).pow(2).mean()  # finite: the running statistics are not used in training",
    see=(
        "pytorch/pytorch#10008",
        "facebookresearch/SparseConvNet#190",
        "pytorch/pytorch#1206",
    ),
)

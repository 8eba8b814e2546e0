"""SG506: the loss scale fell below 1 and still the gradients overflow."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import PLAUSIBLE, Proof, Rule, code, prose
from stepguard.diagnose.wording import spell
from stepguard.records import Remedy


def _evidence(case: Case) -> Proof | None:
    scale = case.reading.scale
    collapsed = case.verdict.kind == "scaler_collapse"
    if not collapsed and (scale is None or scale >= 1.0 or case.reading.grads_finite):
        return None
    first = f"the loss scale is {spell(scale)}, below 1, and the gradients are still not finite"
    second = (
        "the scale is therefore not what makes them overflow: every step is skipped and the "
        "weights never move"
    )
    located = bool(case.origin and (case.origin.op or case.tensor))
    confidence = PLAUSIBLE if located or not collapsed else 0.93
    return Proof(confidence=confidence, evidence=(first, second))


RULE = Rule(
    code="SG506",
    title="loss-scale collapse",
    what=prose(
        """
        GradScaler has halved its scale on every step until it lies below 1, and the gradients are still not
        finite. Nothing is learned, the log shows a loss, and the run looks alive.
        """
    ),
    why=prose(
        """
        GradScaler takes every Inf or NaN for its own fault. If a forward pass makes NaN in each batch (an
        empty sample, a NaN parameter), lowering the scale cures nothing and goes on for ever.
        """
    ),
    how=prose(
        """
        The scale is below 1 and the step is still bad. A few halvings from a high initial scale are
        calibration and not reported.
        """
    ),
    evidence=_evidence,
    remedies=(
        Remedy(
            title="Find the NaN with the scaler out of the way: the finding beside this one names "
            "it. Then stop on low "
            "scale",
            snippet=code(
                """
                x = x[x.isfinite().all(dim=1)]
                for step in range(12):
                    optimizer.zero_grad()
                    scaler.scale(model(x).pow(2).mean()).backward()
                    scaler.step(optimizer)
                    scaler.update()
                    assert scaler.get_scale() >= 1.0, 'the scale is not the problem'
                loss = model(x).pow(2).mean().detach()
                """
            ),
        ),
        Remedy(
            title="In bfloat16 no loss scale is needed: leave GradScaler out, and every NaN shows "
            "at once",
            snippet=code(
                """
                x = x[x.isfinite().all(dim=1)]
                with torch.autocast('cpu', dtype=torch.bfloat16):
                    loss = model(x).float().pow(2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                """
            ),
            safety="changes-numbers",
        ),
    ),
    setup=code(
        """
        import torch

        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler('cpu', init_scale=2.0**10)
        x = torch.randn(4, 3)
        x[1, 0] = float('nan')  # in every batch
        """
    ),
    bad=code(
        """
        for step in range(12):
            optimizer.zero_grad()
            scaler.scale(model(x).pow(2).mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        loss = model(x).pow(2).mean().detach()
        """
    ),
    see=(
        "Junjue-Wang/FactSeg#6",
        "lucidrains/stylegan2-pytorch#100",
        "facebookresearch/fairseq#1529",
        "deepspeedai/DeepSpeed#1958",
    ),
)

"""SG504: the learning rate jumped."""

from __future__ import annotations

from stepguard.diagnose.arithmetic import overflow
from stepguard.diagnose.case import Case
from stepguard.diagnose.ops import EXPONENTIALS
from stepguard.diagnose.rule import CERTAIN, LIKELY, PLAUSIBLE, Proof, Rule, code, prose
from stepguard.diagnose.trends import lr_climb, lr_jump, lr_not_a_number
from stepguard.records import Remedy

FINITE_ANOMALIES = ("spike", "drift")
"""Verdicts on a step in which nothing is non-finite yet."""


def _evidence(case: Case) -> Proof | None:
    group = lr_not_a_number(case)
    if group is not None:
        return Proof(
            confidence=CERTAIN, evidence=(f"group {group} runs with lr {case.reading.lr[group]}",)
        )
    jump = lr_jump(case)
    if jump is None:
        return None
    return Proof(confidence=_confidence(case), evidence=(jump.sentence, *_consequence(case)))


def _confidence(case: Case) -> float:
    if case.verdict.kind in (*FINITE_ANOMALIES, "infinite_norm") or case.evidence.weights_ruined:
        return 0.96
    if case.verdict.kind == "lr_mismatch":
        return LIKELY if case.facts.resumed else 0.95
    if (
        overflow(case) or case.op in EXPONENTIALS
    ) and not case.short:  # past exp(709) float64 overflows as well
        return 0.92
    if case.phase in ("", "optimizer") and not (case.origin and case.origin.op):
        return 0.9
    return PLAUSIBLE + 0.1


def _consequence(case: Case) -> tuple[str, ...]:
    update, climb = case.facts.update_ratio, lr_climb(case)
    grown = climb.sentence if climb is not None and climb.runaway else ""
    ratio = (
        f"the last update changed the weights by {update:.3g} of their norm"
        if update is not None
        else ""
    )
    return grown, case.verdict.summary, ratio


RULE = Rule(
    code="SG504",
    title="learning-rate jump (resume, scheduler state over config)",
    what=prose(
        """
        The learning rate is suddenly much higher than in the steps before, or than configured. The loss
        climbs within a few steps, often until an exponential or a square overflows.
        """
    ),
    why=prose(
        """
        A resume built a new optimizer with the initial rate while the model was far into its decay; the
        scheduler's state was not restored, or restored over a rate that was lowered on purpose; the warm-up
        began again; a schedule ran past its last step.
        """
    ),
    how=prose(
        """
        The rate of every parameter group is kept for recent steps and compared with the one before, with the
        highest before, and with the configured one.
        """
    ),
    evidence=_evidence,
    remedies=(
        Remedy(
            title="Save and restore optimizer and scheduler together, in that order, after both "
            "were built",
            snippet=code(
                """
                optimizer.load_state_dict(saved['optimizer'])
                scheduler.load_state_dict(saved['scheduler'])
                train(steps=5)
                """
            ),
        ),
        Remedy(
            title="Without a scheduler state, set the rate where the schedule would be",
            snippet=code(
                """
                scheduler.last_epoch = saved['step']
                for group in optimizer.param_groups:
                    group['lr'] = saved['scheduler']['_last_lr'][0]
                train(steps=5)
                """
            ),
        ),
    ),
    setup=code(
        """
        import torch

        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        x = torch.randn(64, 4) * 3
        y = x.sum(1, keepdim=True)
        rate = lambda step: 0.5 ** min(step, 8)

        def build():
            optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
            return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

        def train(steps):
            global loss
            for _ in range(steps):
                optimizer.zero_grad()
                loss = (model(x) - y).pow(2).mean()
                loss.backward()
                optimizer.step()
                scheduler.step()

        optimizer, scheduler = build()
        for _ in range(8):
            optimizer.step()
            scheduler.step()  # decayed to 0.008
        train(steps=20)
        saved = {'optimizer': optimizer.state_dict(), 'scheduler': scheduler.state_dict(), 'step': 28}
        optimizer, scheduler = build()  # the resume
        """
    ),
    bad="train(steps=5)  # lr is 2.0 again",
    see=(
        "ultralytics/yolov5#292",
        "torch-points3d/torch-points3d#630",
        "D-X-Y/NAS-Bench-201#19",
    ),
)

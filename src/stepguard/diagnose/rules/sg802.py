"""SG802: loading state brought an old learning rate back."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import HINT, Proof, Rule, code, prose
from stepguard.diagnose.trends import ABOVE_CONFIGURED
from stepguard.diagnose.wording import spell
from stepguard.records import Remedy


def _evidence(case: Case) -> Proof | None:
    configured, running = case.facts.configured_lr, case.reading.lr
    said = [
        f"group {group} is configured with lr {spell(allowed)} but runs with {spell(rate)}"
        for group, (allowed, rate) in enumerate(zip(configured, running, strict=False))
        if allowed > 0 and (rate > ABOVE_CONFIGURED * allowed)
    ]
    mismatch = case.verdict.kind == "lr_mismatch"
    if not case.facts.resumed or not (said or mismatch):
        return None
    loaded = (
        "optimizer or scheduler state was loaded in this process: it carries the old run's rates"
    )
    return Proof(
        confidence=0.93 if mismatch else HINT + 0.1, evidence=(*said, case.verdict.summary, loaded)
    )


RULE = Rule(
    code="SG802",
    title="restored scheduler overrides the configured lr",
    what=prose(
        """
        The run was resumed with a new learning rate in its configuration, but the loaded state brought the
        old one back.
        """
    ),
    why=prose(
        """
        optimizer.load_state_dict restores param_groups with lr, initial_lr and, for OneCycleLR, max_lr; a
        LambdaLR's base_lrs come back with the scheduler. The value given to the constructor is overwritten
        without a word.
        """
    ),
    how=prose(
        """
        The rate each group really runs with is compared with the configured one once state has been loaded.
        """
    ),
    evidence=_evidence,
    remedies=(
        Remedy(
            title="Put the configured rate back after loading, everywhere it is kept",
            snippet=code(
                """
                optimizer.load_state_dict(saved)
                for group in optimizer.param_groups:
                    group['lr'] = group['initial_lr'] = configured
                """
            ),
        ),
        Remedy(
            title="Load the moments only",
            snippet=code(
                """
                saved['param_groups'] = optimizer.state_dict()['param_groups']
                optimizer.load_state_dict(saved)
                """
            ),
        ),
    ),
    setup=code(
        """
        import torch

        model = torch.nn.Linear(2, 1)
        saved = torch.optim.AdamW(model.parameters(), lr=5e-4).state_dict()
        configured = 1e-4
        optimizer = torch.optim.AdamW(model.parameters(), lr=configured)
        """
    ),
    bad="optimizer.load_state_dict(saved)  # lr is 5e-4 again",
    see=(
        "pytorch/examples#816",
        "torch-points3d/torch-points3d#630",
    ),
)

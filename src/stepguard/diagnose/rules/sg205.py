"""SG205: the standard deviation or variance of a single element."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.ops import STATISTICS, words
from stepguard.diagnose.rule import LIKELY, Proof, Rule, code, prose
from stepguard.diagnose.wording import describe, spell
from stepguard.records import Operand, Remedy

STATISTIC_NODES = words("Std Var StdMean VarMean")
SQUARES_OVERFLOW = 1e18


def _evidence(case: Case) -> Proof | None:
    data = case.argument("self", 0)
    one = case.evidence.reduced_elements == 1
    if case.op not in STATISTICS and not (case.node in STATISTIC_NODES and one):
        return None
    if data is None or not data.finite or (not case.makes_nan and not one):
        return None
    if not one and (case.magnitude > SQUARES_OVERFLOW or case.wider):
        return None
    confidence = 0.96 if one or _single(data) else LIKELY
    divisor = case.argument("correction", 2)
    correction = divisor.value if divisor is not None and divisor.value is not None else 1.0
    numbers = (
        f"{case.place} reduced 1 element with correction={spell(correction)}: it divides by "
        f"n - correction = 0"
    )
    return Proof(confidence=confidence, evidence=(numbers, describe(data), case.confirmed_samples))


def _single(data: Operand) -> bool:
    return not data.shape or 1 in data.shape or 0 in data.shape


RULE = Rule(
    code="SG205",
    title="statistic of one element (std, var)",
    what=prose(
        """
        A standard deviation or variance was taken over one element. torch's default divides by n - 1, which
        is 0: the result is NaN.
        """
    ),
    why=prose(
        """
        The last batch of an epoch holds one sample, a group has one member (GRPO, per-episode advantages), a
        mask leaves one token, or the batch size is 1 where the code normalises over the batch.
        """
    ),
    how=prose(
        """
        The operation is std, var, std_mean or var_mean, its operand is finite, and the reduced size is not
        larger than the correction.
        """
    ),
    evidence=_evidence,
    remedies=(
        Remedy(
            title="Normalise only where there is more than one element",
            snippet=code(
                """
                if reward.numel() > 1:
                    advantage = (reward - reward.mean()) / (reward.std() + 1e-8)
                else:
                    advantage = reward - reward.mean()
                loss = (advantage * log_p).mean()
                """
            ),
        ),
        Remedy(
            title="Use the biased statistic; its backward at 0 is finite only with the epsilon "
            "inside the root",
            snippet=code(
                """
                deviation = (reward.var(correction=0) + 1e-8).sqrt()
                loss = ((reward - reward.mean()) / deviation * log_p).mean()
                """
            ),
            safety="changes-numbers",
        ),
        Remedy(
            title="Drop the last incomplete batch: DataLoader(..., drop_last=True)",
            snippet=code(
                """
                data = torch.utils.data.TensorDataset(torch.randn(5), torch.zeros(5))
                loader = torch.utils.data.DataLoader(data, batch_size=4, drop_last=True)
                reward, _ = next(iter(loader))
                loss = ((reward - reward.mean()) / (reward.std() + 1e-8) * log_p).mean()
                """
            ),
            safety="changes-training",
        ),
    ),
    setup=code(
        """
        import torch

        reward = torch.tensor([0.7])  # a group with one member
        log_p = torch.tensor([-1.0], requires_grad=True)
        """
    ),
    bad=code(
        """
        advantage = (reward - reward.mean()) / (reward.std() + 1e-8)
        loss = (advantage * log_p).mean()
        """
    ),
    see=(
        "DLR-RM/stable-baselines3#440",
        "pytorch/pytorch#1381",
    ),
)

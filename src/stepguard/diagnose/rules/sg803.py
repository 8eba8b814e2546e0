"""SG803: nothing is learned."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, code, prose
from stepguard.diagnose.wording import spell
from stepguard.records import Remedy


def _evidence(case: Case) -> Proof | None:
    if case.verdict.kind not in ("zero_loss", "no_labels"):
        return None
    labels = "0 targets of this step count" if case.reading.labels == 0 else ""
    zero = f"loss is {spell(case.reading.loss)}, gradient norm is {spell(case.reading.grad_norm)}"
    return Proof(confidence=0.95, evidence=(labels, zero, case.verdict.summary))


RULE = Rule(
    code="SG803",
    title="zero loss: nothing is learned",
    what=prose(
        """
        Loss and gradient are exactly 0, or no target counts. The run goes on and learns nothing.
        """
    ),
    why=prose(
        """
        Every label is ignored (the prompt is longer than max_length and the answer was cut off), the loss was
        detached or clamped, or a NaN was replaced by 0. In transformers, logging_nan_inf_filter shows a NaN
        loss as 0.0.
        """
    ),
    how=prose(
        """
        The raw loss is read, not the logged one, with the number of targets that are not ignore_index where
        the batch shows them. Single zeros are not reported, a row of them is.
        """
    ),
    evidence=_evidence,
    remedies=(
        Remedy(
            title="Truncate the prompt, not the answer, and count samples without a label before "
            "training",
            snippet=code(
                """
                room = max_length - answer.numel()
                ids = torch.cat([prompt[-room:], answer])
                labels = torch.cat([torch.full((room,), -100), answer])
                assert labels.ne(-100).any()
                loss = torch.nn.functional.cross_entropy(table[ids], labels)
                """
            ),
            safety="changes-training",
        ),
        Remedy(
            title="Do not clamp or replace the loss: above the bound its gradient is 0; use a "
            "smooth limit",
            snippet=code(
                """
                ids = torch.cat([prompt, answer])
                labels = torch.cat([torch.full_like(prompt, -100), answer])
                raw = torch.nn.functional.cross_entropy(table[ids], labels)
                loss = 100 * torch.tanh(raw / 100)
                """
            ),
            safety="changes-training",
        ),
    ),
    setup=code(
        """
        import torch

        prompt, answer, max_length = torch.arange(6), torch.tensor([1, 2]), 6
        table = torch.randn(8, 8, requires_grad=True)
        """
    ),
    bad=code(
        """
        ids = torch.cat([prompt, answer])[:max_length]  # the answer is cut off
        labels = torch.cat([torch.full_like(prompt, -100), answer])[:max_length]
        loss = torch.nn.functional.cross_entropy(table[ids], labels, reduction='sum')
        """
    ),
    see=(
        "hpcaitech/ColossalAI#5370",
        "princeton-nlp/SimPO#35",
    ),
)

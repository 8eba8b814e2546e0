"""SG703: only the compiled graph makes it."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import CERTAIN, Proof, Rule, code, prose
from stepguard.records import Remedy


def _evidence(case: Case) -> Proof | None:
    if not case.evidence.compiled_only:
        return None
    first = (
        "the compiled step is non-finite again; the same step run eagerly on the same weights "
        "and batch is finite"
    )
    return Proof(confidence=CERTAIN, evidence=(first, case.verdict.summary))


RULE = Rule(
    code="SG703",
    title="only the compiled graph produces it",
    what=prose(
        """
        The same step, with the same weights and batch, is finite when run eagerly and non-finite when
        compiled.
        """
    ),
    why=prose(
        """
        Compilation fuses and reorders: an intermediate that eager rounds to half precision stays in float32
        or the other way round, a fused kernel drops a guard against 0, or the compiler is wrong for this
        shape or device.
        """
    ),
    how=prose(
        """
        The step is replayed eagerly under torch.compiler.set_stance('force_eager'). Clean there and bad when
        compiled again is this finding; clean in both is SG702.
        """
    ),
    evidence=_evidence,
    remedies=(
        Remedy(
            title="Leave the guilty part out of the graph until it is found",
            snippet=code(
                """
                @torch.compiler.disable
                def scale(x):
                    return x / x.abs().amax().clamp_min(1e-6)

                loss = torch.compile(lambda x: scale(x).sum(), backend=wrong_backend)(x)
                """
            ),
        ),
        Remedy(
            title="Narrow it down: backend='eager', then 'aot_eager', then 'inductor' shows which "
            "stage does it",
            snippet="loss = torch.compile(lambda x: (x / x.abs().amax()).sum(), "
            "backend='eager')(x)",
        ),
        Remedy(
            title="Make fused kernels round as eager does: "
            "torch._inductor.config.emulate_precision_casts = True",
            safety="changes-numbers",
        ),
    ),
    setup=code(
        """
        import torch

        x = torch.tensor([1.0, 2.0], requires_grad=True)

        def wrong_backend(graph, inputs):  # stands in for a miscompiled kernel: its division has lost its divisor
            def run(*args):
                out = graph(*args)
                divides = any('div' in str(node.target) for node in graph.graph.nodes)
                return tuple(o / 0 for o in out) if divides else out
            return run
        """
    ),
    bad="loss = torch.compile(lambda x: (x / x.abs().amax()).sum(), backend=wrong_backend)(x)",
    see=(
        "pytorch/pytorch#114109",
        "pytorch/pytorch#146129",
        "https://docs.pytorch.org/docs/stable/generated/torch.compiler.set_stance.html",
    ),
)

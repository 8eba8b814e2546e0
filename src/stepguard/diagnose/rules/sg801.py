"""SG801: precision settings that contradict each other."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.dtypes import NARROW, plain
from stepguard.diagnose.rule import PLAUSIBLE, Proof, Rule, code, prose
from stepguard.records import Remedy


def _evidence(case: Case) -> Proof | None:
    said = tuple(
        sentence
        for sentence in (_disagrees(case), _unscaled(case), _half_weights(case))
        if sentence
    )
    if not said:
        return None
    alone = case.origin is None and not case.verdict.bad
    return Proof(confidence=0.85 if alone else PLAUSIBLE, evidence=said)


def _real(case: Case) -> str | None:
    """What autocast computes in: told by the run, or seen in the replay."""
    return case.facts.autocast_dtype or case.evidence.autocast


def _disagrees(case: Case) -> str:
    wanted, real = case.facts.configured_dtype, _real(case)
    if wanted is None or plain(wanted) == plain(real or "float32"):
        return ""
    return (
        f"{plain(wanted)} is configured, but inside the step autocast gives "
        f"{plain(real or 'float32')}"
    )


def _unscaled(case: Case) -> str:
    real = plain(_real(case) or "")
    if real not in NARROW or case.facts.scaling != "none":
        return ""
    return f"autocast runs in {real} without a loss scale: gradients below 6e-08 are 0"


def _half_weights(case: Case) -> str:
    half = [name for name in case.facts.param_dtypes if plain(name) in NARROW]
    if not half or case.facts.scaling != "dynamic":
        return ""
    return (
        f"parameters are {', '.join(half)} under a GradScaler, which refuses to unscale "
        f"half-precision gradients"
    )


RULE = Rule(
    code="SG801",
    title="precision settings contradict each other",
    what=prose(
        """
        Configuration, launcher and code disagree on the precision, or agree on one that does not work:
        float16 without a loss scale, half-precision weights under a GradScaler, bfloat16 configured and
        float16 running.
        """
    ),
    why=prose(
        """
        Three places can set it (the script, the launcher's file, the model's dtype), and the silent defaults
        differ: torch.autocast('cuda') without a dtype is float16, and Accelerator(mixed_precision='no') wins
        over a launcher's bf16.
        """
    ),
    how=prose(
        """
        The dtype is probed inside the step's own autocast context and compared with the configured one, the
        dtypes of the parameters and the presence of a loss scale.
        """
    ),
    evidence=_evidence,
    remedies=(
        Remedy(
            title="Name the dtype where the context is opened, and check it there once",
            snippet=code(
                """
                with torch.autocast('cpu', dtype=configured):
                    out = layer(x)
                assert out.dtype == configured, (out.dtype, configured)
                loss = out.float().pow(2).mean() * 1e-6
                """
            ),
        ),
        Remedy(
            title="If it has to be float16, scale the loss",
            snippet=code(
                """
                scaler = torch.amp.GradScaler('cpu', init_scale=2.0**16)
                with torch.autocast('cpu', dtype=torch.float16):
                    loss = layer(x).float().pow(2).mean() * 1e-6
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                """
            ),
            safety="changes-numbers",
        ),
    ),
    setup=code(
        """
        import torch

        configured = torch.bfloat16
        layer = torch.nn.Linear(8, 2, bias=False)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        x = torch.full((2, 8), 0.01)
        default = torch.float16  # what torch.autocast('cuda') takes when no dtype is given
        """
    ),
    bad=code(
        """
        with torch.autocast('cpu', dtype=default):
            loss = layer(x).float().pow(2).mean() * 1e-6  # a small term: its gradients are 0 in float16
        """
    ),
    see=(
        "engichang1467/Open-Rig3R#35",
        "huggingface/accelerate#1693",
        "https://docs.pytorch.org/docs/stable/amp.html",
    ),
)

"""SG603: a checkpoint that must not be used."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import LIKELY, Proof, Rule, code, prose
from stepguard.diagnose.wording import describe
from stepguard.records import Remedy


def _evidence(case: Case) -> Proof | None:
    if case.phase != "checkpoint":
        return _brought_in(case)
    which = (
        f"`{case.tensor}` in the checkpoint is not usable"
        if case.tensor
        else "the checkpoint is not usable"
    )
    bad = next((o for o in (*case.inputs, case.output) if o is not None and not o.finite), None)
    amount = describe(bad) if bad is not None else ""
    return Proof(confidence=0.95, evidence=(which, amount, case.verdict.summary))


def _brought_in(case: Case) -> Proof | None:
    """State that was loaded in this process and is bad before its first step has come out of the
    checkpoint so.
    """
    fresh = case.facts.resumed and case.facts.committed == 0
    if not fresh or case.phase != "state" or not case.tensor or case.reading.state_born:
        return None
    text = (
        f"`{case.tensor}` is non-finite before the first step of a run whose state was loaded "
        f"from a checkpoint"
    )
    return Proof(confidence=LIKELY, evidence=(text, "no step of this process has changed it"))


RULE = Rule(
    code="SG603",
    title="corrupted checkpoint",
    what=prose(
        """
        A checkpoint is damaged, incomplete, or complete with NaN or Inf inside. Resuming from it ruins the
        run from its first step.
        """
    ),
    why=prose(
        """
        The process was killed or the disk was full while torch.save wrote over the only copy; or training had
        gone NaN and the loop saved on schedule, rotating the last healthy file away.
        """
    ),
    how=prose(
        """
        `stepguard verify` reads every tensor of model, optimizer, scheduler and scaler, compares sizes and
        hashes with the seal, and names file, tensor and problem. The guard checks before it saves and refuses
        a state that is not good.
        """
    ),
    evidence=_evidence,
    remedies=(
        Remedy(
            title="Save through the guard: checked, written beside, synced, renamed. By hand the "
            "least is",
            snippet=code(
                """
                import os

                if all(value.isfinite().all() for value in model.state_dict().values()):
                    torch.save(model.state_dict(), path + '.new')
                    os.replace(path + '.new', path)
                model.load_state_dict(torch.load(path, weights_only=True))
                """
            ),
        ),
        Remedy(
            title="Resume from the last sealed checkpoint: guard.restore(); by hand, the newest "
            "that is finite",
            snippet=code(
                """
                torch.save(model.state_dict(), path)
                for candidate in (path, older):
                    state = torch.load(candidate, weights_only=True)
                    if all(value.isfinite().all() for value in state.values()):
                        model.load_state_dict(state)
                        break
                """
            ),
        ),
    ),
    setup=code(
        """
        import tempfile
        import torch

        model = torch.nn.Linear(2, 1)
        folder = tempfile.mkdtemp()
        path, older = folder + '/last.pt', folder + '/older.pt'
        torch.save(model.state_dict(), path)
        torch.save(model.state_dict(), older)
        with torch.no_grad():
            model.weight.fill_(float('nan'))  # training has gone bad
        """
    ),
    bad=code(
        """
        torch.save(model.state_dict(), path)  # over the last good one
        model.load_state_dict(torch.load(path, weights_only=True))
        """
    ),
    see=(
        "getainode/ainode#186",
        "ludwig-ai/ludwig#3740",
        "Lightning-AI/pytorch-lightning#688",
    ),
)

"""`checklist.recovery`: after a bad stretch the run goes back to a good state by itself."""

from __future__ import annotations

from stepguard.preflight.answers import Seen, passed, warned
from stepguard.preflight.inspection import Inspection
from stepguard.preflight.item import Item
from stepguard.preflight.items.checklist_loss_checked import guarded_at


def _look(seen: Inspection) -> Seen:
    guard = seen.subject.guard
    policy = getattr(guard, "policy", None)
    actions = tuple(getattr(policy, "actions", ()))
    if actions and "rewind" not in actions:
        return warned(
            f"the policy is {', '.join(actions)}, without rewind",
            fix="Add 'rewind' to Policy.actions.",
        )
    place = guarded_at(seen)
    if not place:
        return warned(
            f"nothing goes back to a good state by itself in {seen.project.files} source files",
            fix="guard = stepguard.Guard(model, optimizer, config=GuardConfig(run_dir=..., "
            "checkpoint_every=1000)).",
        )
    kept = getattr(guard, "run_dir", None) or seen.subject.run_dir
    where = (
        f", checkpoints below {kept}"
        if kept
        else "; without a run_dir nothing survives the process"
    )
    return passed(
        f"stepguard's policy ({place}): {', '.join(actions) or 'skip, rewind, stop'}{where}"
    )


ITEM = Item(
    id="checklist.recovery", title="automatic recovery from the last good state", look=_look
)

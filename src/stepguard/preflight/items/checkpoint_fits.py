"""`checkpoint.fits`: the checkpoint's tensors are the model's."""

from __future__ import annotations

from stepguard.preflight.answers import Pointless, Seen, count, failed, passed, some
from stepguard.preflight.inspection import Inspection
from stepguard.preflight.item import Item

PREFIXES = ("module.", "_orig_mod.")


def _look(seen: Inspection) -> Seen:
    stored = seen.stored
    if not stored.shapes:
        raise Pointless(
            f"{stored.path.name} holds no model state that can be read "
            f"({some(stored.unread, 1) or 'empty'})"
        )
    wanted = {
        name: tuple(tensor.shape)
        for name, tensor in seen.model.state_dict().items()
        if hasattr(tensor, "shape")
    }
    had = {_bare(name): shape for name, shape in stored.shapes.items()}
    wanted = {_bare(name): shape for name, shape in wanted.items()}
    missing, extra = sorted(wanted.keys() - had.keys()), sorted(had.keys() - wanted.keys())
    other = sorted(name for name in wanted.keys() & had.keys() if wanted[name] != had[name])
    said = [f"missing: {some(missing)}"] if missing else []
    said += [f"not in the model: {some(extra)}"] if extra else []
    said += (
        [f"{some([f'{name} {had[name]} for {wanted[name]}' for name in other], 2)}: other shape"]
        if other
        else []
    )
    if said:
        return failed(
            *said,
            fix="Build the model with the settings of the checkpoint; strict=False hides this.",
        )
    return passed(
        f"{count(len(wanted), 'tensor')} of {stored.path.name} match the model in name and shape"
    )


def _bare(name: str) -> str:
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name


ITEM = Item(id="checkpoint.fits", title="the checkpoint fits the model", look=_look)

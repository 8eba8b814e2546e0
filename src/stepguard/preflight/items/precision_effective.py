"""`precision.effective`: an operation run in the model's real context has the dtype that was asked
for.
"""

from __future__ import annotations

import torch

from stepguard.preflight.answers import Seen, failed, passed, warned
from stepguard.preflight.inspection import Inspection
from stepguard.preflight.item import Item
from stepguard.preflight.items.precision_configured import asked
from stepguard.preflight.probe import Probe


def disagreeing(seen: Inspection) -> list[str]:
    """Places that ask for another dtype than the probe found; weights kept in half precision
    explain themselves.
    """
    return [
        place
        for place, dtype in asked(seen).items()
        if dtype is not None and dtype != seen.probe.dtype
    ]


def emulated(probe: Probe) -> bool:
    """bfloat16 on a CUDA device that only pretends; torch's own question says yes to that by
    default.
    """
    if probe.device != "cuda" or probe.dtype != "bfloat16":
        return False
    return not torch.cuda.is_bf16_supported(including_emulation=False)


def _look(seen: Inspection) -> Seen:
    probe = seen.probe
    wrong = disagreeing(seen)
    if not wrong and emulated(probe):
        return warned(
            probe.how,
            f"this {probe.device} device has no bfloat16 arithmetic and emulates it",
            fix="Use float16 with a GradScaler, or float32: "
            "torch.cuda.is_bf16_supported(including_emulation=False).",
        )
    if not wrong:
        return passed(probe.how)
    places = asked(seen)
    said = tuple(f"{place} asks for {places[place]}" for place in wrong)
    return failed(probe.how, *said, fix=_fix(seen, str(places[wrong[0]])))


def _fix(seen: Inspection, wanted: str) -> str:
    probe = seen.probe
    if wanted == "float16" and probe.device == "cpu" and probe.dtype == "float32":
        return (
            "On a CPU fp16 is ignored by accelerate and transformers; use bf16 there, or ask "
            "for no."
        )
    if (
        list(seen.param_dtypes)[:1] == [probe.dtype]
        and probe.autocast is None
        and probe.dtype != "float32"
    ):
        return (
            f"The weights themselves are {probe.dtype}: load them in float32, or ask for "
            f"{probe.dtype}."
        )
    if probe.autocast is None:
        return (
            f"Open the context around the forward pass: torch.autocast({probe.device!r}, "
            f"dtype=torch.{wanted})."
        )
    return (
        f"Name the dtype where the context is opened: torch.autocast({probe.device!r}, "
        f"dtype=torch.{wanted})."
    )


ITEM = Item(
    id="precision.effective", title="the step really runs in the configured precision", look=_look
)

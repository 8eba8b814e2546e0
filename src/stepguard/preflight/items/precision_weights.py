"""`precision.weights`: the parameters have the dtype the configuration gives them, and one dtype."""

from __future__ import annotations

from stepguard.preflight.answers import Missing, Seen, failed, passed, warned
from stepguard.preflight.inspection import Inspection
from stepguard.preflight.item import Item
from stepguard.preflight.settings.precision import meant
from stepguard.tensors.dtypes import dtype_name


def _look(seen: Inspection) -> Seen:
    sizes = seen.param_dtypes
    said = ", ".join(f"{size:,} in {name}" for name, size in sizes.items())
    setting = seen.setting("weights")
    asked = meant(setting.value) if setting is not None else None
    if (
        asked is not None
        and asked not in sizes
        and not _by_autocast(seen, setting.key if setting else "", asked)
    ):
        fix = (
            f"Pass the dtype on to the model: model.to(torch.{asked}), or change "
            f"{setting.key if setting else ''}."
        )
        return failed(f"{setting} is configured, the parameters are: {said}", fix=fix)
    trained = {dtype_name(p.dtype) for p in seen.model.parameters() if p.requires_grad}
    if len(trained) > 1:
        fix = (
            "Train parameters of one dtype; load adapters and heads in the dtype of the rest, or "
            "all in float32."
        )
        return warned(f"trained parameters mix dtypes: {said}", fix=fix)
    return passed(f"parameters: {said or 'none'}")


def _by_autocast(seen: Inspection, key: str, asked: str) -> bool:
    """A plain `dtype` may mean the arithmetic: float32 weights under autocast are then what was
    asked for.
    """
    if key.rpartition(".")[2] != "dtype" or "float32" not in seen.param_dtypes:
        return False
    try:
        return seen.probe.dtype == asked
    except Missing:
        return False


ITEM = Item(id="precision.weights", title="parameters have the configured dtype", look=_look)

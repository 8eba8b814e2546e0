"""The outliers of a step that is about to be committed: told, and kept out where that is asked for."""

from __future__ import annotations

from collections.abc import Callable

from stepguard.engine.context import Context


def keep_out_outliers(context: Context) -> Callable[[], None] | None:
    """The call that puts skipped gradients back after the update; None where the gradients are as
    they were.
    """
    if context.outliers is None:
        return None
    words = context.outliers.words()
    if words:
        context.outputs.note("outlier", words)
    return context.outliers.act()

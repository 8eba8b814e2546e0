"""`config.values`: values no run can use: a NaN, a negative rate, a probability above 1."""

from __future__ import annotations

import math

from stepguard.preflight.answers import Seen, failed, passed, some
from stepguard.preflight.inspection import Inspection
from stepguard.preflight.item import Item
from stepguard.preflight.settings.keys import Setting, as_number, flat, last_part, names

POSITIVE = names(
    "lr learning_rate max_lr peak_lr base_lr batch_size train_batch_size "
    "gradient_accumulation_steps eps adam_epsilon "
    "epochs num_epochs num_train_epochs hidden_size num_layers"
)
"""Keys that must be above 0."""
SHARES = (
    "beta1",
    "beta2",
    "adam_beta1",
    "adam_beta2",
    "dropout",
    "ema_decay",
    "momentum",
    "label_smoothing",
)
"""Keys that must lie in [0, 1]."""


def _look(seen: Inspection) -> Seen:
    leaves = list(flat(seen.needed_config()))
    wrong = [sentence for leaf in leaves if (sentence := _wrong(leaf))]
    if wrong:
        return failed(some(wrong), fix="Correct these values.")
    return passed(f"{len(leaves)} values within what they can be")


def _wrong(leaf: Setting) -> str:
    if isinstance(leaf.value, float) and math.isnan(leaf.value):
        return f"{leaf.key} is NaN"
    value, name = as_number(leaf.value), last_part(leaf.key)
    if value is None:
        return ""
    if name in POSITIVE and value <= 0:
        return f"{leaf} must be above 0"
    if name in SHARES and not 0 <= value <= 1:
        return f"{leaf} must lie between 0 and 1"
    return ""


ITEM = Item(id="config.values", title="values are possible", look=_look)

"""Which keys of a configuration were read, by every way of reading."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from stepguard.check.settings import Tracked, plain, unread

VALUES: dict[str, Any] = {
    "lr": 1.0,
    "model": {"width": 8, "depth": 2},
    "stages": [{"a": 1}, {"a": 2}],
    "empty": {},
}
ALL = ["lr", "model.width", "model.depth", "stages.0.a", "stages.1.a", "empty"]


def takes(**keywords: Any) -> Any:
    return keywords


@pytest.mark.parametrize(
    ("read", "left"),
    [
        (lambda c: c["lr"], ALL[1:]),
        (lambda c: c.lr, ALL[1:]),
        (lambda c: c.get("lr"), ALL[1:]),
        (lambda c: c.model.width, [ALL[0], *ALL[2:]]),
        (lambda c: c["model"]["width"], [ALL[0], *ALL[2:]]),
        (lambda c: takes(**c.model), [ALL[0], *ALL[3:]]),
        (lambda c: dict(c.model), [ALL[0], *ALL[3:]]),
        (lambda c: list(c.model.items()), [ALL[0], *ALL[3:]]),
        (lambda c: list(c.model.values()), [ALL[0], *ALL[3:]]),
        (lambda c: c.stages[1].a, [*ALL[:4], ALL[5]]),
        (lambda c: copy.deepcopy(c).lr, ALL[1:]),
        (lambda c: copy.copy(c).model.width, [ALL[0], *ALL[2:]]),
        (lambda c: ("lr" in c, len(c), list(c), c.model.keys(), repr(c)), ALL),
        (lambda c: c.model, ALL),
        (lambda c: getattr(c, "nothing", None), ALL),
        (lambda c: c.pop("lr"), ALL[1:]),
    ],
)
def test_reads_are_counted(read: Any, left: list[str]) -> None:
    config = Tracked(VALUES)
    read(config)
    assert unread(config) == left


def test_it_behaves_as_a_mapping_with_attributes() -> None:
    config = Tracked(VALUES)
    assert takes(**config.model) == {"width": 8, "depth": 2}
    config.model.width = 16
    config["new"] = 1
    assert (config.model["width"], config.new) == (16, 1)
    assert VALUES["model"]["width"] == 8
    with pytest.raises(AttributeError, match=r"the configuration has no model\.nothing"):
        _ = config.model.nothing
    with pytest.raises(KeyError):
        config["nothing"]
    assert plain(config)["lr"] == 1.0

"""The registry holds every item, and the healthy project passes all of them."""

from __future__ import annotations

import inspect

import pytest

from preflight.asking import CONFIG, HEALTHY, ask, built, saved
from stepguard.check import items, items_step
from stepguard.check.preflight import TITLES
from stepguard.records.checks import Preflight


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Preflight:
    """Everything given: configuration, launcher, checkpoint, disk."""
    folder = tmp_path_factory.mktemp("healthy")
    parts = built("training:build")
    path = saved(
        folder / "last.pt",
        parts["model"],
        parts["optimizer"],
        parts["scheduler"],
        config=CONFIG,
        versions={},
    )
    return ask(HEALTHY, checkpoint=path, run_dir=folder)


def test_nothing_is_reported_on_the_healthy_project(healthy: Preflight) -> None:
    assert {o.id: o.evidence for o in healthy.of("warn", "fail")} == {}
    assert healthy.ok
    assert {o.id for o in healthy.of("not_checked")} == set()


def test_every_item_looks_at_the_healthy_project(healthy: Preflight) -> None:
    assert [o.id for o in healthy.outcomes] == list(TITLES)
    idle = {o.id for o in healthy.of("not_applicable")}
    assert idle == {"scaler.missing", "scaler.fits", "optimizer.stalled"}


def test_healthy_project_is_aligned_because_the_probe_agrees(healthy: Preflight) -> None:
    assert healthy.alignment == "aligned"
    facts = dict(healthy.facts)
    assert facts["mixed precision"].startswith("bfloat16 (probed: 3 of 3 matrix products")
    assert facts["learning rate"] == "2e-06 now, 5e-05 at its peak"
    assert facts["distributed type"] == "MULTI_CPU"


def test_every_item_passes_the_healthy_project(healthy: Preflight) -> None:
    assert {outcome.status for outcome in healthy.outcomes} == {"pass", "not_applicable"}


def test_every_item_function_is_in_the_table() -> None:
    written = []
    for module in (items, items_step):
        for name, value in inspect.getmembers(module, inspect.isfunction):
            ours = value.__module__ == module.__name__ and name[0] != "_"
            if ours and list(inspect.signature(value).parameters) == ["run"]:
                written.append(name)
    helpers = ["asked", "configured_rate"]
    assert sorted(written) == sorted([*helpers, *(name.replace(".", "_") for name in TITLES)])


def test_sections_stay_together() -> None:
    ids = list(TITLES)
    assert len(ids) == 46
    sections = list(dict.fromkeys(item.partition(".")[0] for item in ids))
    assert sorted(ids, key=lambda item: sections.index(item.partition(".")[0])) == ids

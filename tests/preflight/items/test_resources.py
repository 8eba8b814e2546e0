"""A full disk and too little memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from preflight.asking import HEALTHY, ask_one
from stepguard.check import items as items_project


def test_full_disk_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        items_project.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 4000})
    )
    outcome = ask_one(HEALTHY, "disk.space", run_dir=tmp_path / "not" / "there" / "yet")
    assert outcome.status == "fail"
    assert (
        "4 kB free" in outcome.evidence[1] and "2 kept and one being written" in outcome.evidence[0]
    )


def test_too_little_memory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(items_project, "available_memory", lambda device: 2000)
    outcome = ask_one(HEALTHY, "memory.estimate")
    assert outcome.status == "fail"
    assert (
        "2 slots a parameter" in outcome.evidence[0] and "2 kB free on cpu" in outcome.evidence[1]
    )

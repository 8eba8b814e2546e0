"""Moving bad checkpoints away and back: a crash in between loses nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from check import saved
from stepguard._errors import StoreError
from stepguard.check import quarantine
from stepguard.check.verify import check_checkpoint, file_digest
from stepguard.records.checks import Problem, Verification


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return saved.run_with_bad_ones(tmp_path / "run")


@pytest.mark.parametrize("survived", range(3))
def test_crash_in_between_loses_nothing(
    run: Path, monkeypatch: pytest.MonkeyPatch, survived: int
) -> None:
    before = saved.snapshot(run)
    real, count = Path.rename, 0

    def rename(self: Path, target: Path) -> Path:
        nonlocal count
        if self.suffix != ".tmp":
            if count == survived:
                raise KeyboardInterrupt
            count += 1
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(KeyboardInterrupt) if survived < 2 else pytest.MonkeyPatch.context():
        checkpoints = quarantine.checkpoints_below(run)
        checked = [check_checkpoint(each, lambda count: None) for each in checkpoints]
        bad = [found for found in checked if quarantine.is_bad(found)]
        quarantine.apply(run, quarantine.plan(run, checkpoints, bad))
    monkeypatch.undo()
    quarantine.undo(run)
    assert saved.snapshot(run) == before


def forge(folder: Path, original: str, place: str, digests: dict[str, str]) -> None:
    """A manifest that nobody has written by moving something."""
    entry = {"original": original, "place": place, "reasons": [], "digests": digests, "size": 1}
    manifest = folder / "quarantine" / "manifest.json"
    manifest.parent.mkdir(exist_ok=True)
    manifest.write_text(json.dumps({"schema": 1, "moves": [entry]}))


@pytest.mark.parametrize("place", ["../x", "/etc/x", "good.pt", ""])
def test_manifest_that_leads_out_is_refused(run: Path, place: str) -> None:
    forge(run, "bad2.pt", place, {})
    with pytest.raises(StoreError):
        quarantine.undo(run)


def test_only_what_is_shown_to_be_bad_is_bad() -> None:
    unread = Problem(file="m.pt", kind="limit", detail="too large")
    broken = Problem(file="m.pt", kind="nan", detail="1 NaN of 3", tensor="w")
    assert not quarantine.is_bad(Verification(path="m.pt", format="pickle", problems=(unread,)))
    assert quarantine.is_bad(Verification(path="m.pt", format="pickle", problems=(unread, broken)))


def test_reasons_are_listed_in_part_and_counted(tmp_path: Path) -> None:
    path = saved.save_zip(tmp_path / "m.pt", {"w": torch.ones(2)})
    nan = [
        Problem(file="m", kind="nan", detail=f"{number} NaN", tensor="w") for number in range(14)
    ]
    found = Verification(path=str(path), format="torch zip", problems=tuple(nan))
    checkpoints = quarantine.checkpoints_below(tmp_path)
    (move,) = quarantine.plan(tmp_path, checkpoints, [found])
    assert len(move.reasons) == 11
    assert (move.reasons[0], move.reasons[-1]) == ("nan: w: 0 NaN", "and 4 more")
    assert (move.original, move.place) == ("m.pt", "quarantine/m.pt")


@pytest.mark.parametrize(
    ("original", "content"),
    [
        ("sitecustomize.py", b"print('taken over')"),
        (".git/hooks/post-checkout.pt", b"#!/bin/sh"),
        ("torch/__init__.py", b"print('taken over')"),
        ("model.pt", b"other bytes than the manifest says"),
    ],
)
def test_forged_manifest_does_not_put_a_file_where_a_program_looks(
    tmp_path: Path, original: str, content: bytes
) -> None:
    place = tmp_path / "quarantine" / original
    place.parent.mkdir(parents=True)
    place.write_bytes(content)
    digest = file_digest(place) if original != "model.pt" else "0" * 32
    forge(tmp_path, original, f"quarantine/{original}", {place.name: digest})
    back, stays = quarantine.undo(tmp_path)
    assert not back and [move.original for move, _ in stays] == [original]
    assert place.exists() and not (tmp_path / original).exists()


def test_forged_manifest_cannot_choose_the_goal(run: Path) -> None:
    place = run / "quarantine" / "harmless.pt"
    place.parent.mkdir()
    place.write_bytes((run / "good.pt").read_bytes())
    forge(run, "latest.pt", "quarantine/harmless.pt", {"harmless.pt": file_digest(place)})
    with pytest.raises(StoreError, match="stepguard did not write it"):
        quarantine.undo(run)
    assert place.exists() and not (run / "latest.pt").exists()

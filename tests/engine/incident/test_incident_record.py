"""An incident is on record in its folder, the journal and the guard, whatever fails on the way."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import stepguard.engine.incident.incident_record as module
from engine.parts import incident_of, step_of
from scenes import batches, plain_net, quiet
from stepguard import Guard
from stepguard.engine.incident.incident_record import free_id, incident_folder, record
from stepguard.engine.protect import NotExplained
from stepguard.journal import read_run

DATA = batches(2)


@pytest.fixture
def guard(tmp_path: Path) -> Iterator[Guard]:
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Guard(model, optimizer, config=quiet(run_dir=tmp_path, capsule="off")) as made:
        yield made


def test_incident_is_written_to_its_folder_and_the_journal(guard: Guard, tmp_path: Path) -> None:
    incident = record(guard._context, incident_of(), step_of(DATA[0]))
    written = json.loads((incident_folder(tmp_path, incident.id, 0) / "incident.json").read_text())
    assert written["id"] == incident.id
    assert guard.incidents == (incident,)
    assert [found.id for found in read_run(tmp_path).incidents] == [incident.id]


def test_other_ranks_have_folders_of_their_own(tmp_path: Path) -> None:
    assert incident_folder(tmp_path, "a", 2) == tmp_path / "incidents" / "a-rank2"


def test_name_that_is_taken_in_memory_or_on_disk_gets_a_number(
    guard: Guard, tmp_path: Path
) -> None:
    context = guard._context
    assert free_id(context, "00000000-nonfinite_loss") == "00000000-nonfinite_loss"
    record(context, incident_of(), step_of(DATA[0]))
    assert free_id(context, "00000000-nonfinite_loss") == "00000000-nonfinite_loss-2"
    incident_folder(tmp_path, "00000000-nonfinite_loss-2", 0).mkdir()
    assert free_id(context, "00000000-nonfinite_loss") == "00000000-nonfinite_loss-3"


def test_folder_that_cannot_be_written_costs_the_folder_only(
    guard: Guard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(module, "write_file", full)
    incident = record(guard._context, incident_of(), step_of(DATA[0]))
    assert guard.incidents == (incident,)
    notes = [note["summary"] for note in read_run(tmp_path).notes]
    assert any("could not be written: OSError: No space left" in said for said in notes), notes


def test_fault_in_recording_is_a_warning_and_not_an_error(
    guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object) -> None:
        raise ArithmeticError("a fault of our own")

    monkeypatch.setattr(module, "note_lost", fails)
    incident = incident_of()
    with pytest.warns(NotExplained, match="a fault of our own"):
        assert record(guard._context, incident, step_of(DATA[0])) is incident

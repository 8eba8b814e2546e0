"""`stepguard selftest` on the CPU; tests/device runs the same checks on a second device type."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from stepguard.cli.app import app
from stepguard.run import selftest


def test_every_promise_holds_on_the_cpu() -> None:
    done = CliRunner().invoke(app, ["selftest", "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout.splitlines()[-1])
    holds = {check["name"]: check["holds"] for check in told["checks"]}
    assert told["ok"] is True
    assert holds.pop("a stream of its own") is None
    assert holds.pop("synchronisations") is None
    assert set(holds.values()) == {True}


def test_a_broken_promise_fails_and_the_rest_is_still_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(device: torch.device) -> selftest.Row:
        raise RuntimeError("kernel not implemented")

    monkeypatch.setattr(selftest, "CHECKS", {"broken": broken, "vetoed": selftest.vetoed})
    done = CliRunner().invoke(app, ["selftest"])
    assert done.exit_code == 5
    assert "RuntimeError: kernel not implemented" in " ".join(done.output.split())
    assert "sample 4, SG202" in " ".join(done.output.split())


def test_a_device_that_is_not_there_is_one_line() -> None:
    done = CliRunner().invoke(app, ["selftest", "--device", "nonsense"])
    assert done.exit_code == 2
    assert "device 'nonsense' cannot be used here" in done.output

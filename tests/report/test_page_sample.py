"""The guilty sample on a card: a picture, text or numbers, and nothing outside of the run."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from stepguard.records import Incident, Origin, Reading, Verdict
from stepguard.report.page import NOT_FINITE, samples_of


def _incident(capsule: str | None = "incidents/x/capsule", micro: int = 0) -> Incident:
    return Incident(
        id="x",
        step=1,
        verdict=Verdict(kind="nonfinite_loss"),
        reading=Reading(step=1),
        origin=Origin(step=1, phase="forward", samples=(1,), micro_batch=micro),
        capsule=capsule,
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose capsule holds pictures, numbers and texts."""
    folder = tmp_path / "run" / "incidents" / "x" / "capsule"
    folder.mkdir(parents=True)
    picture = np.zeros((2, 3, 8, 10), np.float32)
    picture[1, :, 0, 0] = np.nan
    picture[1, 0, 1, 1] = 1.0
    ids = np.arange(200).reshape(2, 100)
    save_file(
        {"batch/0/picture": picture, "batch/0/ids": ids, "model/w": ids},
        folder / "tensors.safetensors",
    )
    text = {"list": [{"value": "good", "kind": "str"}, {"value": "<b>bad</b>", "kind": "str"}]}
    facts = {"micro_batches": [{"mapping": [["caption", text]], "attributes": False}]}
    (folder / "capsule.json").write_text(json.dumps(facts))
    return tmp_path / "run"


def test_text_numbers_and_picture_of_the_named_sample_are_shown(run: Path) -> None:
    text, ids, picture = samples_of(_incident(), run)
    assert (text["kind"], text["text"]) == ("text", "<b>bad</b>")
    assert ids["text"].startswith("100, 101, 102") and ids["text"].endswith("52 more")
    assert (picture["kind"], picture["width"], picture["height"]) == ("image", 10, 8)
    pixels = np.frombuffer(base64.b64decode(picture["pixels"]), np.uint8).reshape(8, 10, 3)
    assert tuple(pixels[0, 0]) == NOT_FINITE
    assert tuple(pixels[1, 1]) == (255, 0, 0)


def test_a_path_that_leads_out_of_the_run_opens_nothing(run: Path) -> None:
    assert samples_of(_incident("../run/../../etc"), run) == []
    inside = run / "incidents" / "x" / "capsule"
    assert samples_of(_incident(str(inside)), run / "incidents" / "nothing") == []
    assert samples_of(_incident("a\0b"), run) == []


def test_without_capsule_or_sample_nothing_is_shown(run: Path) -> None:
    assert samples_of(_incident(None), run) == []
    assert samples_of(_incident("incidents/gone"), run) == []


def test_damaged_capsule_says_that_it_cannot_be_shown(run: Path) -> None:
    (run / "incidents" / "x" / "capsule" / "capsule.json").write_text("[1, 2")
    (shown,) = samples_of(_incident(), run)
    assert shown["caption"].startswith("sample 1 cannot be shown")

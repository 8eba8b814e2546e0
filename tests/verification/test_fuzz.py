"""Damaged and invented files: a reader answers with a result, whatever the bytes are, and runs
nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.parts import fuzz
from hypothesis import given, settings
from hypothesis import strategies as st

import stepguard
from verification import hostile

CASES = 1500


@pytest.mark.slow
def test_readers_survive_damage_of_every_format() -> None:
    assert fuzz.run(CASES, None, seed=1, keep=None) == CASES


def test_exception_in_a_reader_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise RecursionError("as a careless reader would")

    monkeypatch.setattr("stepguard.check.torch_file.parse", broken)
    with pytest.raises(RecursionError):
        fuzz.run(50, None, seed=1, keep=None)


def test_code_that_runs_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle

    monkeypatch.setattr(
        "stepguard.check.torch_file.parse",
        lambda *arguments: pickle.loads(b"ccollections\nOrderedDict\n)R."),
    )
    with pytest.raises(AssertionError, match=r"pickle\.find_class"):
        fuzz.run(50, None, seed=1, keep=None)


@pytest.mark.slow
def test_nothing_that_is_good_reaches_for_anything_when_torch_loads_it(tmp_path: Path) -> None:
    loader = fuzz.Loader()
    canary = tmp_path / "canary"
    # the same process sees what the files do that verify refuses
    reached = {}
    for trick, content in hostile.evasions(canary).items():
        (tmp_path / "m.pt").write_bytes(content)
        reached[trick] = loader.load(tmp_path / "m.pt")["reached"]
    counts = fuzz.differ(600, seed=2, keep=tmp_path, loader=loader)
    assert counts["files"] == 600 and counts["loaded"] > 20
    assert not canary.exists()
    harmless = {trick for trick in reached if not reached[trick]}
    assert harmless <= {
        "archive in front",
        "archive behind",
        "second folder",
        "second pickle behind a number",
        "end record with a comment",
        "bytes between entries",
        "argument across the end of a frame, old",
    }


@settings(max_examples=300)
@given(st.binary(max_size=400), st.sampled_from(["m.pt", "m.pkl", "m.safetensors", "m.ckpt"]))
def test_any_bytes_give_a_result(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, name: str
) -> None:
    path: Path = tmp_path_factory.mktemp("any") / name
    path.write_bytes(content)
    assert stepguard.verify(path).bytes == len(content)

"""Opening: every byte is proven, damaged checkpoints are passed over by name, and a lost pointer is
no loss.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from benchmarks.disk.states import GOOD, state_at

from checkpoints.kit import held, names, saved
from stepguard._errors import StoreError
from stepguard.checkpoints import Store
from stepguard.checkpoints import store as opening

TENSORS = "tensors-00000.safetensors"


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped weight": (
        lambda p: flip(p / TENSORS, -5),
        "is not what was sealed: optimizer/weight/exp_avg_sq differs",
    ),
    "flipped header": (
        lambda p: flip(p / TENSORS, 20),
        "is not what was sealed: its header differs",
    ),
    "flipped fact": (
        lambda p: flip(p / "facts.json", 5),
        "is not what was sealed: its digest differs",
    ),
    "flipped seal": (lambda p: flip(p / "seal.json", 60), "does not match its own digest"),
    "torn tensors": (
        lambda p: (p / TENSORS).write_bytes((p / TENSORS).read_bytes()[:-9]),
        "is not whole: .* bytes",
    ),
    "longer tensors": (
        lambda p: (p / TENSORS).write_bytes((p / TENSORS).read_bytes() + b"\0"),
        "is not whole",
    ),
    "empty seal": (lambda p: (p / "seal.json").write_bytes(b""), "does not have the form of one"),
    "no seal": (lambda p: (p / "seal.json").unlink(), "seal.json is missing"),
    "no facts": (lambda p: (p / "facts.json").unlink(), "facts.json is missing"),
    "no tensors": (lambda p: (p / TENSORS).unlink(), f"{TENSORS} is missing"),
    "no folder": (lambda p: shutil.rmtree(p), "is missing"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_passed_over_by_name(damage: str, tmp_path: Path) -> None:
    store = Store(tmp_path)
    saved(store, 1, 2)
    harm, words = DAMAGES[damage]
    harm(tmp_path / "step-2")
    opened = store.open()
    assert held(opened) == 1
    reasons = " | ".join(f"{passed.path.name}: {passed.reason}" for passed in opened.passed_over)
    assert "step-2" in reasons
    with pytest.raises(StoreError, match=words):
        store.open(tmp_path / "step-2")


def test_error_names_every_candidate_and_why(tmp_path: Path) -> None:
    store = Store(tmp_path)
    saved(store, 1, 2, 3)
    flip(tmp_path / "step-3" / TENSORS, -5)
    (tmp_path / "step-2" / "facts.json").unlink()
    (tmp_path / "step-1" / "seal.json").write_bytes(b"{}")
    with pytest.raises(StoreError) as caught:
        store.open()
    text = str(caught.value)
    assert "holds no good checkpoint that can be used" in text
    for line in (
        "step-3: ",
        "exp_avg_sq differs",
        "step-2: ",
        "facts.json is missing",
        "step-1: ",
        "form of one",
    ):
        assert line in text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "last-good is missing"),
        (b"", "does not name a checkpoint"),
        (b"step-1\n", "does not name a checkpoint"),
        (b"../../etc/passwd 00000000000000000000000000000000\n", "does not name a checkpoint"),
        (b"step-1 00000000000000000000000000000000\n", "names step-1 with another seal"),
        (b"step-9 00000000000000000000000000000000\n", "step-9/seal.json is missing"),
    ],
)
def test_lost_or_damaged_pointer_falls_back_to_the_newest_good_and_says_so(
    content: bytes | None, words: str, tmp_path: Path
) -> None:
    store = Store(tmp_path)
    saved(store, 1, 2)
    (tmp_path / "last-good").unlink()
    if content is not None:
        (tmp_path / "last-good").write_bytes(content)
    opened = store.open()
    assert held(opened) == 2
    assert [passed.path.name for passed in opened.passed_over] == ["last-good"]
    assert words in opened.passed_over[0].reason
    saved(store, 3)
    assert store.open().passed_over == ()


def test_named_checkpoint_is_that_one_or_an_error(tmp_path: Path) -> None:
    store = Store(tmp_path)
    saved(store, 1, 2, 3)
    assert held(store.open("step-2")) == held(store.open(tmp_path / "step-2")) == 2
    flip(tmp_path / "step-2" / TENSORS, -5)
    with pytest.raises(
        StoreError, match=r"exp_avg_sq differs.*Other sealed checkpoints in .*: step-3, step-1"
    ):
        store.open("step-2")
    with pytest.raises(StoreError, match=r"step-7/seal\.json is missing"):
        store.open("step-7")


def test_reader_continues_when_its_checkpoint_is_removed_by_rotation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path, keep=1)
    saved(store, 1)
    read_seal = opening.read_seal

    def meanwhile(path: Path):  # type: ignore[no-untyped-def]
        seal = read_seal(path)
        monkeypatch.setattr(opening, "read_seal", read_seal)
        saved(store, 2, 3)
        return seal

    monkeypatch.setattr(opening, "read_seal", meanwhile)
    opened = Store(tmp_path).open()
    assert held(opened) == 3
    assert [(p.path.name, "was removed while" in p.reason) for p in opened.passed_over] == [
        ("step-1", True)
    ]


def test_opening_changes_nothing_on_disk(tmp_path: Path) -> None:
    saved(Store(tmp_path), 1)
    (tmp_path / ".step-2.1-1.tmp").mkdir()
    before = names(tmp_path), (tmp_path / "last-good").read_bytes()
    Store(tmp_path).open()
    assert (names(tmp_path), (tmp_path / "last-good").read_bytes()) == before


def test_opened_tensors_can_be_trained_on(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(1, state_at(1, 8), {}, GOOD)
    weight = store.open().tensors["model/weight"].requires_grad_()
    weight.square().sum().backward()
    assert weight.grad is not None and torch.equal(weight.grad, 2 * weight.detach())

"""Rows of a micro-batch are named only where loader, values or ids prove which samples they are."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import stepguard
from engine.parts import origin_of, step_of
from stepguard.engine.incident.samples import BatchPart, name_samples, parts_of, text_of
from stepguard.state.loader import Delivered, FoundBatch

WHOLE = torch.arange(24.0).reshape(8, 3)
ROWS = (40, 41, 42, 43, 44, 45, 46, 47)


class Loader:
    """A stand-in for the guard's loader: what it delivered for a step, and what it recognizes."""

    observed = False

    def __init__(self, delivered: list[Delivered], found: FoundBatch | None = None) -> None:
        self._delivered = delivered
        self._found = found

    def of_step(self, step: int) -> list[Delivered]:
        return self._delivered

    def find(self, batch: Any) -> FoundBatch | None:
        return self._found


def _delivered(tensor: Tensor, rows: tuple[int, ...] = ROWS) -> Delivered:
    dataset = range(1000)
    return Delivered(2, 5, 0, list(rows), dataset, (weakref.ref(tensor),))


def _parts(*batches: Any, loader: Any = None, key: str | None = None) -> list[BatchPart]:
    return parts_of(step_of(*batches), loader, key)


def test_without_a_loader_only_sizes_and_ids_are_known() -> None:
    (part,) = _parts({"x": WHOLE, "name": list("abcdefgh")}, key="name")
    assert (part.size, part.indices, part.place) == (8, None, None)
    assert part.ids_of([1, 3]) == ("b", "d")


def test_ids_of_another_count_than_samples_are_not_ids() -> None:
    (part,) = _parts({"x": WHOLE, "name": ["a", "b"]}, key="name")
    assert part.ids is None


def test_recognized_batch_has_its_indices_and_place() -> None:
    found = FoundBatch(_delivered(WHOLE))
    (part,) = _parts((WHOLE,), loader=Loader([], found))
    assert part.indices_of([0, 7]) == (40, 47)
    assert part.place == (2, 5)


def test_slice_of_a_batch_has_its_indices_but_no_place_unless_all_of_it_is_there() -> None:
    found = FoundBatch(_delivered(WHOLE), rows=(2, 3), of=8)
    (part,) = _parts((WHOLE[2:4],), loader=Loader([], found))
    assert part.indices_of([1]) == (43,)
    assert part.place is None


def test_moved_batches_are_known_by_their_order_and_values() -> None:
    (part,) = _parts((WHOLE.clone(),), loader=Loader([_delivered(WHOLE)]))
    assert part.indices == ROWS and part.place == (2, 5)


def test_batch_that_was_cut_into_micro_batches_gives_each_its_rows() -> None:
    cut = [(WHOLE[:3].clone(),), (WHOLE[3:].clone(),)]
    first, second = _parts(*cut, loader=Loader([_delivered(WHOLE)]))
    assert first.indices == ROWS[:3] and second.indices == ROWS[3:]


def test_other_values_contradict_the_order() -> None:
    other = WHOLE + 1.0
    (part,) = _parts((other,), loader=Loader([_delivered(WHOLE)]))
    assert part.indices is None and part.place is None
    cut = _parts((other[:3],), (other[3:],), loader=Loader([_delivered(WHOLE)]))
    assert [each.indices for each in cut] == [None, None]


def test_nan_in_a_moved_batch_is_equal_to_itself() -> None:
    whole = WHOLE.clone()
    whole[1, 1] = torch.nan
    (part,) = _parts((whole.clone(),), loader=Loader([_delivered(whole)]))
    assert part.indices == ROWS


def test_samples_of_an_origin_are_named_by_row_and_id() -> None:
    step = step_of({"x": WHOLE, "name": torch.arange(100, 108)})
    origin = origin_of(samples=(1, 6))
    loader: Any = Loader([], FoundBatch(_delivered(WHOLE)))
    assert name_samples(origin, step, loader, None).rows == ("row 41", "row 46")
    assert name_samples(origin, step, None, "name").rows == ("id 101", "id 106")
    named = name_samples(origin, step, loader, "name")
    assert named.rows == ("row 41 (id 101)", "row 46 (id 106)")


def test_data_set_of_whole_batches_names_the_batch_for_each_row() -> None:
    step = step_of((WHOLE,))
    loader: Any = Loader([], FoundBatch(_delivered(WHOLE, rows=(9,))))
    assert name_samples(origin_of(samples=(1, 6)), step, loader, None).rows == ("row 9", "row 9")


def test_origin_without_samples_or_means_to_name_them_gets_no_names() -> None:
    bare = origin_of()
    assert name_samples(bare, step_of((WHOLE,)), None, "name") is bare
    guilty = origin_of(samples=(1,))
    found = name_samples(guilty, step_of((WHOLE,)), None, None)
    assert found == replace(guilty, content=found.content) and found.rows == ()


def test_panel_shows_what_the_guilty_sample_holds(capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(6, 4)
    x[2] = 0.0
    with stepguard.Guard(model, optimizer) as guard:
        batch = {"x": x, "y": torch.arange(6)}
        guard.step(lambda b: model(b["x"] / b["x"].sum(1, keepdim=True)).mean(), batch)
    origin = guard.incidents[0].origin
    assert origin is not None
    assert origin.content == "batch:x float32 [4], all 0; batch:y int64 [], all 2"
    assert f"sample 2: {origin.content}" in " ".join(capsys.readouterr().err.split())


def _unit(y: Tensor) -> Tensor:
    return y / y.norm(dim=1)[:, None]


@pytest.mark.parametrize("capsule", ["full", "no-data"])
def test_text_of_the_sample_is_shown_in_the_terminal_and_written_nowhere(
    capsule: Literal["full", "no-data"], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 4)
    x[2] = 0
    words = "red\x1b[31m fox\n" + "abc " * 40
    batch = {"x": x, "text": ["one", "two", words, "four"]}
    config = stepguard.GuardConfig(run_dir=tmp_path, capsule=capsule)
    with stepguard.Guard(model, optimizer, config=config) as guard:
        guard.step(lambda b: _unit(model(b["x"])).sum(), batch)
    shown = 'its text: "red?[31m fox abc abc' in capsys.readouterr().err
    assert shown is (capsule == "full")
    for file in (tmp_path / "journal.jsonl", *tmp_path.glob("incidents/*/incident.json")):
        assert "abc " * 3 not in file.read_text()
    assert guard.incidents[0].origin is not None


def test_token_ids_are_decoded_where_the_tokenizer_is_known() -> None:
    class Words:
        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            assert skip_special_tokens
            return " ".join(f"word{one}" for one in ids)

    ids = torch.tensor([[1, 2], [3, 4]])
    step = step_of({"input_ids": ids})
    assert text_of(step, 1, 0, Words()) == "word3 word4"
    assert text_of(step, 1, 0, None) == ""

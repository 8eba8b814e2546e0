"""Statistics of targets: what counts, and where an answer ends."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from preflight.asking import said
from stepguard.check.preflight import Subject, check


def test_labels_of_a_jsonl_file_are_counted(tmp_path: Path) -> None:
    rows = [{"labels": [-100, 3]}, {"labels": [-100, -100]}, {"labels": [4, 5]}]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = check(Subject(data=tmp_path / "chats.jsonl"), only=["labels"])
    assert "1 example of 3 without a target other than -100: chats.jsonl:2" in said(
        result, "labels.empty"
    )
    assert "3 of 6 targets count" in said(result, "labels.empty")
    assert "1 example of 3" in said(
        check(Subject(data=tmp_path, label_key="labels"), only=["labels"]), "labels.empty"
    )


def test_packed_text_is_not_called_truncated() -> None:
    rows = [
        {"input_ids": torch.arange(8) + index, "labels": torch.arange(8) + index}
        for index in range(4)
    ]
    result = check(Subject(dataset=rows), only=["labels.truncated"])
    assert result.outcome("labels.truncated").status == "not_applicable"


def test_left_padding_does_not_hide_a_cut_answer() -> None:
    def row(index: int) -> dict[str, torch.Tensor]:
        labels = torch.tensor([-100, -100, 5, 6 + index])
        return {"input_ids": labels.clamp_min(0), "labels": labels, "attention_mask": torch.ones(4)}

    result = check(
        Subject(dataset=[row(0), row(1)], config={"max_length": 4, "eos_token_id": 6}),
        only=["labels"],
    )
    assert "1 answer of 2 run into the limit without the end token 6: 1" in said(
        result, "labels.truncated"
    )

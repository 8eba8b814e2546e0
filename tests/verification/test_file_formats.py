"""Checkpoints that real libraries wrote: all are read, all roles are told, healthy ones have no
error.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stepguard
from stepguard.check import torch_file
from stepguard.check.scan import Damaged
from verification import hostile, saved
from verification.saved import ONE_FILE, Saver, poison


@pytest.mark.parametrize("save", ONE_FILE.values(), ids=ONE_FILE)
def test_healthy_file_is_good_and_every_role_is_told(
    tmp_path: Path, everything: dict[str, Any], save: Saver
) -> None:
    found = stepguard.verify(save(tmp_path / "all.pt", everything))
    assert found.ok and not found.problems, found.problems
    assert {"parameter", "buffer", "optimizer", "ema", "rng"} <= found.roles.keys()
    assert found.step == 3
    assert found.roles["optimizer"] == 3 * 6
    assert {rate.kind for rate in found.rates} >= {"lr", "initial_lr", "max_lr"}


@pytest.mark.parametrize("save", ONE_FILE.values(), ids=ONE_FILE)
@pytest.mark.parametrize(
    ("part", "name", "role"),
    [
        ("state_dict", "inner.weight", "parameter"),
        ("state_dict", "norm.running_var", "buffer"),
        ("ema", "outer.weight", "ema"),
    ],
)
def test_nan_is_found_in_every_part(
    tmp_path: Path, everything: dict[str, Any], save: Saver, part: str, name: str, role: str
) -> None:
    bad = {**everything, part: {**everything[part], name: poison(everything[part][name])}}
    found = stepguard.verify(save(tmp_path / "bad.pt", bad))
    (error,) = found.errors
    assert (error.kind, error.tensor, error.role) == ("nan", f"{part}/{name}", role)
    assert "1 NaN of" in error.detail and "first at [" in error.detail


@pytest.mark.parametrize("save", ONE_FILE.values(), ids=ONE_FILE)
def test_nan_in_the_optimizer_and_in_plain_numbers_is_found(
    tmp_path: Path, everything: dict[str, Any], save: Saver
) -> None:
    import copy

    bad = copy.deepcopy(everything)
    bad["optimizer"]["state"][2]["exp_avg"] = poison(
        bad["optimizer"]["state"][2]["exp_avg"], float("inf")
    )
    bad["optimizer"]["param_groups"][0]["lr"] = float("nan")
    bad["scaler"]["scale"] = float("inf")
    bad["lr_scheduler"]["_last_lr"] = [float("nan")]
    found = stepguard.verify(save(tmp_path / "bad.pt", bad))
    assert {(error.kind, error.role) for error in found.errors} == {
        ("inf", "optimizer"),
        ("nan", "optimizer"),
        ("inf", "scaler"),
        ("nan", "scheduler"),
    }


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64, torch.float32, torch.float16, torch.bfloat16,
        torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128,
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("save", [saved.save_zip, saved.save_legacy, saved.save_pickle])
def test_every_element_type_is_scanned(tmp_path: Path, dtype: torch.dtype, save: Saver) -> None:
    values = torch.linspace(0.5, 1.5, 1000).to(dtype)
    assert stepguard.verify(save(tmp_path / "good.pt", {"w.weight": values, "n": torch.ones(3)})).ok
    wide = values.to(torch.complex64 if dtype.is_complex else torch.float32).clone()
    wide[777] = float("nan")
    found = stepguard.verify(
        save(tmp_path / "bad.pt", {"w.weight": wide.to(dtype), "n": torch.ones(3)})
    )
    (error,) = found.errors
    assert error.kind == "nan" and error.tensor == "w.weight" and "first at [777]" in error.detail


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("place", [0, 1, 299_999, 524_288, 1_000_002])
def test_one_bad_value_is_found_wherever_it_is(tmp_path: Path, number: float, place: int) -> None:
    values = torch.zeros(1_000_003) + 0.5
    values[place] = number
    found = stepguard.verify(
        saved.save_safetensors(tmp_path / "m.safetensors", {"a": torch.ones(3), "w": values})
    )
    (error,) = found.errors
    assert f"first at [{place}]" in error.detail and " of 1,000,003" in error.detail


def test_integers_are_not_judged_by_their_size(tmp_path: Path) -> None:
    state = {"steps": torch.tensor([2**60]), "ids": torch.arange(100), "on": torch.tensor([True])}
    found = stepguard.verify(saved.save_zip(tmp_path / "m.pt", state))
    assert not found.problems and found.tensors == 3


def test_views_of_one_storage_are_scanned_once_and_named_each(tmp_path: Path) -> None:
    flat = torch.ones(1000)
    flat[700] = float("nan")
    state = {
        "a": flat[:500],
        "b": flat[500:].view(20, 25),
        "tied": flat[500:].view(20, 25),
        "t": flat[:100].view(10, 10).T,
    }
    found = stepguard.verify(saved.save_zip(tmp_path / "m.pt", state))
    assert sorted(error.tensor or "" for error in found.errors) == ["b", "tied"]
    assert "first at [8, 0]" in found.errors[0].detail


def test_whole_module_tells_parameters_from_buffers(tmp_path: Path) -> None:
    model = saved.Small()
    found = stepguard.verify(saved.save_zip(tmp_path / "module.pt", model))
    assert found.roles == {"buffer": 4, "parameter": 8}
    # loading it runs the code of its class, whatever that is
    (error,) = found.errors
    assert error.kind == "global" and "Small" in error.detail and "torch.nn" not in error.detail
    layers = nn.Sequential(nn.Linear(3, 4), nn.LSTM(3, 4), nn.TransformerEncoderLayer(8, 2))
    assert not stepguard.verify(saved.save_zip(tmp_path / "layers.pt", layers)).problems


def test_lightning_checkpoint(tmp_path: Path, everything: dict[str, Any]) -> None:
    found = stepguard.verify(
        saved.save_zip(tmp_path / "epoch=1-step=3.ckpt", saved.lightning(everything))
    )
    assert found.ok and not found.problems, found.problems
    assert found.step == 3 and found.roles["optimizer"] == 18 and found.roles["other"] == 1


def test_tensors_on_other_devices_and_subclasses_are_read(tmp_path: Path) -> None:
    class Own(nn.Parameter):
        pass

    state = {"p": nn.Parameter(torch.ones(4, 4)), "with": torch.ones(3)}
    state["with"].tag = "attribute"  # type: ignore[attr-defined]
    found = stepguard.verify(saved.save_zip(tmp_path / "m.pt", state))
    assert found.ok and found.roles == {"parameter": 2}


def test_torchscript_archive_is_read(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.line(x)

    net = Net()
    with torch.no_grad():
        net.line.weight[1, 1] = float("nan")
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(
            torch.jit.trace(net, torch.ones(1, 3), check_trace=False), tmp_path / "net.pt"
        )
    found = stepguard.verify(tmp_path / "net.pt")
    assert [error.kind for error in found.errors] == ["nan"], found.problems
    assert "line" in (found.errors[0].tensor or "")


def test_empty_and_foreign_files_say_what_they_are(tmp_path: Path) -> None:
    cases = {
        "empty.pt": (b"", "empty"),
        "zeros.pt": (bytes(4096), "never reached the disk"),
        "note.pt": (b"hello, this is a note", "no known checkpoint format"),
        "model.gguf": (b"GGUF" + bytes(100), "GGUF"),
        "page.pt": (b"<!DOCTYPE html><html>", "no known checkpoint format"),
    }
    for name, (content, words) in cases.items():
        (tmp_path / name).write_bytes(content)
        (error,) = stepguard.verify(tmp_path / name).errors
        assert words in error.detail


def test_suffixes_are_those_of_the_table() -> None:
    sure = sorted(torch_file.SURE_SUFFIXES)
    shared = sorted(torch_file.SUFFIXES - torch_file.SURE_SUFFIXES)
    assert sure == [".ckpt", ".pt", ".pth", ".pyth", ".safetensors", ".th"]
    assert shared == [".bin", ".pickle", ".pkl"]


@pytest.mark.parametrize(
    ("name", "content", "is_checkpoint"),
    [
        ("x.pt", b"", True),
        ("pytorch_model.bin", b"", True),
        ("x.bin", b"PK\x03\x04", True),
        ("x.bin", b"image", False),
        ("x.pkl", b"\x80\x04N.", True),
        ("epoch.tar", b"PK\x03\x04", True),
        ("model.tar", b"data/", False),
        ("x.json", b"\x80\x04N.", False),
    ],
)
def test_checkpoint_is_told_by_its_name_or_by_its_first_bytes(
    tmp_path: Path, name: str, content: bytes, is_checkpoint: bool
) -> None:
    (tmp_path / name).write_bytes(content)
    assert torch_file.is_checkpoint_file(tmp_path / name) == is_checkpoint


@pytest.mark.parametrize("name", ["zip.pt", "legacy.pt", "plain.pkl", "m.safetensors"])
def test_content_of_every_format_is_read_without_running_it(
    tmp_path: Path, everything: dict[str, Any], whole: dict[str, bytes], name: str
) -> None:
    path = tmp_path / name
    path.write_bytes(whole.get(name) or pickle.dumps({"state_dict": {}}))
    content = torch_file.read_content(path)
    if name.endswith(".pt"):
        shapes = {key: value.shape for key, value in content["state_dict"].items()}
        assert shapes == {key: tuple(v.shape) for key, v in everything["state_dict"].items()}
    else:
        assert isinstance(content, dict)


def test_content_of_a_hostile_pickle_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.pt").write_bytes(hostile.by_reduce(tmp_path / "canary"))
    with pytest.raises(Damaged, match="could run code"):
        torch_file.read_content(tmp_path / "m.pt")
    assert not (tmp_path / "canary").exists()

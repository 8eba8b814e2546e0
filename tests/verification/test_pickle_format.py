"""Plain pickles of every protocol."""

from __future__ import annotations

import argparse
import collections
import pathlib
import pickle
from pathlib import Path

import numpy as np
import pytest

import stepguard
from verification import saved


def test_numpy_arrays_and_scalars_in_a_pickle_are_read(tmp_path: Path) -> None:
    array = np.ones((300, 300))
    array[7, 9] = np.nan
    value = {
        "state_dict": {"w": array, "ok": np.zeros(5, dtype=np.float32)},
        "scaler": {"scale": np.float64("nan")},
    }
    found = stepguard.verify(saved.save_pickle(tmp_path / "m.pkl", value))
    assert sorted((error.tensor or "", error.kind) for error in found.errors) == [
        ("scaler/scale", "nan"),
        ("state_dict/w", "nan"),
    ]
    assert "first at [7, 9]" in next(e.detail for e in found.errors if e.tensor == "state_dict/w")


@pytest.mark.parametrize("protocol", range(6))
def test_every_pickle_protocol_is_read(tmp_path: Path, protocol: int) -> None:
    value = {
        "args": argparse.Namespace(lr=1e-3, path=pathlib.PurePosixPath("a/b")),
        "ordered": collections.OrderedDict(a=1, b=(2, [3, {4}, frozenset({5})])),
        "default": collections.defaultdict(list, {"x": [1.5]}),
        "big": 2**100,
        "negative": -(2**70),
        "text": "ü" * 300,
        "bytes": b"\xff" * 300,
        "complex": 1 + 2j,
        "nothing": (None, True, False, Ellipsis, 1e300),
    }
    path = tmp_path / "m.pkl"
    path.write_bytes(pickle.dumps(value, protocol=protocol))
    found = stepguard.verify(path)
    assert found.ok and not found.problems, found.problems

"""Trace radio maps of random city quarters with Sionna RT and store them for `data.name=real`.

    python real_maps.py --number 400        # some minutes; writes data/maps.npz

Needs `pip install sionna-rt` and an LLVM library for its ray tracer (Debian: libllvm19,
DRJIT_LIBLLVM_PATH). Buildings are boxes of concrete 10 to 30 m high, as many as in the toy cities;
the transmitter stands 5 m above a free cell. Cells that no ray reaches have gain 0, whose logarithm
is -inf: they become the noise floor before anything is stored.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from denoising_diffusion_pytorch.cities import BEST, FLOOR, city_plan, condition_of

METRES = 4.0
"""Side of a cell."""
SENDER_HEIGHT, SEEN_HEIGHT = 5.0, 1.5


def boxes(
    plan: list[tuple[int, int, int, int]], size: int, heights: Sequence[float]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Corners [8, 3] and triangles [12, 3] of each building, in metres around the middle of the
    map.
    """
    faces = np.array(
        [
            [0, 2, 1],
            [0, 3, 2],
            [4, 5, 6],
            [4, 6, 7],
            [0, 1, 5],
            [0, 5, 4],
            [1, 2, 6],
            [1, 6, 5],
            [2, 3, 7],
            [2, 7, 6],
            [3, 0, 4],
            [3, 4, 7],
        ]
    )
    for (top, left, high, wide), height in zip(plan, heights, strict=True):
        x0, x1 = (np.array([left, min(left + wide, size)]) - size / 2) * METRES
        y0, y1 = (np.array([top, min(top + high, size)]) - size / 2) * METRES
        flat = [[x0, y0], [x1, y0], [x1, y1], [x0, y1]]
        yield (
            np.array([[*p, 0.0] for p in flat] + [[*p, height] for p in flat], dtype=np.float32),
            faces,
        )


def write_ply(path: Path, corners: np.ndarray, faces: np.ndarray) -> None:
    head = (
        f"ply\nformat ascii 1.0\nelement vertex {len(corners)}\nproperty float x\nproperty "
        f"float y\nproperty float z\n"
    )
    head += f"element face {len(faces)}\nproperty list uchar int vertex_indices\nend_header\n"
    lines = [" ".join(f"{v:.3f}" for v in row) for row in corners] + [
        "3 " + " ".join(map(str, row)) for row in faces
    ]
    path.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")


def scene_of(
    folder: Path, plan: list[tuple[int, int, int, int]], size: int, heights: Sequence[float]
) -> Any:
    """A Sionna scene of the ground and the buildings."""
    from sionna.rt import load_scene

    half = size * METRES / 2
    ground = np.array(
        [[-half, -half, 0], [half, -half, 0], [half, half, 0], [-half, half, 0]], dtype=np.float32
    )
    write_ply(folder / "ground.ply", ground, np.array([[0, 1, 2], [0, 2, 3]]))
    names = ["ground"]
    for number, (corners, faces) in enumerate(boxes(plan, size, heights)):
        write_ply(folder / f"building{number}.ply", corners, faces)
        names.append(f"building{number}")
    shapes = "".join(
        f'<shape type="ply" id="{name}"><string name="filename" value="{name}.ply"/>'
        f'<ref id="mat-itu_{"wet_ground" if name == "ground" else "concrete"}" '
        f'name="bsdf"/></shape>'
        for name in names
    )
    materials = "".join(
        f'<bsdf type="itu-radio-material" id="mat-itu_{kind}"><string name="type" '
        f'value="{kind}"/></bsdf>'
        for kind in ("concrete", "wet_ground")
    )
    (folder / "scene.xml").write_text(
        f'<scene version="2.1.0">{materials}{shapes}</scene>', encoding="utf-8"
    )
    return load_scene(str(folder / "scene.xml"), merge_shapes=False)


def traced(scene: Any, cell: tuple[int, int], size: int) -> np.ndarray:
    """Path gain in dB [size, size]; -inf where no ray arrives."""
    from sionna.rt import PlanarArray, RadioMapSolver, Transmitter

    scene.tx_array = PlanarArray(num_rows=1, num_cols=1, pattern="iso", polarization="V")
    place = [
        (cell[1] + 0.5 - size / 2) * METRES,
        (cell[0] + 0.5 - size / 2) * METRES,
        SENDER_HEIGHT,
    ]
    scene.add(Transmitter(name="tx", position=place))
    side = size * METRES
    found = RadioMapSolver()(
        scene,
        max_depth=4,
        samples_per_tx=10**6,
        cell_size=(METRES, METRES),
        center=[0.0, 0.0, SEEN_HEIGHT],
        orientation=[0.0, 0.0, 0.0],
        size=[side, side],
    )
    gain = np.asarray(found.path_gain).reshape(size, size)
    with np.errstate(divide="ignore"):
        return 10.0 * np.log10(gain)


def scaled(gain: np.ndarray) -> np.ndarray:
    """Decibels to [-1, 1]; -1 is the noise floor, and what no ray reaches."""
    known = np.where(np.isfinite(gain), gain, -FLOOR)
    return (np.clip((FLOOR + known) / (FLOOR - BEST), 0.0, 1.0) * 2.0 - 1.0).astype(np.float32)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--number", type=int, default=400)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("data"))
    options = parser.parse_args(arguments)
    generator = torch.Generator().manual_seed(options.seed)
    images, conditions = [], []
    for number in range(options.number):
        plan, city, cell = city_plan(options.size, generator)
        heights = (10.0 + 20.0 * torch.rand(len(plan), generator=generator)).tolist()
        with tempfile.TemporaryDirectory() as folder:
            gain = traced(scene_of(Path(folder), plan, options.size, heights), cell, options.size)
        images.append(scaled(gain)[None])
        conditions.append(condition_of(city[None], torch.tensor([cell]))[0].numpy())
        print(
            f"\r{number + 1} of {options.number} maps, {np.isfinite(gain).mean():.0%} of the cells "
            f"reached",
            end="",
        )
    options.folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        options.folder / "maps.npz", image=np.stack(images), condition=np.stack(conditions)
    )
    print(f"\nwrote {options.folder / 'maps.npz'}")


if __name__ == "__main__":
    main()

"""Plates rendered in real fonts by Pillow: those that matplotlib carries, or a folder of .ttf
files.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from src.models.restran import CHARACTERS


class Renderer:
    """Draws every text in one of the fonts, by turns."""

    def __init__(self, folder: Path | None = None) -> None:
        from PIL import ImageFont

        paths = sorted((folder or _matplotlib_fonts()).glob("DejaVuSans*.ttf"))
        paths = [path for path in paths if "Display" not in path.name] or sorted(
            folder.glob("*.ttf") if folder else []
        )
        if not paths:
            raise SystemExit(
                f"no .ttf font in {folder}; install fonts-dejavu-core, or leave DATA at toy."
            )
        self._fonts = [ImageFont.truetype(str(path), 40) for path in paths]

    def draw(self, texts: Tensor, size: tuple[int, int]) -> Tensor:
        """[n, 1, h, w] in 0..1."""
        return torch.stack(
            [self._plate(number, row, size) for number, row in enumerate(texts.tolist())]
        )

    def _plate(self, number: int, row: list[int], size: tuple[int, int]) -> Tensor:
        from PIL import Image, ImageDraw

        font = self._fonts[(number + sum(row)) % len(self._fonts)]
        text = "".join(CHARACTERS[k] for k in row)
        left, top, right, bottom = font.getbbox(text)
        image = Image.new("L", (int(right - left) + 12, int(bottom - top) + 12))
        ImageDraw.Draw(image).text((6 - left, 6 - top), text, fill=255, font=font)
        small = image.resize((size[1], size[0]), Image.Resampling.BILINEAR)
        return torch.tensor(list(small.tobytes()), dtype=torch.float32).view(1, *size) / 255.0


def _matplotlib_fonts() -> Path:
    import matplotlib

    return Path(matplotlib.get_data_path()) / "fonts" / "ttf"

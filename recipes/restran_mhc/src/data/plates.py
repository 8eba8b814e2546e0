"""Licence plates ABC1234 and ABC1D23 as short tracks of noisy frames, drawn in a 5x7 font or
rendered in real ones.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from configs.config import Config
from src.models.restran import CHARACTERS

LENGTH = 7
RARE = torch.tensor([CHARACTERS.index(c) for c in "QWXYKZ"])
JITTER = {"none": 0.0, "light": 1.0, "full": 2.0}
"""How strongly frames are moved, as a multiple of the light level."""
GLYPHS = """
    0E11131519110E 040C040404040E 0E11010204081F 1F02040201110E 02060A121F0202 1F101E0101110E
    0608101E11110E 1F010204080808 0E11110E11110E 0E11110F01020C 0E11111F111111 1E11111E11111E
    0E11101010110E 1C12111111121C 1F10101E10101F 1F10101E101010 0E11101711110F 1111111F111111
    0E04040404040E 0702020202120C 11121418141211 1010101010101F 111B1515111111 11111915131111
    0E11111111110E 1E11111E101010 0E11111115120D 1E11111E141211 0F10100E01011E 1F040404040404
    1111111111110E 11111111110A04 11111115151B11 11110A040A1111 1111110A040404 1F01020408101F
""".split()  # noqa: SIM905 (a table of bits)
"""Seven rows of five bits for each character."""


def font() -> Tensor:
    """[36, 7, 5] of 0 and 1."""
    rows = [[int(glyph[2 * r : 2 * r + 2], 16) for r in range(7)] for glyph in GLYPHS]
    return torch.tensor(
        [[[(bits >> (4 - k)) & 1 for k in range(5)] for bits in glyph] for glyph in rows]
    ).float()


class Plates:
    """Endless random plates; `draw` gives frames [n, f, 1, h, w] and character numbers [n, 7]."""

    def __init__(self, config: Config, seed: int, fonts: Path | None = None) -> None:
        self.config = config
        self.generator = torch.Generator().manual_seed(seed)
        self._glyphs = font()
        self._rendered = None
        if config.DATA == "real":
            from src.data.rendered import Renderer

            self._rendered = Renderer(fonts)

    def draw(self, number: int) -> tuple[Tensor, Tensor]:
        texts = self._texts(number)
        return self._frames(texts), texts

    def _texts(self, number: int) -> Tensor:
        g = self.generator
        letters = torch.randint(10, 36, (number, LENGTH), generator=g)
        digits = torch.randint(0, 10, (number, LENGTH), generator=g)
        if self.config.OVERSAMPLE_RARE_CHARS:
            rare = RARE[torch.randint(0, len(RARE), letters.shape, generator=g)]
            letters = torch.where(torch.rand(letters.shape, generator=g) < 0.3, rare, letters)
        new_style = torch.rand(number, generator=g) < 0.5
        is_letter = torch.zeros(number, LENGTH, dtype=torch.bool)
        is_letter[:, :3] = True
        is_letter[new_style, 4] = True
        return torch.where(is_letter, letters, digits)

    def _frames(self, texts: Tensor) -> Tensor:
        config, sharp = self.config, self._sharp(texts)
        return torch.stack([self._seen(sharp) for _ in range(config.FRAMES)], dim=1)

    def _sharp(self, texts: Tensor) -> Tensor:
        size = (self.config.HEIGHT, self.config.WIDTH)
        if self._rendered is not None:
            return self._rendered.draw(texts, size)
        plate = torch.zeros(len(texts), 9, 6 * LENGTH + 2)
        for k in range(LENGTH):
            plate[:, 1:8, 1 + 6 * k : 6 + 6 * k] = self._glyphs[texts[:, k]]
        return F.interpolate(plate[:, None], size=size, mode="bilinear", align_corners=False)

    def _seen(self, sharp: Tensor) -> Tensor:
        """One frame: moved, blurred, with other contrast and noise."""
        g, number = self.generator, len(sharp)
        strength = JITTER[self.config.AUGMENTATION_LEVEL]
        theta = torch.eye(2, 3).repeat(number, 1, 1)
        theta[:, 0, 1] = (torch.rand(number, generator=g) - 0.5) * 0.06 * strength
        theta[:, :, 2] = (torch.rand(number, 2, generator=g) - 0.5) * 0.08 * strength
        moved = F.grid_sample(
            sharp, F.affine_grid(theta, list(sharp.shape), align_corners=False), align_corners=False
        )
        low = F.interpolate(
            F.avg_pool2d(moved, (2, 1)), size=sharp.shape[-2:], mode="bilinear", align_corners=False
        )
        contrast = 0.6 + 0.4 * torch.rand(number, 1, 1, 1, generator=g)
        return (low * contrast + 0.1 * torch.randn(low.shape, generator=g) - 0.3) / 0.5


def spelled(texts: Tensor) -> list[str]:
    return ["".join(CHARACTERS[k] for k in row) for row in texts.tolist()]

"""The reader: spatial transformer, residual stages (with hyper-connections), frame fusion,
transformer, CTC head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.config import Config
from src.models.components import BasicBlock, FrameFusion, HyperConnection, SpatialTransformer
from src.models.probes import Probes

CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
CLASSES = len(CHARACTERS) + 1
"""Class 0 is CTC's blank."""


class ResTran(nn.Module):
    """Frames [b, f, 1, h, w] to log-probabilities [b, t, 37]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        widths = config.CHANNELS
        self.probes = Probes()
        self.persistent = config.STREAMS == "persistent"
        self.stn = SpatialTransformer() if config.USE_STN else nn.Identity()
        self.stem = nn.Sequential(
            nn.Conv2d(1, widths[0], 3, 1, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()
        )
        given, strides = (widths[0], *widths[:-1]), ((1, 1), *[(2, 2)] * (len(widths) - 1))
        self.enter = nn.ModuleList(
            BasicBlock(g, w, s) for g, w, s in zip(given, widths, strides, strict=True)
        )
        self.blocks = nn.ModuleList(BasicBlock(width, width) for width in widths)
        self.mhc = nn.ModuleList(
            self._connections(config, width, f"mhc.{i}") for i, width in enumerate(widths)
        )
        features = widths[-1]
        self.fusion = FrameFusion(features)
        layer = nn.TransformerEncoderLayer(
            features,
            config.TRANSFORMER_HEADS,
            4 * features,
            0.0,
            activation="gelu",
            batch_first=True,
        )
        self.reader = nn.TransformerEncoder(
            layer, config.TRANSFORMER_LAYERS, enable_nested_tensor=False
        )
        self.places = nn.Parameter(torch.randn(1, config.WIDTH, features) * 0.02)
        self.head = nn.Linear(features, CLASSES)

    def _connections(self, config: Config, width: int, name: str) -> nn.Module:
        if config.MODEL_TYPE == "restran":
            return nn.Identity()
        return HyperConnection(
            width,
            config.MHC_N,
            name=name,
            kind=config.SINKHORN,
            mix=config.MIX,
            eps=config.RMS_EPS,
            probes=self.probes,
        )

    def forward(self, frames: Tensor) -> Tensor:
        self.probes.begin()
        number = frames.shape[1]
        x = self.stem(self.stn(frames.flatten(0, 1)))
        for enter, block, connection in zip(self.enter, self.blocks, self.mhc, strict=True):
            x = self._stage(enter(x), block, connection)
        x = self.fusion(F.adaptive_avg_pool2d(x, (1, None)), number).squeeze(2).transpose(1, 2)
        scores = self.head(self.reader(x + self.places[:, : x.shape[1]]))
        out: Tensor = scores.float().log_softmax(-1)  # CTC adds up what float16 rounds away
        self.probes.predictions(out)
        return out

    def _stage(self, x: Tensor, block: nn.Module, connection: nn.Module) -> Tensor:
        if not isinstance(connection, HyperConnection):
            return block(x)  # type: ignore[no-any-return]
        streams = x.unsqueeze(1).expand(-1, connection.n, -1, -1, -1)
        passes = (
            2 if self.persistent else 1
        )  # persistent streams differ from each other only from the second pass on
        for _ in range(passes):
            streams = connection(streams, block)
        return streams.mean(1)

    def gates(self) -> dict[str, Tensor]:
        """`mhc.0.alpha_pre` and the others: above 1 the routing is unstable."""
        return {name: p.detach() for name, p in self.named_parameters() if ".alpha_" in name}

    def largest_alpha(self) -> float:
        return max((float(gate.abs().max()) for gate in self.gates().values()), default=0.0)


def read(log_probabilities: Tensor) -> list[str]:
    """Greedy CTC: repeats and blanks removed."""
    texts = []
    for row in log_probabilities.argmax(-1).tolist():
        kept = [k for at, k in enumerate(row) if k and (at == 0 or k != row[at - 1])]
        texts.append("".join(CHARACTERS[k - 1] for k in kept))
    return texts

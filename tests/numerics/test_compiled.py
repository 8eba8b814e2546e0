"""Every function compiles into one graph with the same result."""

from __future__ import annotations

import pytest
import torch

from stepguard import numerics
from stepguard.numerics import Events

COMPILED = {
    "safe_sqrt": lambda x: numerics.safe_sqrt(x.abs()),
    "safe_norm": lambda x: numerics.safe_norm(x, dim=-1),
    "safe_acos": lambda x: numerics.safe_acos(x.tanh()),
    "safe_log": lambda x: numerics.safe_log(x.abs()),
    "safe_div": lambda x: numerics.safe_div(x, x.flip(0)),
    "rms_norm": lambda x: numerics.rms_norm(x),
    "sinkhorn": lambda x: numerics.sinkhorn(x).matrix,
    "soft_limit": lambda x: numerics.soft_limit(x.square(), 0.5),
    "latent_mse": lambda x: numerics.latent_mse(x, x.flip(0), normalize=True),
    "masked_mean": lambda x: numerics.masked_mean(x, x > 0, count=Events()),
    "masked_cross_entropy": lambda x: numerics.masked_cross_entropy(
        x, torch.arange(4), count=Events()
    ),
    "mix_streams": lambda x: numerics.mix_streams(x.expand(2, 4, 4), x.expand(2, 4, 4)),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiles_into_one_graph_with_the_same_result(name: str) -> None:
    x = torch.randn(4, 4)
    compiled = torch.compile(COMPILED[name], backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(x), COMPILED[name](x), equal_nan=True)
    torch.compiler.reset()

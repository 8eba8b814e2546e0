"""Everything private in torch that the package uses, each with the reason.

tests/tensors/test_torch_private.py checks every name, so that a torch release that drops one
fails there and says what depends on it.
"""

from __future__ import annotations

import torch

MKLDNN: torch.layout = torch._mkldnn  # type: ignore[attr-defined]
"""Layout of opaque CPU tensors, whose values cannot be read; torch gives it no public name."""

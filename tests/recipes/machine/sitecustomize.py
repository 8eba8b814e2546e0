"""A machine with or without bf16, for programs that a test starts with this folder on PYTHONPATH.

`CPU_HAS_BF16` (yes or no) is what torch answers about the processor, and `BF16_ASKED` names a file
that exists afterwards if somebody asked: where nobody did, the answer cannot matter.
"""

from __future__ import annotations

import os
from pathlib import Path

if "CPU_HAS_BF16" in os.environ:
    import torch

    def _answer() -> bool:
        Path(os.environ["BF16_ASKED"]).touch()
        return os.environ["CPU_HAS_BF16"] == "yes"

    for _name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        setattr(torch.cpu, _name, _answer)

"""Which half precision this machine trains well in."""

from __future__ import annotations

import torch

CPU_SIGNS = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")


def half_precision() -> dict[str, bool]:
    """For `TrainingArguments(**half_precision())`: bf16 where the hardware has it, else fp16 on a
    GPU, else neither.

    `torch.cuda.is_bf16_supported()` alone also says yes where bf16 is only emulated, which is slow.
    fp16 overflows at 65504 and needs the loss scaling that the Trainer then turns on; bf16 has the
    range of float32 and 8 bits.
    """
    if not torch.cuda.is_available():
        return {"bf16": True} if any(getattr(torch.cpu, sign, bool)() for sign in CPU_SIGNS) else {}
    return (
        {"bf16": True}
        if torch.cuda.is_bf16_supported(including_emulation=False)
        else {"fp16": True}
    )

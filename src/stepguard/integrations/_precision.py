"""Choose the half precision that this machine is fast in."""

from __future__ import annotations

import torch

CPU_SIGNS = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")


def half_precision() -> dict[str, bool]:
    """For `TrainingArguments(**half_precision())`: bf16 in hardware, else fp16 on a GPU, else {}.

    fp16 overflows at 65504 and needs the loss scaling that the Trainer then turns on; bf16 has the
    range of float32 and 8 bits. On a CPU transformers takes bf16 only together with `use_cpu`.
    """
    if torch.cuda.is_available():
        # By default this also says yes where bf16 is only emulated, which is slow.
        in_hardware = torch.cuda.is_bf16_supported(including_emulation=False)
        return {"bf16": True} if in_hardware else {"fp16": True}
    if torch.accelerator.is_available():
        return {}  # neither CUDA nor ROCm: nothing is known about its half precision
    for sign in CPU_SIGNS:
        supported = getattr(torch.cpu, sign, None)
        if supported is not None and supported():
            return {"bf16": True, "use_cpu": True}
    return {}

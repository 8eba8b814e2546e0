"""The device `toy`: built by torch's own extension loader, and made known to torch."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import torch
from torch.utils import cpp_extension

NAME = "toy"


def load() -> torch.device:
    """Build it, which takes half a minute the first time on a machine, and return the device."""
    version = torch.__version__.replace(".", "_").replace("+", "_")
    cpp_extension.load(
        name=f"stepguard_toy_device_{version}",
        sources=[str(Path(__file__).with_name("toy_device.cpp"))],
        extra_cflags=["-O0", "-g0", "-w"],
        is_python_module=False,
    )
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    return torch.device(NAME, 0)


def reads() -> int:
    """How often a value went from the device to the host so far."""
    return int(torch.ops.toy_device.reads())


def _module() -> ModuleType:
    """What torch asks of the module of a device."""
    module = ModuleType(f"torch.{NAME}")
    answers = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "synchronize": lambda device=None: None,
        "manual_seed_all": lambda seed: None,
        "_is_in_bad_fork": lambda: False,
        "get_amp_supported_dtype": lambda: [torch.bfloat16],
    }
    for name, answer in answers.items():
        setattr(module, name, answer)
    return module

"""Sealed checkpoints on disk: written atomically, proven while reading, last-good never lost."""

from stepguard.checkpoints.files import Select, tensor_digest
from stepguard.checkpoints.seal import (
    Entry,
    Health,
    PassedOver,
    Seal,
    SealedFile,
    SealedTensor,
    read_seal,
)
from stepguard.checkpoints.store import Background, Opened, Store

__all__ = [
    "Background",
    "Entry",
    "Health",
    "Opened",
    "PassedOver",
    "Seal",
    "SealedFile",
    "SealedTensor",
    "Select",
    "Store",
    "read_seal",
    "tensor_digest",
]

"""Sealed checkpoints on disk: written atomically, proven while reading, last-good never lost."""

from stepguard.checkpoints.background import Background
from stepguard.checkpoints.entries import Entry, PassedOver
from stepguard.checkpoints.opening import Opened
from stepguard.checkpoints.seal import Health, Seal, SealedFile, SealedTensor, read_seal
from stepguard.checkpoints.store import Store
from stepguard.checkpoints.tensor_files import Select
from stepguard.checkpoints.writing import tensor_digest

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

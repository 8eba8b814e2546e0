"""Checkpoints on disk that survive: sealed, verified while reading, never half there, never the last good one lost."""

from stepguard.state.store.background import Background
from stepguard.state.store.entries import Entry, PassedOver
from stepguard.state.store.opening import Opened
from stepguard.state.store.seal import Health, Seal, SealedFile, SealedTensor, read_seal
from stepguard.state.store.store import Store

__all__ = [
    "Background",
    "Entry",
    "Health",
    "Opened",
    "PassedOver",
    "Seal",
    "SealedFile",
    "SealedTensor",
    "Store",
    "read_seal",
]

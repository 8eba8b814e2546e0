"""Loggers: one file a backend, each a Sink to give to `GuardConfig(sinks=...)`. `Sink` is the base
for your own.
"""

from stepguard.records.incident import Sink

__all__ = ["Sink"]

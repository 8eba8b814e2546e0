"""Locate the first harmful value of a bad step, from the bad loss or gradient backwards."""

from stepguard.locate.find_origin import locate

__all__ = ["locate"]

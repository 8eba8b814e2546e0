"""Where was the first harmful value born? Replays the bad step and walks back from the bad loss or
gradient.
"""

from stepguard.locate.find_origin import locate

__all__ = ["locate"]

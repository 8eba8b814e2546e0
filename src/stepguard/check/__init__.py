"""Checks of what lies on disk, and of a training before it starts. Nothing is executed."""

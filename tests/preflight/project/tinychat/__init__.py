"""A small training project: healthy as it is, with a module of planted faults beside it."""

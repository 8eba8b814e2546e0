"""Reading checkpoints of any kind without running anything that is in them."""

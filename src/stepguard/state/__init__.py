"""Holding on to what a step started from: RNG, buffers, batch, and what it was made of."""

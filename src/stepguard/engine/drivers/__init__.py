"""Drivers of one step: `guard.step`, a watched loop, closures, fused optimizers."""

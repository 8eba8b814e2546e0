"""Checks outside the training step: verify and quarantine checkpoints without executing them."""

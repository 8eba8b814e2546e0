"""The step as one transaction, the drivers that run it, and what a bad step needs."""

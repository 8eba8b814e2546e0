"""The step as one transaction, the drivers that run it, and rooms for what a bad step needs."""

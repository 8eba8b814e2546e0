"""Small functions on tensors, modules and optimizers that every layer above shares."""

"""The homework: data, base model, training and what watches it."""

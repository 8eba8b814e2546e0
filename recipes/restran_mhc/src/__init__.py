"""The plate reader: models, data, training."""

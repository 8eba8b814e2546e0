"""Deep looks: statistics of a healthy step, taken while it runs and without changing it."""

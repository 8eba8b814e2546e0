"""Read a step on the device: gradient norm, finite tests, agreement between ranks."""

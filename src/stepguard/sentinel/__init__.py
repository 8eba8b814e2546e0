"""Reading a step on the device: norms, finite tests, agreement between ranks, and the veto."""

"""Health probes, silent failures, forecasts, whatif: plug-ins that a guard gives to the engine."""

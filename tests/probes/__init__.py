"""Tests of stepguard.probes."""

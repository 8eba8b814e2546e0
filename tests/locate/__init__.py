"""Tests of stepguard.locate."""

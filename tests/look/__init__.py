"""Tests of stepguard.look."""

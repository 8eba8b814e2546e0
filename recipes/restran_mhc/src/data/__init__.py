"""Plates, generated or rendered in real fonts."""

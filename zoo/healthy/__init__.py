"""Families of healthy training that look ill to a guard: each a small, deterministic function of a
seed.
"""

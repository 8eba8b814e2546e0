"""Unmodified training scripts: `python SCRIPT --seed N --steps N --out FILE` trains and saves
everything it has.
"""

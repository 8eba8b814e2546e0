"""Mistakes that train wrongly with finite numbers, each beside a healthy twin."""

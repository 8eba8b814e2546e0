"""Pending."""

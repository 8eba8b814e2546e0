"""Configuration and launcher as plain values: read, never executed."""

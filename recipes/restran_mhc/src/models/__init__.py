"""Building blocks and the reader itself."""

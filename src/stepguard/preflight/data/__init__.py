"""The data, example by example: its source, how files are read, and what is wrong with it."""

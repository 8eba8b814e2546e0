"""The data, example by example: where it comes from, how a file is read, and what is wrong with it."""

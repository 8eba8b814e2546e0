"""Small programs to run and read: `python -m examples.demo`."""

"""The scenes, one module for each mechanism."""

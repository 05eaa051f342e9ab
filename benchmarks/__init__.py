"""Measurements of zloader and of other loaders. README.md says what there is and how to run it."""

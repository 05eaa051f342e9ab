"""The `zloader` commands, their output, and the demo."""

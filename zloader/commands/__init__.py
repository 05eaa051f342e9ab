"""The commands of `zloader`, what they print and draw, and the demo."""

"""Selects columns, rows and genes by names, positions and expressions. Pure."""

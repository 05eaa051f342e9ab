"""Stores opened as one table: rows, columns, views, splits, costs, quality."""

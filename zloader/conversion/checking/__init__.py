"""Verifies stores: metadata, shapes, checksums, row order, and equality with the sources."""

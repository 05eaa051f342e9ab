"""Checking: everything that can be wrong with a store, found and named."""

"""Convert .h5ad and other sources to a store, and verify a store."""

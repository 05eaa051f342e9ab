"""Producers on a Ray cluster, measured and simulated."""

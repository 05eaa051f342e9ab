"""Datasets: opening stores as one table, views and splits, and what an epoch costs and how well it mixes."""

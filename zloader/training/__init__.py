"""Minibatches for a training loop in torch."""

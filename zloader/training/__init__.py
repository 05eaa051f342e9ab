"""Minibatches as torch tensors, for a training loop."""

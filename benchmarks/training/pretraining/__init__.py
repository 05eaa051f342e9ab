"""The parts of pretrain.py: settings, model and costs, training on ranks, held-out losses and oracles, and the page."""

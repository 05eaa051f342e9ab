"""Trainings: what shuffling is worth, two short ones, and a pre-training run."""

"""Loads the rows of a plan into memory: one scheduler reads byte ranges, decodes chunks and gathers minibatches."""

"""From a plan to the rows in memory: byte ranges, decoding, gathering, under one scheduler."""

"""Writes elements as chunks, shards and objects; a destination opens as a store only once it is complete."""

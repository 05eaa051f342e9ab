"""Joining: what one or many sources hold, and what is chosen of it, as the one AnnData to be."""

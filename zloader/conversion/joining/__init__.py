"""Joining: select parts of one or more sources and present them as the one AnnData to be stored."""

"""The cache directory: its limits, who fills what, which bytes are right; columns and objects kept whole."""

"""Sources: read AnnData of any format and location as windows of rows."""

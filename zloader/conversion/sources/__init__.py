"""Sources: any AnnData, wherever it lies and however it is stored, as windows of rows."""

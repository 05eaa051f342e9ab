"""The layout of stored arrays: rows, elements, chunks, bytes; metadata and decoding. Pure, without I/O."""

"""What the bytes of a store mean: row, element, chunk, byte; metadata and decoding. Pure, without I/O."""

"""Which columns, rows and genes are meant, from names and expressions. Pure."""

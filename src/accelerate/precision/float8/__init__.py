"""Matrix products in 8-bit floats: a file for each library, behind ``Float8Library``."""

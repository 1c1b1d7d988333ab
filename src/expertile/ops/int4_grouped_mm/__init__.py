"""int4_grouped_mm: grouped products of 16-bit activations with the 4-bit weights of an `Int4Weight`."""

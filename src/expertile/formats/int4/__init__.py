"""Weights in 4 bits: `Int4Weight`, and the checkpoints that it is read from and written to."""

from expertile.formats.int4.weight import Int4Weight

__all__ = ["Int4Weight"]

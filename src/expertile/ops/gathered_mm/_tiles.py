"""How the memory-bound kernels here cut rows into columns: blocks that are loaded 16 bytes at a time, without a mask
where a power of two divides the row."""

from __future__ import annotations

_LEAST = 256  # a narrower unmasked block would need too many programs


def column_block(cols: int, most: int) -> int:
    """The largest power of two, at most `most`, that divides `cols`; if that is small, the one that covers `cols`."""
    divisor = min(most, cols & -cols)
    if divisor >= min(_LEAST, most):
        return divisor
    return min(most, max(16, 1 << (cols - 1).bit_length()))


def row_block(elements: int, column_block: int) -> int:
    """Rows of a tile of about that many elements, a power of two."""
    return max(1, elements // column_block)

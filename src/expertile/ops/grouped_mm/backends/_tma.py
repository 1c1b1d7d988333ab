"""What TMA asks of a product's operands, whichever backend loads them by it."""

from expertile.ops.grouped_mm.problem import Layout, Problem


def stored_order(strides: tuple[int, ...], itemsize: int) -> str | None:
    """ "row" or "column": the contiguous one of the last two dimensions, if all other strides suit TMA; else None."""
    *lead, rows, cols = strides
    for order, contiguous, pitch in (("row", cols, rows), ("column", rows, cols)):
        if contiguous == 1 and all(s > 0 and s * itemsize % 16 == 0 for s in (*lead, pitch)):
            return order
    return None


def unloadable(p: Problem) -> str | None:
    """Why TMA cannot load a or b, or None."""
    orders = []
    for name, strides, aligned in (("a", p.a_strides, p.a_aligned), ("b", p.b_strides, p.b_aligned)):
        if not aligned:
            return f"TMA needs {name} to start on a multiple of 16 bytes"
        orders.append(stored_order(strides, p.dtype.itemsize))
        if orders[-1] is None:
            return f"TMA needs one contiguous dimension, others in positive multiples of 16 bytes; {name} has {strides}"
    if p.layout is Layout.RAGGED_K and orders != ["column", "row"]:
        return "a ragged k must not be the contiguous dimension: TMA cannot stop inside a row where the group ends"
    return None


def unloadable_groups(p: Problem) -> str | None:
    """`unloadable`, where each group's first block starts at its first row."""
    if p.layout is Layout.RAGGED_M and p.a_strides[-1] != 1:
        # A block's first element along it has to lie at a multiple of 16 bytes, and groups begin anywhere.
        return "a ragged m must not be the contiguous dimension: TMA cannot start inside a row where a group begins"
    return unloadable(p)

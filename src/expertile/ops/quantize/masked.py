"""Loads and stores of the quantisers, masked only where rows or columns may lie outside."""

from __future__ import annotations

import triton
import triton.language as tl

from expertile.ops.rows.tile import inside


@triton.jit
def load_as_is(pointers, live, cols, K, MASK_ROWS: tl.constexpr, MASK_COLS: tl.constexpr, EVICT: tl.constexpr):
    """Zeros outside."""
    if MASK_ROWS or MASK_COLS:
        mask = inside(cols, live, K, MASK_ROWS, MASK_COLS)
        return tl.load(pointers, mask=mask, other=0.0, eviction_policy=EVICT)
    else:
        return tl.load(pointers, eviction_policy=EVICT)


@triton.jit
def load(pointers, live, cols, K, MASK_ROWS: tl.constexpr, MASK_COLS: tl.constexpr, EVICT: tl.constexpr):
    """In float32, zeros outside."""
    return load_as_is(pointers, live, cols, K, MASK_ROWS, MASK_COLS, EVICT).to(tl.float32)


@triton.jit
def store(pointers, values, live, cols, K, MASK_ROWS: tl.constexpr, MASK_COLS: tl.constexpr):
    if MASK_ROWS or MASK_COLS:
        tl.store(pointers, values, mask=inside(cols, live, K, MASK_ROWS, MASK_COLS))
    else:
        tl.store(pointers, values)

"""Loads and stores of the quantisers, masked only where rows or columns may lie outside."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def inside(live, cols, K, MASK_ROWS: tl.constexpr, MASK_COLS: tl.constexpr):
    """The mask for live rows [U, 1] and cols [U or 1, C], where anything is masked."""
    if MASK_ROWS and MASK_COLS:
        return live & (cols < K)
    elif MASK_ROWS:
        return live
    else:
        return cols < K


@triton.jit
def load_as_is(pointers, live, cols, K, MASK_ROWS: tl.constexpr, MASK_COLS: tl.constexpr, EVICT: tl.constexpr):
    """Zeros outside."""
    if MASK_ROWS or MASK_COLS:
        mask = inside(live, cols, K, MASK_ROWS, MASK_COLS)
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
        tl.store(pointers, values, mask=inside(live, cols, K, MASK_ROWS, MASK_COLS))
    else:
        tl.store(pointers, values)

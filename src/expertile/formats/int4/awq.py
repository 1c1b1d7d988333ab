"""AWQ checkpoints: tensors of one linear layer <-> `Int4Weight`.

What AutoAWQ writes (awq/modules/linear/gemm.py, `WQLinear_GEMM.from_linear`) for in_features K, out_features N, groups
of g along K:

    qweight  int32 [K, N/8]     eight columns of row k in a word: column 8·j + ORDER[i] in bits 4·i of word [k, j]
    qzeros   int32 [K/g, N/8]   zero points, 0 … 15, in the same order
    scales   float16 [K/g, N]   w[n, k] = scales[k // g, n] · (q − zero)

ORDER = 0, 2, 4, 6, 1, 3, 5, 7 suits the byte permutation by which its CUDA kernel unpacks two halves at a time.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from expertile.formats.int4._layer import as_weight, check_zeros, expect_shape, expert_of, field, or_symmetric
from expertile.formats.int4.packing import pack_words, unpack_words
from expertile.formats.int4.weight import Int4Weight

FIELDS = ("qweight", "qzeros", "scales")
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def from_awq(tensors: Mapping[str, torch.Tensor], *, dtype: torch.dtype | None = None) -> Int4Weight:
    """One layer's tensors -> Int4Weight [1, N, K]; `dtype` of the scales: as stored, unless given."""
    qweight, qzeros = field(tensors, "qweight", torch.int32), field(tensors, "qzeros", torch.int32)
    scales = field(tensors, "scales")
    k, n, groups = qweight.shape[0], 8 * qweight.shape[1], scales.shape[0]
    expect_shape("scales", scales, (groups, n), "K/group_size, N of qweight [K, N/8] in 4 bits")
    expect_shape("qzeros", qzeros, (groups, n // 8), "K/group_size, N/8")
    if groups == 0 or k % groups:
        raise ValueError(f"scales: expected rows that divide K = {k}, got {groups}")
    zeros = or_symmetric(unpack_words(qzeros, 1, ORDER))
    return as_weight(unpack_words(qweight, 1, ORDER).t(), scales, zeros, k // groups, dtype)


def to_awq(weight: Int4Weight, expert: int = 0) -> dict[str, torch.Tensor]:
    """The three tensors of one expert. ValueError for zero points outside 0 … 15, or N no multiple of 8."""
    n = weight.shape[1]
    if n % 8:
        raise ValueError(f"weight: expected N to be a multiple of 8 (AWQ packs eight columns), got {n}")
    values, scales, zeros = expert_of(weight, expert)
    check_zeros(zeros, 0, 15, "AWQ")
    return {
        "qweight": pack_words(values.t(), 1, ORDER),
        "qzeros": pack_words(zeros, 1, ORDER),
        "scales": scales.clone(),
    }

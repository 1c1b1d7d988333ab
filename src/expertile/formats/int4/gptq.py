"""GPTQ checkpoints: tensors of one linear layer <-> `Int4Weight`.

What AutoGPTQ (auto_gptq/nn_modules/qlinear/qlinear_cuda.py, `QuantLinear.pack`) and GPTQModel write for in_features K,
out_features N, groups of g along K:

    qweight  int32 [K/8, N]     value k of column n in bits 4·(k mod 8) of word [k // 8, n]
    qzeros   int32 [K/g, N/8]   zero point of column n in bits 4·(n mod 8) of word [·, n // 8]
    scales   float16 [K/g, N]   w[n, k] = scales[k // g, n] · (q − zero)
    g_idx    int32 [K]          group of each k; k // g unless activations were ordered (desc_act)

The first format ("checkpoint_format": "gptq") stores zero − 1, and its readers add 1 without wrapping: 1 … 16. The
second ("gptq_v2", GPTQModel) stores the zero point itself: 0 … 15. The tensors do not say which they are; the model's
quantization config does. Symmetric weights have zero 8 in both.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from expertile.formats.int4._layer import (
    as_weight,
    check_zeros,
    expect_shape,
    expert_of,
    field,
    or_symmetric,
    refuse_act_order,
)
from expertile.formats.int4.packing import pack_words, unpack_words
from expertile.formats.int4.weight import Int4Weight

FIELDS = ("qweight", "qzeros", "scales", "g_idx")


def from_gptq(tensors: Mapping[str, torch.Tensor], *, version: int = 1, dtype: torch.dtype | None = None) -> Int4Weight:
    """One layer's tensors (g_idx may be missing) -> Int4Weight [1, N, K].

    `version` 1 or 2 of the format; `dtype` of the scales: as stored, unless given. ValueError for other bits than 4,
    shapes that do not fit, and an activation order.
    """
    offset = _offset(version)
    qweight, qzeros = field(tensors, "qweight", torch.int32), field(tensors, "qzeros", torch.int32)
    scales = field(tensors, "scales")
    k, n, groups = 8 * qweight.shape[0], qweight.shape[1], scales.shape[0]
    expect_shape("scales", scales, (groups, n), "K/group_size, N of qweight [K/8, N] in 4 bits")
    expect_shape("qzeros", qzeros, (groups, -(-n // 8)), "K/group_size, N/8")
    if groups == 0 or k % groups:
        raise ValueError(f"scales: expected rows that divide K = {k}, got {groups}")
    refuse_act_order("g_idx", tensors.get("g_idx"), k, k // groups)
    zeros = unpack_words(qzeros, 1)[:, :n].to(torch.int32) + offset
    return as_weight(unpack_words(qweight, 0).t(), scales, or_symmetric(zeros), k // groups, dtype)


def to_gptq(weight: Int4Weight, expert: int = 0, *, version: int = 1) -> dict[str, torch.Tensor]:
    """The four tensors of one expert. ValueError for zero points that the version cannot hold, or N % 8 != 0."""
    offset = _offset(version)
    _, n, k = weight.shape
    if n % 8:
        raise ValueError(f"weight: expected N to be a multiple of 8 (qzeros packs eight columns), got {n}")
    values, scales, zeros = expert_of(weight, expert)
    check_zeros(zeros, offset, offset + 15, f"GPTQ version {version}")
    g_idx = torch.arange(k, dtype=torch.int32, device=weight.device) // weight.group_size
    return {
        "qweight": pack_words(values.t(), 0),
        "qzeros": pack_words(zeros - offset, 1),
        "scales": scales.clone(),
        "g_idx": g_idx.to(torch.int32),
    }


def _offset(version: int) -> int:
    if version not in (1, 2):
        raise ValueError(f"version: expected 1 (zero points stored less 1) or 2 (as they are), got {version!r}")
    return 1 if version == 1 else 0

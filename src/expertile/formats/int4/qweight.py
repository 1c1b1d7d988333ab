"""GPTQ and AWQ checkpoints: tensors of one linear layer <-> `Int4Weight`.

For in_features K, out_features N and groups of g along K, w[n, k] = scales[k // g, n] · (q − zero). AutoGPTQ
(auto_gptq/nn_modules/qlinear/qlinear_cuda.py, `QuantLinear.pack`) and GPTQModel write

    qweight  int32 [K/8, N]     value k of column n in bits 4·(k mod 8) of word [k // 8, n]
    qzeros   int32 [K/g, N/8]   zero point of column n in bits 4·(n mod 8) of word [·, n // 8]
    scales   float16 [K/g, N]
    g_idx    int32 [K]          group of each k; k // g unless activations were ordered (desc_act)

The first format ("checkpoint_format": "gptq") stores zero − 1, and its readers add 1 without wrapping: 1 … 16. The
second ("gptq_v2", GPTQModel) stores the zero point itself: 0 … 15. The tensors do not say which they are; the model's
quantization config does. Symmetric weights have zero 8 in both.

AutoAWQ (awq/modules/linear/gemm.py, `WQLinear_GEMM.from_linear`) writes scales as these, zero points as they are, and

    qweight  int32 [K, N/8]     eight columns of row k in a word: column 8·j + ORDER[i] in bits 4·i of word [k, j]
    qzeros   int32 [K/g, N/8]   in the same order

ORDER = 0, 2, 4, 6, 1, 3, 5, 7 suits the byte permutation by which its CUDA kernel unpacks two halves at a time.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from expertile.formats.int4._layer import as_weight, check_zeros, expect_shape, expert_of, field, refuse_act_order
from expertile.formats.int4.packing import IN_ORDER, pack_words, unpack_words
from expertile.formats.int4.weight import SYMMETRIC_ZERO, Int4Weight

AWQ_FIELDS = ("qweight", "qzeros", "scales")
GPTQ_FIELDS = (*AWQ_FIELDS, "g_idx")
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def from_gptq(tensors: Mapping[str, Tensor], *, version: int = 1, dtype: torch.dtype | None = None) -> Int4Weight:
    """One layer's tensors (g_idx may be missing) -> Int4Weight [1, N, K].

    `version` 1 or 2 of the format; `dtype` of the scales: as stored, unless given. ValueError for other bits than 4,
    shapes that do not fit, and an activation order.
    """
    return _read(tensors, "[K/8, N]", 0, IN_ORDER, _offset(version), dtype)


def from_awq(tensors: Mapping[str, Tensor], *, dtype: torch.dtype | None = None) -> Int4Weight:
    """One layer's tensors -> Int4Weight [1, N, K]; `dtype` of the scales: as stored, unless given."""
    return _read(tensors, "[K, N/8]", 1, ORDER, 0, dtype)


def to_gptq(weight: Int4Weight, expert: int = 0, *, version: int = 1) -> dict[str, Tensor]:
    """The four tensors of one expert. ValueError for zero points that the version cannot hold, or N % 8 != 0."""
    tensors = _written(weight, expert, 0, IN_ORDER, _offset(version), f"GPTQ version {version}")
    g_idx = torch.arange(weight.shape[2], dtype=torch.int32, device=weight.device) // weight.group_size
    return {**tensors, "g_idx": g_idx.to(torch.int32)}


def to_awq(weight: Int4Weight, expert: int = 0) -> dict[str, Tensor]:
    """The three tensors of one expert. ValueError for zero points outside 0 … 15, or N no multiple of 8."""
    return _written(weight, expert, 1, ORDER, 0, "AWQ")


def _read(
    tensors: Mapping[str, Tensor], layout: str, dim: int, order: Sequence[int], offset: int, dtype: torch.dtype | None
) -> Int4Weight:
    """From words along dimension `dim` of qweight, of that `layout`; zero points are stored less `offset`."""
    qweight, qzeros = field(tensors, "qweight", torch.int32), field(tensors, "qzeros", torch.int32)
    scales = field(tensors, "scales")
    values = unpack_words(qweight, dim, order).t()
    (n, k), groups = values.shape, scales.shape[0]
    expect_shape("scales", scales, (groups, n), f"K/group_size, N of qweight {layout} in 4 bits")
    expect_shape("qzeros", qzeros, (groups, -(-n // 8)), "K/group_size, N/8")
    if groups == 0 or k % groups:
        raise ValueError(f"scales: expected rows that divide K = {k}, got {groups}")
    refuse_act_order("g_idx", tensors.get("g_idx"), k, k // groups)
    zeros = unpack_words(qzeros, 1, order)[:, :n].to(torch.int32) + offset
    # Formats that always store zero points have no other way to say symmetric.
    asymmetric = bool((zeros != SYMMETRIC_ZERO).any())
    return as_weight(values, scales, zeros if asymmetric else None, k // groups, dtype)


def _written(
    weight: Int4Weight, expert: int, dim: int, order: Sequence[int], offset: int, kind: str
) -> dict[str, Tensor]:
    n = weight.shape[1]
    if n % 8:
        raise ValueError(f"weight: expected N to be a multiple of 8 ({kind} packs eight columns in a word), got {n}")
    values, scales, zeros = expert_of(weight, expert)
    check_zeros(zeros, offset, offset + 15, kind)
    qweight, qzeros = pack_words(values.t(), dim, order), pack_words(zeros - offset, 1, order)
    return {"qweight": qweight, "qzeros": qzeros, "scales": scales.clone()}


def _offset(version: int) -> int:
    if version not in (1, 2):
        raise ValueError(f"version: expected 1 (zero points stored less 1) or 2 (as they are), got {version!r}")
    return 1 if version == 1 else 0

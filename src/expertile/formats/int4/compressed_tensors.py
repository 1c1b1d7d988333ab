"""compressed-tensors checkpoints, format "pack-quantized": tensors of one linear layer <-> `Int4Weight`.

What the compressed-tensors library writes (compressors/quantized_compressors/pack_quantized.py, `pack_to_int32`) for a
weight [N, K], groups of g along K, or one group for a row ("channel"):

    weight_packed      int32 [N, K/8]       signed value + 8 of column k in bits 4·(k mod 8) of word [n, k // 8]
    weight_scale       [N, K/g]             bfloat16, float16 or float32; w = scale · (q − zero)
    weight_zero_point  int32 [N/8, K/g]     only where asymmetric: signed zero point + 8 of row n in bits 4·(n mod 8)
                       or int8 [N, K/g]     signed and not packed, as earlier versions wrote it
    weight_shape       int [2]              N, K
    weight_g_idx       int32 [K]            only for an activation order; -1 where none was set
"""

from collections.abc import Mapping

import torch

from expertile.formats.int4._layer import as_weight, check_zeros, expect_shape, expert_of, field, refuse_act_order
from expertile.formats.int4.packing import pack_words, unpack_words
from expertile.formats.int4.weight import Int4Weight

FIELDS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")


def from_compressed_tensors(tensors: Mapping[str, torch.Tensor], *, dtype: torch.dtype | None = None) -> Int4Weight:
    """One layer's tensors -> Int4Weight [1, N, K]; `dtype` of the scales: as stored, unless given."""
    words, scales = field(tensors, "weight_packed", torch.int32), field(tensors, "weight_scale")
    n, k = (int(x) for x in field(tensors, "weight_shape", dims=1))
    groups = scales.shape[1]
    expect_shape("weight_packed", words, (n, -(-k // 8)), "N, K/8 of weight_shape in 4 bits")
    expect_shape("weight_scale", scales, (n, groups), "N, K/group_size")
    if groups == 0 or k % groups:
        raise ValueError(f"weight_scale: expected columns that divide K = {k}, got {groups}")
    refuse_act_order("weight_g_idx", tensors.get("weight_g_idx"), k, k // groups)
    zeros = None
    if "weight_zero_point" in tensors:
        stored = tensors["weight_zero_point"]
        if stored.dtype is torch.int32:
            expect_shape("weight_zero_point", stored, (-(-n // 8), groups), "N/8, K/group_size")
            zeros = unpack_words(stored, 0)[:n].t()
        else:
            stored = field(tensors, "weight_zero_point", torch.int8)
            expect_shape("weight_zero_point", stored, (n, groups), "N, K/group_size")
            zeros = stored.t().to(torch.int32) + 8
    return as_weight(unpack_words(words, 1)[:, :k], scales.t(), zeros, k // groups, dtype)


def to_compressed_tensors(weight: Int4Weight, expert: int = 0) -> dict[str, torch.Tensor]:
    """The tensors of one expert, zero points packed. ValueError for zero points outside 0 … 15."""
    _, n, k = weight.shape
    values, scales, zeros = expert_of(weight, expert)
    tensors = {
        "weight_packed": pack_words(values, 1),
        "weight_scale": scales.t().contiguous(),
        "weight_shape": torch.tensor([n, k]),
    }
    if weight.zeros is not None:
        check_zeros(zeros, 0, 15, "compressed-tensors")
        tensors["weight_zero_point"] = pack_words(zeros.t(), 0)
    return tensors

"""DeepGEMM as a rival of `scaled_grouped_mm`: contiguous (groups one after the other, each padded to a multiple of 128
rows), and masked, for decode ([G, most rows, K], and on the device how many of a group's rows count). Rows are padded,
and a's scales laid out as its TMA loads want them, before timing. Times include its work on padding."""

from itertools import accumulate

import torch
from torch import Tensor

from expertile.device import Device
from expertile.lab.operators import products
from expertile.lab.race.operator import Call, Workload

ALIGNMENT = 128  # rows; `deep_gemm.get_mk_alignment_for_contiguous_layout()` on compute capability 9.0
_MOST_NBYTES = 16 * 2**30


def supports(w: Workload, device: Device, masked: bool = False) -> str | None:
    if device.kind != "cuda" or device.capability != (9, 0):
        return "float32 scales need compute capability 9.0"
    if w["k"] % 128 or w["n"] % 64:
        return f"K must be a multiple of 128 and N of 64, got {w['k']} and {w['n']}"
    if masked and sum(_rooms(w, True)) * (w["k"] + 2 * w["n"]) > _MOST_NBYTES:
        return "the masked layout of the largest group for each would take more than 16 GiB"
    return None


def bind(w: Workload, inputs: tuple[Tensor, ...], masked: bool = False) -> Call:
    import deep_gemm

    a, scale_a, weights, scale_b, _ = inputs
    rows, n, groups = sum(_rooms(w, masked)), w["n"], w["groups"]
    index = _index(w, masked).to(a.device)
    if rows != a.shape[0]:
        padded = torch.zeros(rows, a.shape[1], dtype=torch.uint8, device=a.device)
        padded[index] = a.view(torch.uint8)
        a, ones = padded.view(a.dtype), torch.ones(rows, scale_a.shape[1], device=a.device)
        ones[index] = scale_a
        scale_a = ones
    if masked:
        a, scale_a = a.view(groups, rows // groups, -1), scale_a.reshape(groups, rows // groups, -1)
    left = (a, deep_gemm.get_mn_major_tma_aligned_tensor(scale_a.contiguous()))
    sizes = torch.tensor(products.sizes(w), dtype=torch.int32, device=a.device)
    expected = max(1, round(products.rows(w) / groups))
    live = [(start, size) for start, size in zip(_starts(w, masked), products.sizes(w), strict=True) if size]
    room = torch.tensor(_rooms(w, False))
    of_rows = torch.arange(groups, dtype=torch.int32).repeat_interleave(room).to(a.device)

    def call() -> tuple[Tensor, ...]:
        out = torch.empty(*a.shape[:-1], n, dtype=torch.bfloat16, device=a.device)
        if masked:
            deep_gemm.m_grouped_fp8_gemm_nt_masked(left, (weights, scale_b), out, sizes, expected)
        else:
            deep_gemm.m_grouped_fp8_gemm_nt_contiguous(left, (weights, scale_b), out, of_rows)
        rows_of = out.view(-1, n)
        return tuple(rows_of[start : start + size] for start, size in live)

    return call


def reference(w: Workload, product: Tensor) -> tuple[Tensor, ...]:
    """The rows of `product` [M, N], group by group: the results are views of the layout's rows."""
    return tuple(product[start:end] for _, start, end in products.spans(w))


def _rooms(w: Workload, masked: bool) -> tuple[int, ...]:
    """Rows that the layout keeps for each group."""
    rooms = tuple(-(-size // ALIGNMENT) * ALIGNMENT for size in products.sizes(w))
    return (max(rooms),) * len(rooms) if masked else rooms


def _starts(w: Workload, masked: bool) -> list[int]:
    """The first row of each group in that layout."""
    return [0, *accumulate(_rooms(w, masked))][:-1]


def _index(w: Workload, masked: bool) -> Tensor:
    """Where each of the M rows lies in that layout."""
    starts, sizes = torch.tensor(_starts(w, masked)), torch.tensor(products.sizes(w))
    first = torch.cumsum(sizes, 0) - sizes
    return torch.arange(int(sizes.sum())) + (starts - first).repeat_interleave(sizes)

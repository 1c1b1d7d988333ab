"""Problem: the shapes, dtypes and strides of one attention call, validated once, with no tensor inside.

    out[b, h, i] = sum_j softmax_j(scale · q[b, h, i] · k[b, h', j]) v[b, h', j],   h' = h // (heads / kv_heads)

Dense: q, out [B, H, Lq, D], k and v [B, Hkv, Lk, D]. Packed: q, out [total_q, H, D], k and v [total_k, Hkv, D], where
sequence b has the rows cu_seqlens[b] to cu_seqlens[b + 1]. Causal masks are aligned at the bottom right, as those of
FlashAttention 2 since version 2.1: query i of Lq sees the keys j <= i + Lk - Lq.
"""

from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral

import torch

from expertile.device import dtype_key
from expertile.ops.checks import check_like, check_number
from expertile.roofline import Work

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class Problem:
    """One attention. Strides are (batch, head, row) in elements, 0 for the batch of packed tensors; `aligned`: base
    addresses and row strides of q, k and v are multiples of 16 bytes. `q_len`, `k_len` are the longest of packed
    sequences, `q_rows` and `k_rows` all their rows (batch times length of dense ones)."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    k_len: int
    head_dim: int
    dtype: torch.dtype
    causal: bool
    scale: float
    packed: bool
    q_rows: int
    k_rows: int
    q_strides: tuple[int, int, int]
    k_strides: tuple[int, int, int]
    v_strides: tuple[int, int, int]
    aligned: bool = True
    device_type: str = "cuda"
    # Whether the same inputs must give the same bits (torch.use_deterministic_algorithms).
    deterministic: bool = False
    # Whether LSE takes part in the gradient.
    lse_grad: bool = False

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.kv_heads

    @property
    def dtype_key(self) -> str:
        """The key of the matrix unit in `Device.peak_flops`; what no matrix unit multiplies goes by float32."""
        return "fp32" if self.dtype is torch.float64 else dtype_key(self.dtype)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute: no query, or no key for any."""
        return 0 in (self.q_rows, self.k_rows, self.heads, self.q_len, self.k_len, self.batch)

    @property
    def not_in_words(self) -> str | None:
        """Why a kernel that moves rows of 16-bit floats in words of 16 bytes, TMA or not, cannot take this, or None."""
        if self.dtype not in DTYPES[:2]:
            return f"takes bfloat16 and float16, not {self.dtype}"
        if self.head_dim % 8:
            return f"takes head dimensions in multiples of 8 (rows of whole 16 bytes), not {self.head_dim}"
        if not self.aligned:
            return "takes base addresses and strides in multiples of 16 bytes"
        every = (self.q_strides, self.k_strides, self.v_strides)
        if any(s <= 0 for strides in every for s in (strides[1:] if self.packed else strides)):
            return "takes positive strides: an expanded dimension has none"
        return f"takes a positive scale, not {self.scale}" if self.scale <= 0 else None

    @property
    def mean_lengths(self) -> tuple[float, float]:
        """Queries and keys of a sequence, of packed ones on average."""
        whole = self.packed and self.batch
        return (self.q_rows / self.batch, self.k_rows / self.batch) if whole else (self.q_len, self.k_len)

    def pairs(self) -> float:
        """Query-key pairs that are not masked, of one head, all sequences; packed ones taken as equally long."""
        q, k = self.mean_lengths
        if not self.causal:
            return self.batch * q * k
        # Query i sees min(k, max(0, i + 1 + k - q)) keys.
        rows = min(q, k)
        return self.batch * (rows * (k - rows) + rows * (rows + 1) / 2)

    def work(self) -> Work:
        """FLOPs of the forward's two products (2 per multiply-add, unmasked pairs only); bytes: q, k, v read once, out
        and the float32 LSE written once."""
        flops = 4.0 * self.heads * self.pairs() * self.head_dim
        rows = 2 * self.heads * self.q_rows + 2 * self.kv_heads * self.k_rows
        return Work(flops, rows * self.head_dim * self.dtype.itemsize + 4 * self.heads * self.q_rows)

    def backward_work(self) -> Work:
        """FLOPs of the backward's five products S, dP, dQ, dK, dV; bytes: q, k, v, out, dout, LSE read once, dq, dk, dv
        written once."""
        flops = 10.0 * self.heads * self.pairs() * self.head_dim
        rows = 4 * self.heads * self.q_rows + 4 * self.kv_heads * self.k_rows
        return Work(flops, rows * self.head_dim * self.dtype.itemsize + 4 * self.heads * self.q_rows)

    @staticmethod
    def from_tensors(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_k: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        causal: bool = False,
        scale: float | None = None,
        lse_grad: bool = False,
    ) -> "Problem":
        """Validate the operands of `attention` and describe them.

        Raises TypeError or ValueError naming the argument, what was expected and what came. Never reads a value that
        lies on a GPU.
        """
        packed = cu_seqlens_q is not None or cu_seqlens_k is not None
        _check_tensors(q, k, v, packed)
        head_dim = q.shape[-1]
        if scale is not None:
            check_number("scale", scale)
        scale = head_dim**-0.5 if scale is None else float(scale)
        if packed:
            batch = _check_packed(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
            (q_rows, heads), (k_rows, kv_heads) = q.shape[:2], k.shape[:2]
            q_len, k_len = min(int(max_seqlen_q or 0), q_rows), min(int(max_seqlen_k or 0), k_rows)
        else:
            for name, value in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
                if value is not None:
                    raise ValueError(f"{name}: expected None without cu_seqlens, got {value!r}")
            batch, heads, q_len = q.shape[:3]
            kv_heads, k_len = k.shape[1:3]
            q_rows, k_rows = batch * q_len, batch * k_len
        if kv_heads == 0 or heads % kv_heads:
            raise ValueError(f"q: expected a multiple of k's {kv_heads} heads, got {heads}")
        strides = row_strides(q, packed), row_strides(k, packed), row_strides(v, packed)
        itemsize = q.dtype.itemsize
        aligned = all(
            x.data_ptr() % 16 == 0 and all(s * itemsize % 16 == 0 for s in strides_of)
            for x, strides_of in zip((q, k, v), strides, strict=True)
        )
        sizes, rows = (batch, heads, kv_heads, q_len, k_len, head_dim), (q_rows, k_rows)
        sure = torch.are_deterministic_algorithms_enabled()
        return Problem(
            *sizes, q.dtype, bool(causal), scale, packed, *rows, *strides, aligned, q.device.type, sure, lse_grad
        )


def row_strides(x: torch.Tensor, packed: bool) -> tuple[int, int, int]:
    """(batch, head, row) strides of a tensor of q's or k's kind, 0 for the batch of packed ones.

    A dimension of one element is never stepped along: it goes by what a contiguous tensor would have.
    """
    if packed:
        rows, heads, dim = x.shape
        return 0, x.stride(1) if heads > 1 else dim, x.stride(0) if rows > 1 else heads * dim
    batch, heads, rows, dim = x.shape
    return (
        x.stride(0) if batch > 1 else heads * rows * dim,
        x.stride(1) if heads > 1 else rows * dim,
        x.stride(2) if rows > 1 else dim,
    )


def _check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed: bool) -> None:
    dims = 3 if packed else 4
    shape = "[total, heads, D]" if packed else "[batch, heads, length, D]"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
        if x.dim() != dims:
            raise ValueError(f"{name}: expected {dims} dimensions {shape}, got shape {list(x.shape)}")
        if x.dtype not in DTYPES:
            raise ValueError(f"{name}: expected a dtype of {', '.join(map(str, DTYPES))}, got {x.dtype}")
        check_like(name, x, q, "q", "dtype", "device")
        if x.shape[-1] != q.shape[-1]:
            raise ValueError(f"{name}: expected a last dimension of {q.shape[-1]} as q has, got shape {list(x.shape)}")
        if x.stride(-1) != 1 and x.shape[-1] > 1 and x.numel():
            raise ValueError(f"{name}: expected a contiguous last dimension, got strides {list(x.stride())}")
    if not 1 <= q.shape[-1] <= MAX_HEAD_DIM:
        raise ValueError(f"q: expected a last dimension of 1 to {MAX_HEAD_DIM}, got {q.shape[-1]}")
    if k.shape != v.shape:
        raise ValueError(f"v: expected shape {list(k.shape)} as k has, got {list(v.shape)}")
    if not packed and k.shape[0] != q.shape[0]:
        raise ValueError(f"k: expected batch {q.shape[0]} as q has, got {k.shape[0]}")


def _check_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
) -> int:
    """The number of sequences. Values of cu_seqlens are read where they lie on the CPU."""
    for name, cu in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(cu, torch.Tensor):
            raise TypeError(f"{name}: expected an int32 tensor (both are needed or none), got {type(cu).__name__}")
        if cu.dtype is not torch.int32 or cu.dim() != 1 or cu.shape[0] < 1:
            raise ValueError(f"{name}: expected int32 [batch + 1], got {cu.dtype} {list(cu.shape)}")
        check_like(name, cu, q, "q", "device")
        if not cu.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor, got stride {cu.stride(0)}")
    assert cu_seqlens_q is not None and cu_seqlens_k is not None
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_k: expected length {cu_seqlens_q.shape[0]} as cu_seqlens_q has, got {cu_seqlens_k.shape[0]}"
        )
    for name, value in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if not isinstance(value, (Integral, torch.SymInt, torch.Tensor)) or value < 0:
            raise ValueError(f"{name}: expected the longest sequence's length with cu_seqlens, got {value!r}")
    if type(cu_seqlens_q) is torch.Tensor and cu_seqlens_q.device.type == "cpu":
        _check_starts("q", cu_seqlens_q.tolist(), q.shape[0], max_seqlen_q or 0)
        _check_starts("k", cu_seqlens_k.tolist(), k.shape[0], max_seqlen_k or 0)
    return cu_seqlens_q.shape[0] - 1


def _check_starts(name: str, starts: list[int], rows: int, longest: int) -> None:
    lengths = [end - start for start, end in pairwise(starts)]
    if starts[0] != 0 or starts[-1] != rows or min(lengths, default=0) < 0:
        raise ValueError(f"cu_seqlens_{name}: expected 0 to {rows}, {name}'s rows, never decreasing, got {starts}")
    if max(lengths, default=0) > longest:
        raise ValueError(f"max_seqlen_{name}: expected at least {max(lengths)}, the longest sequence, got {longest}")

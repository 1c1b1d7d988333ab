"""Problem: the shapes, dtypes and strides of one grouped matrix product, validated once, with no tensor inside.

Four layouts, named by the dimension whose length differs from group to group (the contract is that of
`torch.nn.functional.grouped_mm`):

| layout   | a           | b           | out         | group g computes                                    |
|----------|-------------|-------------|-------------|-----------------------------------------------------|
| RAGGED_M | [M_tot, K]  | [G, K, N]   | [M_tot, N]  | out[rows of g] = a[rows of g] @ b[g]                |
| RAGGED_K | [M, K_tot]  | [K_tot, N]  | [G, M, N]   | out[g] = a[:, columns of g] @ b[rows of g]          |
| RAGGED_N | [G, M, K]   | [K, N_tot]  | [M, N_tot]  | out[:, columns of g] = a[g] @ b[:, columns of g]    |
| BATCHED  | [G, M, K]   | [G, K, N]   | [G, M, N]   | out[g] = a[g] @ b[g]                                |
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple

import torch

from expertile.device import dtype_key
from expertile.ops.checks import check_index, check_like
from expertile.ragged import sizes_from_offs
from expertile.roofline import Work

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LINE_BYTES = 128  # of L2
ALL_DTYPES = (*DTYPES, torch.float64)  # the last in torch's own products, one per group: so that gradcheck runs


class Layout(StrEnum):
    """Which dimension is ragged; see the table above."""

    RAGGED_M = "ragged_m"
    RAGGED_K = "ragged_k"
    RAGGED_N = "ragged_n"
    BATCHED = "batched"


_BY_DIMS = {(2, 3): Layout.RAGGED_M, (2, 2): Layout.RAGGED_K, (3, 2): Layout.RAGGED_N, (3, 3): Layout.BATCHED}


class Description(NamedTuple):
    """What a `Problem` needs to know of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    aligned: bool  # base address a multiple of 16 bytes


def described(x: torch.Tensor | None) -> tuple[Any, ...] | None:
    """The fields of x's `Description`, as a tuple that is cheap to make at every call."""
    return None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16 == 0)


def descriptions(*fields: tuple[Any, ...] | None) -> Iterator[Description | None]:
    """Of what is `described`."""
    return (None if f is None else Description(*f) for f in fields)


def in_standard_form(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy, contiguous and 16-byte aligned: of two views of a token's row all backends take both or neither."""
    width = x.shape[-1]
    standard = x.stride()[-2:] == (width, 1) and (x.dim() == 2 or x.stride(0) == x.shape[1] * width)
    return x if standard and x.data_ptr() % 16 == 0 else torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


@dataclass(frozen=True)
class Problem:
    """One grouped product. `m`, `n`, `k` are per-group sizes, but the ragged one is the total over all groups
    (rows past offs[-1] included). Strides are in elements. `group_sizes` is None when only the device knows them."""

    layout: Layout
    groups: int
    m: int
    n: int
    k: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    a_strides: tuple[int, ...]
    b_strides: tuple[int, ...]
    a_aligned: bool = True  # base address a multiple of 16 bytes
    b_aligned: bool = True
    has_bias: bool = False
    device_type: str = "cuda"
    group_sizes: tuple[int, ...] | None = None
    allow_tf32: bool = False

    @property
    def dtype_key(self) -> str:
        """The key of the matrix unit in `Device.peak_flops`."""
        return "fp32" if self.dtype is torch.float64 else dtype_key(self.dtype, self.allow_tf32)

    @property
    def operands(self) -> str:
        """What is multiplied, in a word."""
        return "fp64" if self.dtype is torch.float64 else self.dtype_key

    @cached_property
    def out_shape(self) -> tuple[int, ...]:
        if self.layout in (Layout.RAGGED_M, Layout.RAGGED_N):
            return (self.m, self.n)
        return (self.groups, self.m, self.n)

    @property
    def ragged_total(self) -> int:
        """Length of the ragged dimension (0 for BATCHED)."""
        return {Layout.RAGGED_M: self.m, Layout.RAGGED_K: self.k, Layout.RAGGED_N: self.n}.get(self.layout, 0)

    @property
    def aligned_rows(self) -> tuple[bool, bool]:
        """Whether the rows of `a` and of `b` are multiples of L2's lines apart. Others take TMA 2.7 times as long."""
        a, b = (max(s[-2:]) * self.dtype.itemsize % LINE_BYTES == 0 for s in (self.a_strides, self.b_strides))
        return a, b

    @property
    def mean_group(self) -> float:
        """Mean length of a group in the ragged dimension (m for BATCHED)."""
        return self.m if self.layout is Layout.BATCHED else self.ragged_total / max(1, self.groups)

    def work(self, group_sizes: Sequence[int] | None = None) -> Work:
        """Useful FLOPs (2 per multiply-add) and algorithmic bytes (each input once, each output once).

        With `group_sizes` (or the problem's own) only rows inside groups count, and only weights of groups that
        have rows are read; without them every group is taken to be in use.
        """
        sizes = group_sizes if group_sizes is not None else self.group_sizes
        g, m, n, k = self.groups, self.m, self.n, self.k
        isz, osz = self.dtype.itemsize, self.out_dtype.itemsize
        if self.layout is Layout.BATCHED:
            return Work(2.0 * g * m * n * k, (g * m * k + g * k * n) * isz + g * m * n * osz)
        total = self.ragged_total if sizes is None else sum(sizes)
        used = g if sizes is None else sum(s > 0 for s in sizes)
        if self.layout is Layout.RAGGED_M:
            return Work(2.0 * total * n * k, (total * k + used * k * n) * isz + total * n * osz)
        if self.layout is Layout.RAGGED_N:
            return Work(2.0 * total * m * k, (total * k + used * k * m) * isz + total * m * osz)
        return Work(2.0 * total * m * n, total * (m + n) * isz + g * m * n * osz)

    def sizes(self, offs: torch.Tensor | None) -> tuple[int, ...]:
        """The length of each group (m for BATCHED), of `offs` where they are not known: that waits for a GPU."""
        if self.layout is Layout.BATCHED:
            return (self.m,) * self.groups
        if self.group_sizes is not None:
            return self.group_sizes
        assert offs is not None
        return sizes_from_offs(offs)

    def with_sizes(self, group_sizes: Sequence[int] | None) -> "Problem":
        """The same problem with (or without) group sizes known to the host."""
        return replace(self, group_sizes=None if group_sizes is None else tuple(group_sizes))

    @staticmethod
    def from_tensors(
        a: torch.Tensor,
        b: torch.Tensor,
        offs: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        check: bool = False,
    ) -> "Problem":
        """Validate the operands of `grouped_mm` and describe them.

        Raises ValueError naming the argument, what was expected and what came. Values of `offs` are read (which
        synchronises with a GPU) only with `check=True`, or when `offs` lives on the CPU anyway.
        """
        if offs is not None and not isinstance(offs, torch.Tensor):
            raise ValueError(f"offs: expected an int32 tensor, got {type(offs).__name__}")
        tf32 = a.dtype is torch.float32 and tf32_allowed()
        fields = (described(a), described(b), described(offs), described(bias))
        problem = Problem.from_descriptions(*fields, out_dtype, tf32)
        if offs is None or not (check or not offs.is_cuda):
            return problem
        sizes = sizes_from_offs(offs)
        check_offs_values(sizes, problem.ragged_total)
        return problem.with_sizes(sizes)

    @staticmethod
    def from_descriptions(
        a_fields: tuple[Any, ...] | None,
        b_fields: tuple[Any, ...] | None,
        offs_fields: tuple[Any, ...] | None = None,
        bias_fields: tuple[Any, ...] | None = None,
        out_dtype: torch.dtype | None = None,
        allow_tf32: bool = False,
    ) -> "Problem":
        """`from_tensors` of what is `described`, and so without the values of `offs`."""
        a, b, offs, bias = descriptions(a_fields, b_fields, offs_fields, bias_fields)
        assert a is not None and b is not None
        layout = _BY_DIMS.get((len(a.shape), len(b.shape)))
        if layout is None:
            raise ValueError(f"a, b: expected 2 or 3 dimensions each, got a {list(a.shape)} and b {list(b.shape)}")
        if a.dtype not in ALL_DTYPES:
            raise ValueError(f"a: expected dtype {_names(ALL_DTYPES)}, got {a.dtype}")
        check_like("b", b, a, "a", "dtype", "device")
        out_dtype = a.dtype if out_dtype is None else out_dtype
        allowed = ALL_DTYPES if a.dtype is torch.float64 else DTYPES
        if out_dtype not in allowed:
            raise ValueError(f"out_dtype: expected {_names(allowed)}, got {out_dtype}")
        m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
        if b.shape[-2] != k:
            raise ValueError(f"b: expected {k} rows (a's last dimension), got {b.shape[-2]} in shape {list(b.shape)}")
        if layout is Layout.BATCHED and a.shape[0] != b.shape[0]:
            raise ValueError(f"b: expected {a.shape[0]} groups as a has, got {b.shape[0]} in shape {list(b.shape)}")
        groups = groups_of(layout, a, b, offs)
        if layout is Layout.RAGGED_M and groups == 0 and m > 0:
            raise ValueError(f"b: expected at least one group for {m} rows of a, got shape {list(b.shape)}")
        if layout is Layout.RAGGED_N and groups == 0 and n > 0:
            raise ValueError(f"a: expected at least one group for {n} columns of b, got shape {list(a.shape)}")
        if bias is not None:
            check_bias(layout, bias, groups, n, a)
        memory = (a.strides, b.strides, a.aligned, b.aligned, bias is not None, a.device.type)
        return Problem(layout, groups, m, n, k, a.dtype, out_dtype, *memory, None, allow_tf32)


def tf32_allowed() -> bool:
    """Whether torch lets float32 products on CUDA run in TF32."""
    # It says so after either switch has been used; the older one, allow_tf32, raises once the newer has been.
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(str(d) for d in dtypes)


def groups_of(layout: Layout, a: Description, b: Description, offs: Description | None) -> int:
    """The number of groups, after `offs` has been checked against the operands."""
    if layout is Layout.BATCHED:
        if offs is not None:
            raise ValueError("offs: expected None when a and b both have a group dimension, got a tensor")
        return a.shape[0]
    if offs is None:
        raise ValueError(
            f"offs: expected an int32 tensor with the end of each group ({layout.value}: a {list(a.shape)}, "
            f"b {list(b.shape)}), got None"
        )
    check_index("offs", offs, a, "a")
    if layout is Layout.RAGGED_K:
        if offs.shape[0] == 0:
            raise ValueError("offs: expected at least one group, got length 0")
        return offs.shape[0]
    groups = b.shape[0] if layout is Layout.RAGGED_M else a.shape[0]
    if offs.shape[0] != groups:
        operand = "b" if layout is Layout.RAGGED_M else "a"
        raise ValueError(f"offs: expected length {groups} (the groups of {operand}), got {offs.shape[0]}")
    return groups


def check_bias(layout: Layout, bias: Description, groups: int, n: int, a: Description, name_a: str = "a") -> None:
    if layout in (Layout.RAGGED_N, Layout.RAGGED_K):
        raise ValueError("bias: expected None unless a's rows are grouped (2-D x 3-D or 3-D x 3-D), got a tensor")
    if tuple(bias.shape) != (groups, n):
        raise ValueError(f"bias: expected shape [{groups}, {n}] (groups, columns of b), got {list(bias.shape)}")
    allowed = ALL_DTYPES if a.dtype is torch.float64 else DTYPES
    if bias.dtype not in allowed:
        raise ValueError(f"bias: expected dtype {_names(allowed)}, got {bias.dtype}")
    check_like("bias", bias, a, name_a, "device")


def check_offs_values(sizes: Sequence[int], total: int) -> None:
    for g, size in enumerate(sizes):
        if size < 0:
            what = "a negative end" if g == 0 else f"an end {-size} before the previous one"
            raise ValueError(f"offs: expected ends that never decrease, starting at 0 or more; got {what} at group {g}")
    if sum(sizes) > total:
        raise ValueError(f"offs: expected a last end of at most {total} (the ragged dimension), got {sum(sizes)}")

"""Grouped products to measure: exact shapes, dtype and rows per group. `m`, `n`, `k` are per-group sizes as in
`Problem`; the ragged one is the total over all groups."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from expertile.lab.race.operator import Dims, Workload
from expertile.ops.grouped_mm.problem import Layout, Problem

OP = "grouped_mm"
DTYPES = ("fp32", "bf16", "fp16")
# How the last two dimensions lie in memory. "nk": weights stored [G, N, K] (as torch.nn.Linear does) and
# passed transposed; "km": activations stored [K_tot, M] and passed transposed, as the weight gradient does.
A_LAYOUTS = ("mk", "km")
B_LAYOUTS = ("nk", "kn")
RAGGED_DIM = {Layout.RAGGED_M: "m", Layout.RAGGED_K: "k", Layout.RAGGED_N: "n"}  # the dim that holds a total


@dataclass(frozen=True, kw_only=True)
class GroupedWorkload(Workload):
    """One grouped product; `dims` follow from the other fields.

    | layout   | a           | b           | out        | group_sizes             | total held by |
    |----------|-------------|-------------|------------|-------------------------|---------------|
    | RAGGED_M | [m, k]      | [G, k, n]   | [m, n]     | rows of each group      | m             |
    | RAGGED_K | [m, k]      | [k, n]      | [G, m, n]  | summands of each group  | k             |
    | RAGGED_N | [G, m, k]   | [k, n]      | [m, n]     | columns of each group   | n             |
    | BATCHED  | [G, m, k]   | [G, k, n]   | [G, m, n]  | m of each group, equal  | –             |

    `dtype` is "bf16", "fp16" or "fp32". `routing` says how the rows were distributed, with the seed. Raises ValueError
    naming the field, what was expected and what came.
    """

    op: str = OP
    dims: Dims = field(init=False, default=())
    layout: Layout
    group_sizes: tuple[int, ...]
    m: int
    n: int
    k: int
    a_layout: str = "mk"
    b_layout: str = "nk"
    routing: str = ""

    def __post_init__(self) -> None:
        dims = ("layout", "groups", "m", "n", "k", "group_sizes", "a_layout", "b_layout", "routing")
        values = {**{d: getattr(self, d) for d in dims}, "layout": self.layout.value}
        object.__setattr__(self, "dims", tuple(values.items()))
        where = f"workload {self.name!r}: "
        for key, known in (("dtype", DTYPES), ("a_layout", A_LAYOUTS), ("b_layout", B_LAYOUTS)):
            if getattr(self, key) not in known:
                raise ValueError(f"{where}{key}: expected one of {', '.join(known)}, got {getattr(self, key)!r}")
        super().__post_init__()
        if not self.group_sizes:
            raise ValueError(f"{where}group_sizes: expected at least one group, got none")
        for g, size in enumerate(self.group_sizes):
            if size < 0:
                raise ValueError(f"{where}group_sizes[{g}]: expected 0 or more, got {size}")
        ragged = RAGGED_DIM.get(self.layout)
        for dim in ("m", "n", "k"):
            least = 0 if dim == ragged else 1
            if getattr(self, dim) < least:
                raise ValueError(f"{where}{dim}: expected {least} or more, got {getattr(self, dim)}")
        if ragged is None:
            if set(self.group_sizes) != {self.m}:
                raise ValueError(
                    f"{where}group_sizes: expected {self.m} (m) for every group of a batched product, "
                    f"got {list(self.group_sizes)}"
                )
        elif sum(self.group_sizes) != getattr(self, ragged):
            raise ValueError(
                f"{where}{ragged}: expected {sum(self.group_sizes)}, the sum of group_sizes, "
                f"got {getattr(self, ragged)}"
            )

    @property
    def groups(self) -> int:
        return len(self.group_sizes)

    @property
    def a_shape(self) -> tuple[int, ...]:
        return self._shape(self.m, self.k, Layout.RAGGED_N)

    @property
    def b_shape(self) -> tuple[int, ...]:
        return self._shape(self.k, self.n, Layout.RAGGED_M)

    @property
    def out_shape(self) -> tuple[int, ...]:
        return self._shape(self.m, self.n, Layout.RAGGED_K)

    def _shape(self, rows: int, columns: int, grouped: Layout) -> tuple[int, ...]:
        """Of a tensor that has a matrix for each group in the `grouped` layout and in a batched product."""
        return (self.groups, rows, columns) if self.layout in (grouped, Layout.BATCHED) else (rows, columns)

    @property
    def a_strides(self) -> tuple[int, ...]:
        """In elements."""
        return _strides(self.a_shape, transposed=self.a_layout == "km")

    @property
    def b_strides(self) -> tuple[int, ...]:
        """In elements."""
        return _strides(self.b_shape, transposed=self.b_layout == "nk")

    @property
    def out_nbytes(self) -> int:
        return math.prod(self.out_shape) * self.itemsize

    @property
    def memory_nbytes(self) -> int:
        """What one set of operands and one result occupy (all weights, used or not)."""
        operands = math.prod(self.a_shape) + math.prod(self.b_shape)
        return operands * self.itemsize + self.out_nbytes

    def problem(self, device_type: str, allow_tf32: bool = False) -> Problem:
        """The `Problem` of this workload, its group sizes known to the host."""
        sizes, dtypes = (self.groups, self.m, self.n, self.k), (self.torch_dtype, self.torch_dtype)
        known: Any = {"device_type": device_type, "group_sizes": self.group_sizes, "allow_tf32": allow_tf32}
        return Problem(self.layout, *sizes, *dtypes, self.a_strides, self.b_strides, **known)

    def with_sizes(self, group_sizes: Sequence[int], **changes: Any) -> "GroupedWorkload":
        """The same product over other group sizes, the ragged total following; `changes` replace further fields.
        ValueError for a batched product, whose groups are equal."""
        ragged = RAGGED_DIM.get(self.layout)
        if ragged is None:
            raise ValueError(f"workload {self.name!r}: expected a ragged layout, got {self.layout.value}")
        sizes = tuple(group_sizes)
        fields: dict[str, Any] = {"group_sizes": sizes, ragged: sum(sizes), **changes}
        return replace(self, **fields)


def grouped(
    name: str, preset: str, layout: Layout, sizes: Sequence[int], m: int, n: int, k: int, dtype: str, **fields: Any
) -> GroupedWorkload:
    return GroupedWorkload(name, preset, dtype, layout=layout, group_sizes=tuple(sizes), m=m, n=n, k=k, **fields)


def ragged_m(
    name: str, preset: str, sizes: Sequence[int], k: int, n: int, dtype: str, **fields: Any
) -> GroupedWorkload:
    """a [sum(sizes), k] times weights [G, n, k]: the forward product of experts."""
    return grouped(name, preset, Layout.RAGGED_M, sizes, sum(sizes), n, k, dtype, **fields)


def wgrad(name: str, preset: str, sizes: Sequence[int], m: int, n: int, dtype: str, **fields: Any) -> GroupedWorkload:
    """Weight gradients dW[g] = a[rows of g]ᵀ b[rows of g] -> [G, m, n]; a stored [rows, m], b [rows, n]."""
    stored = {"a_layout": "km", "b_layout": "kn", **fields}
    return grouped(name, preset, Layout.RAGGED_K, sizes, m, n, sum(sizes), dtype, **stored)


def _strides(shape: tuple[int, ...], transposed: bool) -> tuple[int, ...]:
    rows, cols = shape[-2:]
    inner = (1, rows) if transposed else (cols, 1)
    return inner if len(shape) == 2 else (rows * cols, *inner)

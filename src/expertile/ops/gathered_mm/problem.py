"""GatherProblem: the shapes, dtypes and strides of one product with gathered rows, validated once, without tensors.

Four products of a Mixture-of-Experts layer. R rows stand in expert order ("permuted"), rows [R] int32 is the token of
each, offs [E] int32 the end row of each expert g, and slots[r] = t * k + j says which of a token's k choices row r is:

| product  | a          | b          | outputs                              | row r of expert g                        |
|----------|------------|------------|--------------------------------------|------------------------------------------|
| MM       | x [T, K]   | [E, K, N]  | out [R, N]                           | out[r] = a[rows[r]] @ b[g] (+ bias[g])   |
| GATED    | x [T, K]   | [E, K, 2I] | act [R, I], pre [R, 2I]              | pre as MM's out; act = f(pre)            |
| BACKWARD | dy [T, K]  | [E, K, I]  | dpre [R, 2I], act_w [R, I], dweights | see `api.gated_backward_mm`              |
| WGRAD    | x [T, M]   | d [R, N]   | out [E, M, N]                        | out[g] = Σ_r a[rows[r]]ᵀ b[r]            |

Without `rows` nothing is gathered: a is [R, K] in expert order already. WGRAD can gather b instead: x [R, M], d [T, N].
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from expertile.device import dtype_key
from expertile.ops.checks import check_dims, check_index, check_like
from expertile.ops.grouped_mm.problem import DTYPES, Description, Layout, Problem, check_bias, descriptions
from expertile.roofline import Work

ACTIVATIONS = ("swiglu", "geglu", "reglu", "gpt_oss")


class Product(StrEnum):
    """What is computed; see the table above."""

    MM = "mm"
    GATED = "gated"
    BACKWARD = "backward"
    WGRAD = "wgrad"


@dataclass(frozen=True)
class GatherProblem:
    """One product. `m`, `n`, `k` are those of the grouped product inside: [m, k] by [k, n] with m = R rows (MM, GATED
    with n = 2I, BACKWARD with n = I), or, for WGRAD, k = R rows summed. Strides are in elements; b's are those of
    [E, K, N] (BACKWARD: of the transposed down-projection), or of [rows, N] for WGRAD."""

    product: Product
    groups: int
    m: int
    n: int
    k: int
    tokens: int  # rows of the gathered tensor; R where nothing is gathered
    dtype: torch.dtype
    a_strides: tuple[int, ...]
    b_strides: tuple[int, ...]
    gathered: str = "a"  # "a", "b" (WGRAD) or "" (nothing is)
    a_aligned: bool = True  # base address a multiple of 16 bytes
    b_aligned: bool = True
    has_bias: bool = False
    activation: str = ""  # of ACTIVATIONS, for GATED and BACKWARD
    interleaved: bool = False  # columns of pre: (g0, u0, g1, u1, …); otherwise [gate | up]
    save_pre: bool = True  # GATED: whether pre is an output
    weights_shape: tuple[int, ...] = ()  # BACKWARD: [T, k], of the routing weights and their gradient
    device_type: str = "cuda"
    allow_tf32: bool = False

    @property
    def rows(self) -> int:
        """R, the rows in expert order, those past offs[-1] included."""
        return self.k if self.product is Product.WGRAD else self.m

    @property
    def mean_group(self) -> float:
        """Mean number of rows of an expert."""
        return self.rows / self.groups if self.groups else 0.0

    @property
    def intermediate(self) -> int:
        """I, the columns of act (GATED, BACKWARD)."""
        return self.n // 2 if self.product is Product.GATED else self.n

    @property
    def dtype_key(self) -> str:
        """The key of the matrix unit in `Device.peak_flops`."""
        return dtype_key(self.dtype, self.allow_tf32)

    @property
    def out_shapes(self) -> tuple[tuple[int, ...] | None, ...]:
        """Shapes of the outputs in the order of the table; None for a pre-activation that isn't kept."""
        inner = self.intermediate
        if self.product is Product.MM:
            return ((self.m, self.n),)
        if self.product is Product.GATED:
            return ((self.m, inner), (self.m, self.n) if self.save_pre else None)
        if self.product is Product.BACKWARD:
            return ((self.m, 2 * inner), (self.m, inner), self.weights_shape)
        return ((self.groups, self.m, self.n),)

    def grouped(self) -> Problem:
        """The same product of rows that have been gathered into a contiguous tensor (if any are gathered)."""
        a_strides, b_strides, a_aligned, b_aligned = self.a_strides, self.b_strides, self.a_aligned, self.b_aligned
        if self.gathered == "a":
            a_strides, a_aligned = (self.m if self.product is Product.WGRAD else self.k, 1), True
        if self.gathered == "b":
            b_strides, b_aligned = (self.n, 1), True
        layout = Layout.RAGGED_M
        if self.product is Product.WGRAD:
            layout, a_strides = Layout.RAGGED_K, (a_strides[1], a_strides[0])
        memory = (a_strides, b_strides, a_aligned, b_aligned, self.has_bias, self.device_type)
        return Problem(
            layout, self.groups, self.m, self.n, self.k, self.dtype, self.dtype, *memory, None, self.allow_tf32
        )

    def work(self, group_sizes: Sequence[int] | None = None) -> Work:
        """Useful FLOPs (2 per multiply-add of the product) and bytes: the gathered tensor, the weights of experts that
        have rows, indices, and every other input and output once. Without sizes every row and expert counts."""
        used = self.rows if group_sizes is None else sum(group_sizes)
        experts = self.groups if group_sizes is None else sum(s > 0 for s in group_sizes)
        size = self.dtype.itemsize
        tokens = self.tokens if self.gathered else used
        index = 4.0 * used if self.gathered else 0.0
        if self.product is Product.WGRAD:
            other = self.n if self.gathered == "a" else self.m
            read = tokens * (self.m + self.n - other) + used * other
            return Work(2.0 * used * self.m * self.n, size * (read + self.groups * self.m * self.n) + index)
        read = tokens * self.k + experts * self.k * self.n + (experts * self.n if self.has_bias else 0)
        if self.product is Product.MM:
            moved = float(used * self.n)
        elif self.product is Product.GATED:
            moved = used * self.intermediate * (3.0 if self.save_pre else 1.0)
        else:
            moved = used * self.n * 5.0  # pre read; dpre and act_w written
            index += 4.0 * used + 2 * 4.0 * math.prod(self.weights_shape)
        return Work(2.0 * used * self.k * self.n, size * (read + moved) + index)


def describe(
    product: Product,
    *fields: tuple[Any, ...] | None,
    activation: str = "",
    interleaved: bool = False,
    save_pre: bool = True,
    gather_b: bool = False,
    allow_tf32: bool = False,
    names: tuple[str, str] = ("x", "b"),
) -> GatherProblem:
    """Validate operands that are `described` (as in `grouped_mm.problem`), without looking at values. `fields`: of
    those of `backend.Operands`, in their order.

    `names`: what the caller calls a and b. For BACKWARD b is the down-projection transposed to [E, H, I].
    Raises ValueError naming the argument, what was expected and what came.
    """
    a, b, offs, rows, bias, slots, weights, pre = descriptions(*fields)
    assert a is not None and b is not None and offs is not None
    name_a, name_b = names
    wgrad = product is Product.WGRAD
    check_dims(name_a, a, 2)
    check_dims(name_b, b, 2 if wgrad else 3)
    if a.dtype not in DTYPES:
        raise ValueError(f"{name_a}: expected dtype {' or '.join(map(str, DTYPES))}, got {a.dtype}")
    check_like(name_b, b, a, name_a, "dtype")
    check_index("offs", offs, a, name_a)
    check_like(name_b, b, a, name_a, "device")
    if rows is not None:
        check_index("rows", rows, a, name_a)
    groups = offs.shape[0]
    if not wgrad and b.shape[0] != groups:
        raise ValueError(f"offs: expected length {b.shape[0]} (the experts of {name_b}), got {groups}")
    if wgrad and groups == 0:
        raise ValueError("offs: expected at least one expert, got length 0")
    gathered = "" if rows is None else "b" if gather_b else "a"
    if gather_b and not wgrad:
        raise ValueError("gather_b: only a weight gradient can gather its second operand")
    ordered, tokens_of = (a, b) if gathered == "b" else (b, a)
    if wgrad:
        total = ordered.shape[0] if rows is None else rows.shape[0]
        for name, x in ((name_a, a), (name_b, b)):
            if x is not tokens_of or rows is None:
                _check_rows(name, x, total, "rows" if rows is not None else name_b)
        m, n, k = a.shape[1], b.shape[1], total
    else:
        total = a.shape[0] if rows is None else rows.shape[0]
        if b.shape[1] != a.shape[1]:
            axis = "last" if product is Product.BACKWARD else "second"
            raise ValueError(
                f"{name_b}: expected {a.shape[1]} as its {axis} dimension (columns of {name_a}), got {b.shape[1]}"
            )
        m, n, k = total, b.shape[2], a.shape[1]
    if product in (Product.GATED, Product.BACKWARD) and activation not in ACTIVATIONS:
        raise ValueError(f"activation: expected one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    if product is Product.GATED and n % 2:
        raise ValueError(f"{name_b}: expected an even last dimension (gate and up columns), got {n}")
    if bias is not None:
        check_bias(Layout.RAGGED_M, bias, groups, n, a, name_a)
    weights_shape: tuple[int, ...] = ()
    if product is Product.BACKWARD:
        assert slots and weights and pre
        _check_backward(slots, weights, pre, rows, a, total, n)
        weights_shape = tuple(weights.shape)
    tokens = tokens_of.shape[0] if rows is not None else total
    memory = (tuple(a.strides), tuple(b.strides), gathered, a.aligned, b.aligned, bias is not None)
    epilogue = (activation, interleaved, save_pre, weights_shape)
    return GatherProblem(product, groups, m, n, k, tokens, a.dtype, *memory, *epilogue, a.device.type, allow_tf32)


def _check_rows(name: str, x: Description, rows: int, of: str) -> None:
    if x.shape[0] != rows:
        raise ValueError(f"{name}: expected {rows} rows (as {of} has), got {x.shape[0]} in shape {list(x.shape)}")


def _check_backward(
    slots: Description,
    weights: Description,
    pre: Description,
    rows: Description | None,
    a: Description,
    total: int,
    inner: int,
) -> None:
    check_index("slots", slots, a, "dy")
    _check_rows("slots", slots, total, "rows" if rows is not None else "dy")
    check_dims("weights", weights, 2)
    if weights.dtype is not torch.float32:
        raise ValueError(f"weights: expected dtype torch.float32, got {weights.dtype}")
    if rows is not None:
        _check_rows("weights", weights, a.shape[0], "dy")
    if tuple(pre.shape) != (total, 2 * inner):
        raise ValueError(f"pre: expected shape [{total}, {2 * inner}] (rows, gate and up), got {list(pre.shape)}")
    check_like("pre", pre, a, "dy", "dtype", "device")
    check_like("weights", weights, a, "dy", "device")

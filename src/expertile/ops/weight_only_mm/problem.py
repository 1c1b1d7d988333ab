"""WeightOnlyProblem: one grouped product with weights in few bits, validated once, with no tensor inside;
and what a backend of the operator is given.

    out[rows of g] = a[rows of g] @ ŵ[g]ᵀ (+ bias[g]),   ŵ = `w.dequantize()`

a [M_tot, K] bfloat16 or float16, any strides; w a `QuantizedWeight` [G, N, K], an Int4Weight with scales of a's dtype;
offs [G] int32 END rows on the device; bias [G, N]; out [M_tot, N] in a's dtype, or the other one, or float32.

Or a [M_tot, K] float8_e4m3fn with float32 scale_a, one for each 1×128 [M_tot, K/128] (rounded up) or for each row
[M_tot]; w then is an Mxfp4Fp8Weight, or an Int4Weight in groups of 128 without zero points; out is bfloat16 if nothing
else is asked for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from expertile.formats.quantized import KernelLayout, QuantizedWeight
from expertile.formats.weight_only import WITH_16_BITS, WITH_FP8, kernel_layout
from expertile.ops import backend
from expertile.ops.checks import check_like
from expertile.ops.grouped_mm.problem import (
    Description,
    Layout,
    Problem,
    check_bias,
    check_offs_values,
    described,
    descriptions,
    groups_of,
)
from expertile.ragged import sizes_from_offs
from expertile.roofline import Work

DTYPES = (torch.bfloat16, torch.float16)
FP8 = torch.float8_e4m3fn
OUT_DTYPES = (*DTYPES, torch.float32)
BLOCK = 128  # values of K that share a scale of FP8 activations
WEIGHT = "b (w of weight_only_mm)"  # for errors: grouped_mm ends here too


class DescribedWeight(NamedTuple):
    """The `parts` of a `QuantizedWeight` without values: its tensors as `described` has them."""

    packed: tuple[Any, ...] | None
    scales: tuple[Any, ...] | None
    zeros: tuple[Any, ...] | None
    format: str
    group_size: int
    k: int

    @staticmethod
    def of(w: QuantizedWeight) -> "DescribedWeight":
        packed, scales, zeros, *_ = w.parts
        return DescribedWeight(described(packed), described(scales), described(zeros), *w.parts[3:])


@dataclass(frozen=True)
class WeightOnlyProblem(Problem):
    """A RAGGED_M `Problem` whose b is a `QuantizedWeight` of that `format`. `dtype` is that of a; `b_strides` are those
    of the packed bytes over (groups, columns of out, bytes); `b_aligned` says that packed, scales and zeros all start
    on multiples of 16 bytes. All three are contiguous."""

    group_size: int = 128
    has_zeros: bool = False
    format: str = "int4"
    scale_a_strides: tuple[int, ...] = ()  # none: activations of 16 bits

    @property
    def layout_of_weight(self) -> KernelLayout:
        """How its rows lie in memory."""
        return kernel_layout(self.format, self.k, self.group_size)

    @property
    def operands(self) -> str:
        return f"{self.dtype_key} x {self.format}"

    @property
    def half(self) -> int:
        """Bytes of a packed block (64 or 32), which holds 2 · half values of K."""
        return self.layout_of_weight.half

    @property
    def scales_are_codes(self) -> bool:
        """Whether scales are bytes of the format's own, not numbers of a's dtype."""
        return self.layout_of_weight.scale_dtype is not None

    @property
    def fp8(self) -> bool:
        """Whether activations are FP8 with scales."""
        return self.dtype is FP8

    @property
    def scale_groups(self) -> int:
        """Elements of the scales of a row."""
        return -(-self.k // self.layout_of_weight.span) + self.layout_of_weight.scales_of_row

    @property
    def scale_bytes(self) -> int:
        """Bytes of a group's scales."""
        return self.n * self.scale_groups * self.layout_of_weight.scale_itemsize

    def weight_bytes(self) -> int:
        """Bytes of one group's values, scales and zero points."""
        return self.n * self.b_strides[1] + (2 if self.has_zeros else 1) * self.scale_bytes

    def work(self, group_sizes: Sequence[int] | None = None) -> Work:
        """2 FLOPs per multiply-add of rows in groups; a and out once, the packed weights of every group in use once."""
        sizes = group_sizes if group_sizes is not None else self.group_sizes
        total = self.m if sizes is None else sum(sizes)
        used = self.groups if sizes is None else sum(s > 0 for s in sizes)
        scales_a = {0: 0, 1: 1, 2: -(-self.k // BLOCK)}[len(self.scale_a_strides)]
        activations = total * (self.k * self.dtype.itemsize + 4 * scales_a + self.n * self.out_dtype.itemsize)
        return Work(2.0 * total * self.n * self.k, float(activations + used * self.weight_bytes()))

    @staticmethod
    def of(
        a: torch.Tensor,
        w: QuantizedWeight,
        offs: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        check: bool = False,
        scale_a: torch.Tensor | None = None,
    ) -> "WeightOnlyProblem":
        """Validate the operands of `weight_only_mm` and describe them.

        Raises ValueError naming the argument, what was expected and what came. Values of `offs`, scales and zeros are
        read (which synchronises with a GPU) only with `check=True`, by `w.check_numbers`; those of `offs` also when it
        is on the CPU anyway.
        """
        fields = described(a), DescribedWeight.of(w), described(offs), described(bias)
        problem = WeightOnlyProblem.of_descriptions(*fields, out_dtype, described(scale_a))
        assert offs is not None
        if check:
            w.check_numbers(a.dtype)
        elif offs.device.type != "cpu":
            return problem
        sizes = sizes_from_offs(offs)
        check_offs_values(sizes, problem.m)
        return replace(problem, group_sizes=sizes)

    @staticmethod
    def of_descriptions(
        a_fields: tuple[Any, ...] | None,
        w: DescribedWeight,
        offs_fields: tuple[Any, ...] | None,
        bias_fields: tuple[Any, ...] | None,
        out_dtype: torch.dtype | None,
        scale_a_fields: tuple[Any, ...] | None = None,
    ) -> "WeightOnlyProblem":
        """`of` what is `described`, and so without values. The weight's own fields fit together (its class)."""
        a, packed, scales, zeros = descriptions(a_fields, w.packed, w.scales, w.zeros)
        offs, bias, scale_a = descriptions(offs_fields, bias_fields, scale_a_fields)
        assert a is not None and packed is not None and scales is not None
        if len(a.shape) != 2:
            raise ValueError(f"a: expected [M, K], the rows of each group together, got {list(a.shape)}")
        if scale_a is not None:
            _check_fp8(a, w, scale_a)
        else:
            _check_16_bits(a, w, scales)
        name = WEIGHT if scale_a is None else "b"
        for argument, x in ((name, packed), ("scale_a", scale_a)):
            if x is not None:
                check_like(argument, x, a, "a", "device")
        if out_dtype is None:
            out_dtype = torch.bfloat16 if a.dtype is FP8 else a.dtype
        if out_dtype not in OUT_DTYPES:
            raise ValueError(f"out_dtype: expected {' or '.join(map(str, OUT_DTYPES))}, got {out_dtype}")
        (groups, n, row_bytes), (m, k) = packed.shape, a.shape
        if k != w.k:
            raise ValueError(f"{name}: expected K = {k} (a's last dimension), got {w.k} in shape {[groups, n, w.k]}")
        groups_of(Layout.RAGGED_M, a, packed._replace(shape=(groups, n, k)), offs)
        if bias is not None:
            check_bias(Layout.RAGGED_M, bias, groups, n, a)
        aligned = packed.aligned and scales.aligned and (zeros is None or zeros.aligned)
        memory = (a.strides, (n * row_bytes, row_bytes, 1), a.aligned, aligned, bias is not None, a.device.type)
        weight = (w.group_size, zeros is not None, w.format, () if scale_a is None else scale_a.strides)
        return WeightOnlyProblem(Layout.RAGGED_M, groups, m, n, k, a.dtype, out_dtype, *memory, None, False, *weight)


def _check_16_bits(a: Description, w: DescribedWeight, scales: Description) -> None:
    if a.dtype not in DTYPES:
        further = "; FP8 activations go to scaled_grouped_mm, with their scales" if a.dtype is FP8 else ""
        raise ValueError(f"a: expected dtype torch.bfloat16 or torch.float16, got {a.dtype}{further}")
    if w.format not in WITH_16_BITS:
        raise ValueError(
            f"{WEIGHT}: expected one of {', '.join(WITH_16_BITS)} with 16-bit activations, got {w.format}, whose "
            "layout is that of FP8 activations"
        )
    if scales.dtype.is_floating_point and scales.dtype is not a.dtype:
        raise ValueError(
            f"{WEIGHT}: expected scales of dtype {a.dtype} as a has (`to(dtype=…)` changes them), got {scales.dtype}"
        )


def _check_fp8(a: Description, w: DescribedWeight, scale_a: Description) -> None:
    if a.dtype is not FP8:
        raise ValueError(f"a: expected dtype {FP8} with scale_a, got {a.dtype}")
    if w.format not in WITH_FP8:
        raise ValueError(
            f"b: expected one of {', '.join(WITH_FP8)} with FP8 activations, got {w.format}; "
            "Mxfp4Fp8Weight.of(w) is made once of an Mxfp4Weight"
        )
    if w.format == "int4" and (w.group_size != BLOCK or w.zeros is not None):
        raise ValueError(
            f"b: expected INT4 in groups of {BLOCK} without zero points with FP8 activations, got groups of "
            f"{w.group_size}{'' if w.zeros is None else ' with zero points'}"
        )
    if scale_a.dtype is not torch.float32:
        raise ValueError(f"scale_a: expected dtype torch.float32, got {scale_a.dtype}")
    m, k = a.shape
    if tuple(scale_a.shape) not in ((m,), (m, -(-k // BLOCK))):
        raise ValueError(
            f"scale_a: expected [{m}, {-(-k // BLOCK)}] (one for each 1×{BLOCK}) or [{m}], got {list(scale_a.shape)}"
        )


@dataclass(frozen=True)
class Operands:
    """The tensors of one call, as validated by `WeightOnlyProblem.of`."""

    a: torch.Tensor
    w: QuantizedWeight
    offs: torch.Tensor
    bias: torch.Tensor | None = None
    scale_a: torch.Tensor | None = None


Run = Callable[[WeightOnlyProblem, Operands, Any, torch.Tensor | None], torch.Tensor]  # as of a backend of `grouped_mm`
Backend = backend.Backend[WeightOnlyProblem, Run]

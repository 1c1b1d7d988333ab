"""The shared case table: what every int4_grouped_mm backend must get right.

`CASES` are small enough for the Triton interpreter; `LARGE` need a GPU:

    operands = make(case, device)
    out = poisoned_out(case, device)
    backend.run(problem_of(case, operands), operands, config, out)
    check(case, out, operands)
"""

from dataclasses import dataclass
from typing import Any

import torch

from expertile.formats.int4 import Int4Weight
from expertile.formats.mxfp4 import Mxfp4Weight
from expertile.ops.grouped_mm.problem import described
from expertile.ops.weight_only_mm.problem import DescribedWeight, Operands, WeightOnlyProblem

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PROMISED = 2.0**-7  # of the largest entry of the reference


@dataclass(frozen=True)
class Case:
    """One call. `group` None: one scale for a row; "mxfp4": that format. `past` rows behind the last group, NaN in a,
    which must not take part. `storage` of a: "rows", K contiguous; "columns", rows contiguous; "part", rows of a wider
    tensor, 2 bytes off."""

    name: str
    sizes: tuple[int, ...]
    n: int
    k: int
    group: int | str | None = 128
    zeros: bool = False
    past: int = 0
    bias: bool = False
    storage: str = "rows"
    dtype: torch.dtype = BF16
    out_dtype: torch.dtype | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def total(self) -> int:
        return sum(self.sizes) + self.past


def make(case: Case, device: str | torch.device = "cpu", seed: int = 0) -> Operands:
    """Operands as int4_grouped_mm takes them; scales differ by up to 16 times, zero points are 0 … 16."""
    gen = torch.Generator(device=device).manual_seed(seed)
    g, n, k = len(case.sizes), case.n, case.k
    values = torch.randint(0, 16, (g, n, k), generator=gen, device=device, dtype=torch.uint8)
    size = case.group or k
    if size == "mxfp4":
        scales = torch.randint(115, 121, (g, n, k // 32), generator=gen, device=device, dtype=torch.uint8)
        return _with(case, Mxfp4Weight.of_codes(values, scales), gen, device)
    assert isinstance(size, int)
    scales = torch.exp2(torch.rand(g, k // size, n, generator=gen, device=device) * 4 - 4).to(case.dtype)
    zeros = None
    if case.zeros:
        zeros = torch.randint(0, 17, scales.shape, generator=gen, device=device).to(case.dtype)
    return _with(case, Int4Weight.of_values(values, scales, zeros, size), gen, device)


def _with(case: Case, w: Any, gen: torch.Generator, device: str | torch.device) -> Operands:
    g, n, k = len(case.sizes), case.n, case.k
    wide = {"part": (case.total, k + 1), "columns": (k, case.total)}.get(case.storage, (case.total, k))
    a = torch.randn(wide, generator=gen, device=device).to(case.dtype)
    a = {"part": a[:, 1:], "columns": a.t()}.get(case.storage, a)
    a[sum(case.sizes) :] = float("nan")
    offs = torch.tensor(case.sizes, dtype=torch.int64).cumsum(0).to(torch.int32).to(device)
    bias = torch.randn(g, n, generator=gen, device=device).to(case.dtype) * 8 if case.bias else None
    return Operands(a, w, offs, bias)


def problem_of(case: Case, o: Operands) -> WeightOnlyProblem:
    return WeightOnlyProblem.of(o.a, o.w, o.offs, o.bias, case.out_dtype)


def poisoned_out(case: Case, device: str | torch.device = "cpu") -> torch.Tensor:
    return torch.full((case.total, case.n), float("nan"), dtype=case.out_dtype or case.dtype, device=device)


def expected(case: Case, o: Operands) -> torch.Tensor:
    """The result in float64, NaN where the output must be left alone. Every weight is taken from its byte by the layout
    in the documentation, and gets its scale by its index; no code of the package."""
    dense = _mxfp4(o.w, case.k) if case.group == "mxfp4" else _int4(o.w, case.k)
    out = torch.full((case.total, case.n), float("nan"), dtype=torch.float64, device=o.a.device)
    end = 0
    for g, size in enumerate(case.sizes):
        start, end = end, end + size
        out[start:end] = o.a[start:end].double() @ dense[g].T + (0.0 if o.bias is None else o.bias[g].double())
    return out


def _mxfp4(w: Any, k_of_w: int) -> torch.Tensor:
    k = torch.arange(k_of_w, device=w.packed.device)
    word = k // 64 * 8 + k % 32 // 16 * 4 + k % 8 // 2
    register, second = k % 64 // 32 * 2 + k % 16 // 8, k % 2
    places = torch.tensor([[15, 8, 7, 6], [21, 14, 13, 12], [11, 4, 3, 2], [9, 10, 1, 0]], device=k.device)
    places = (places[register] + 16 * second[:, None]) % 32
    at = 4 * word[:, None] + places // 8
    bits = w.packed[..., at].long() >> places % 8 & 1  # [G, N, K, (s, e1, e0, m)]
    s, e1, e0, m = (x.double() for x in bits.unbind(-1))
    exponent = 2 * e1 + e0
    value = torch.where(exponent == 0, m / 2, torch.exp2(exponent - 1) * (1 + m / 2)) * (1 - 2 * s)
    scale = w.scales[:, k // 128, :, k // 32 % 4].permute(1, 2, 0).double()
    return value * torch.exp2(scale - 127)


def _int4(w: Any, k_of_w: int) -> torch.Tensor:
    k = torch.arange(k_of_w, device=w.packed.device)
    half = 64 if k_of_w % 128 == 0 and w.group_size % 64 == 0 else 32
    of_16 = k % 16
    at = k // (2 * half) * half + k % half // 16 * 16 + 4 * (of_16 % 8 // 2) + 2 * (of_16 % 2) + of_16 // 8
    byte = w.packed[..., at].int()
    q = torch.where(k % (2 * half) < half, byte & 15, byte >> 4).double()
    which = k // w.group_size
    zero = 8.0 if w.zeros is None else w.zeros.double()[:, which].transpose(1, 2)
    return (q - zero) * w.scales.double()[:, which].transpose(1, 2)


def check(case: Case, out: torch.Tensor, o: Operands, limit: float = PROMISED) -> None:
    check_against(str(case), out, expected(case, o), limit)


def check_against(case: str, out: torch.Tensor, want: torch.Tensor, limit: float) -> None:
    """Fail unless `out` is NaN exactly where it must be left alone, and elsewhere off by at most `limit` of the largest
    reference entry, and by half of that in relative Frobenius norm."""
    live, written = ~want.isnan(), ~out.isnan()
    assert int((written & ~live).sum()) == 0, f"{case}: rows past the end were written"
    assert int((~written & live).sum()) == 0, f"{case}: elements are NaN or were not written"
    got, ref = out[live].double(), want[live]
    if not got.numel():
        return
    largest = float((got - ref).abs().max() / ref.abs().max())
    assert largest <= limit, f"{case}: off by {largest:.3g} of the largest entry, allowed {limit:.3g}"
    error = float((got - ref).norm() / ref.norm())
    assert error <= limit / 2, f"{case}: relative Frobenius error {error:.3g}"


CASES: tuple[Case, ...] = (
    Case("plain", (20, 13), n=64, k=256),
    Case("empty-groups", (0, 5, 0, 0, 33, 0), n=72, k=128),
    Case("all-empty", (0, 0), n=64, k=128, past=3),
    Case("past-the-end", (7, 1, 18), n=64, k=256, past=5),
    Case("one-row-each", (1,) * 9, n=64, k=128),
    Case("n-odd", (5, 17), n=37, k=256),
    Case("zeros", (5, 17), n=80, k=384, zeros=True),
    Case("group-64-zeros-bias", (5, 17), n=64, k=256, group=64, zeros=True, bias=True),
    Case("group-32", (5, 17), n=64, k=256, group=32),
    Case("group-32-zeros-odd-blocks", (5, 17), n=64, k=192, group=32, zeros=True),
    Case("group-64-odd-blocks", (5, 17), n=64, k=192, group=64, zeros=True),
    Case("per-channel", (5, 17), n=64, k=256, group=None),
    Case("per-channel-zeros-odd-blocks", (5, 17), n=40, k=192, group=None, zeros=True, bias=True),
    Case("fp16", (5, 17), n=64, k=256, dtype=FP16, zeros=True),
    Case("fp16-fp32-out", (5, 17), n=64, k=256, group=64, dtype=FP16, out_dtype=FP32),
    Case("fp32-out-bias", (5, 17), n=64, k=256, bias=True, out_dtype=FP32),
    Case("mxfp4", (20, 13), n=64, k=256, group="mxfp4"),
    Case("mxfp4-empty-bias", (0, 5, 0, 0, 33, 0), n=72, k=160, group="mxfp4", past=2, bias=True),
    Case("mxfp4-n-odd", (5, 17), n=37, k=96, group="mxfp4"),
    Case("mxfp4-one-block", (5, 17), n=40, k=32, group="mxfp4"),
    Case("mxfp4-fp16", (5, 17), n=64, k=192, group="mxfp4", dtype=FP16),
    Case("mxfp4-fp32-out", (5, 17), n=64, k=256, group="mxfp4", out_dtype=FP32),
    Case("mxfp4-a-columns", (5, 17), n=64, k=96, group="mxfp4", storage="columns"),
    Case("a-columns", (5, 17), n=64, k=128, storage="columns"),
    Case("a-part", (5, 17), n=64, k=128, storage="part", past=2),
)

LARGE: tuple[Case, ...] = (
    Case("large-uneven", (700, 0, 130, 64, 1, 203), n=1536, k=2048, past=100),
    Case("large-zeros", (16, 0, 3, 200), n=4096, k=7168, zeros=True),
    Case("large-group-32", (33, 129, 5), n=1000, k=2880 // 64 * 64, group=32, zeros=True),
    Case("large-many-groups", tuple(g % 5 for g in range(256)), n=512, k=1024),
    Case("large-per-channel", (513, 255), n=1032, k=1024, group=None, bias=True),
    Case("large-mxfp4", (700, 0, 130, 64, 1, 203), n=1536, k=2048, group="mxfp4", past=100),
    Case("large-mxfp4-2880", (33, 129, 5), n=2880, k=2880, group="mxfp4", bias=True),
    Case("large-mxfp4-fp16", (33, 129, 5), n=1000, k=1056, group="mxfp4", dtype=FP16),
    Case("large-fp16-group-64", (300, 77), n=1152, k=4096, group=64, dtype=FP16),
)


def of_shape(groups: int, rows: int, n: int, k: int, group: int = 128, zeros: bool = False) -> WeightOnlyProblem:
    """The problem of groups with `rows` rows each, of unknown sizes, in bfloat16."""

    def empty(*shape: int, dtype: torch.dtype = BF16) -> tuple[Any, ...] | None:
        return described(torch.empty(shape, dtype=dtype, device="meta"))

    scales = empty(groups, k // group, n)
    packed = empty(groups, n, k // 2, dtype=torch.uint8)
    w = DescribedWeight(packed, scales, scales if zeros else None, "int4", group, k)
    return WeightOnlyProblem.of_descriptions(empty(groups * rows, k), w, empty(groups, dtype=torch.int32), None, None)

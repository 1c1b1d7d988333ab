"""The case table of FP8 activations times 4-bit weights; `CASES` are small, `LARGE` need a GPU. Used as `cases`."""

from dataclasses import dataclass
from typing import Any

import torch

from expertile.formats.int4 import Int4Weight
from expertile.formats.mxfp4 import Mxfp4Weight
from expertile.formats.mxfp4_fp8 import Mxfp4Fp8Weight
from expertile.ops.weight_only_mm.problem import Operands, WeightOnlyProblem
from tests.ops.weight_only_mm import cases

FP32, FP16, FP8 = torch.float32, torch.float16, torch.float8_e4m3fn


@dataclass(frozen=True)
class Fp8Case:
    """One call. `recipe`: scales of a, one for each 1×128 ("vector"), with strides (1, …) as `quantize_activations`
    leaves them, or for each row ("row"). `past` rows behind the last group are NaN in a and must not take part."""

    name: str
    sizes: tuple[int, ...]
    n: int
    k: int
    format: str = "mxfp4"
    recipe: str = "vector"
    past: int = 0
    bias: bool = False
    out_dtype: torch.dtype | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def total(self) -> int:
        return sum(self.sizes) + self.past


def make(case: Fp8Case, device: str | torch.device = "cpu", seed: int = 0) -> Operands:
    """Operands; scales of MXFP4 differ by up to 2^11 in a row, others by up to 16 times."""
    gen = torch.Generator(device=device).manual_seed(seed)
    g, n, k, m = len(case.sizes), case.n, case.k, case.total

    def ints(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=gen, device=device, dtype=torch.uint8)

    values = ints(0, 16, g, n, k)
    w: Any
    if case.format == "mxfp4":
        w = Mxfp4Fp8Weight.of(Mxfp4Weight.of_codes(values, ints(115, 127, g, n, k // 32)))
    else:
        scales = torch.exp2(torch.rand(g, k // 128, n, generator=gen, device=device) * 4 - 4).bfloat16()
        w = Int4Weight.of_values(values, scales, None, 128)
    a = torch.randn(m, k, generator=gen, device=device)
    a[sum(case.sizes) :] = float("nan")
    scale_a = torch.exp2(torch.rand(-(-k // 128), m, generator=gen, device=device) * 4 - 2).t()
    scale_a = scale_a if case.recipe == "vector" else scale_a[:, 0].contiguous()
    offs = torch.tensor(case.sizes, dtype=torch.int64).cumsum(0).to(torch.int32).to(device)
    bias = torch.randn(g, n, generator=gen, device=device).bfloat16() * 8 if case.bias else None
    return Operands(a.to(FP8), w, offs, bias, scale_a)


def problem_of(case: Fp8Case, o: Operands) -> WeightOnlyProblem:
    return WeightOnlyProblem.of(o.a, o.w, o.offs, o.bias, case.out_dtype, scale_a=o.scale_a)


def poisoned_out(case: Fp8Case, device: str | torch.device = "cpu") -> torch.Tensor:
    dtype = case.out_dtype or torch.bfloat16
    return torch.full((case.total, case.n), float("nan"), dtype=dtype, device=device)


def expected(case: Fp8Case, o: Operands) -> torch.Tensor:
    """The result in float64, NaN where the output must be left alone, from the weights' own dequantised values (whose
    bits the formats' tests look at)."""
    assert o.scale_a is not None
    blocks = torch.arange(case.k, device=o.a.device) // 128
    scale = o.scale_a.double()[:, blocks] if case.recipe == "vector" else o.scale_a.double()[:, None]
    a, dense = o.a.double() * scale, o.w.dequantize(FP32).double()
    out = torch.full((case.total, case.n), float("nan"), dtype=torch.float64, device=o.a.device)
    end = 0
    for g, size in enumerate(case.sizes):
        start, end = end, end + size
        out[start:end] = a[start:end] @ dense[g].T + (0.0 if o.bias is None else o.bias[g].double())
    return out


def check(case: Fp8Case, out: torch.Tensor, o: Operands, limit: float = cases.PROMISED) -> None:
    cases.check_against(str(case), out, expected(case, o), limit)


CASES: tuple[Fp8Case, ...] = (
    Fp8Case("plain", (20, 13), n=64, k=256),
    Fp8Case("empty-bias", (0, 5, 0, 0, 33, 0), n=72, k=160, past=2, bias=True),
    Fp8Case("all-empty", (0, 0), n=64, k=128, past=3),
    Fp8Case("n-odd", (5, 17), n=37, k=96),
    Fp8Case("one-block", (5, 17), n=40, k=32, recipe="row"),
    Fp8Case("row-fp32", (5, 17), n=64, k=608, recipe="row", out_dtype=FP32, past=1),
    Fp8Case("fp32-bias", (5, 17), n=64, k=256, out_dtype=FP32, bias=True),
    Fp8Case("one-row-each", (1,) * 9, n=64, k=128, out_dtype=FP16),
    Fp8Case("int4", (20, 0, 13), n=72, k=384, format="int4", past=4),
    Fp8Case("int4-row-bias", (5, 17), n=64, k=256, format="int4", recipe="row", bias=True),
    Fp8Case("int4-fp32", (5, 17), n=40, k=128, format="int4", out_dtype=FP32),
)

LARGE: tuple[Fp8Case, ...] = (
    Fp8Case("large-uneven", (700, 0, 130, 64, 1, 203), n=1536, k=2048, past=100),
    Fp8Case("large-2880", (333, 129, 5), n=2880, k=2880, bias=True),
    Fp8Case("large-many-groups", tuple(g % 5 * 60 for g in range(256)), n=512, k=1024, recipe="row"),
    Fp8Case("large-int4", (700, 0, 130, 64, 1, 203), n=1536, k=2048, format="int4", past=100),
    Fp8Case("large-int4-row", (16, 0, 3, 200), n=4096, k=7168, format="int4", recipe="row"),
)

"""The shared case table: what every scaled_grouped_mm backend must get right.

`CASES` are small enough for the Triton interpreter and the Gluon emulator; `LARGE` need a GPU. A backend is tested on
every case its `supports` accepts:

    operands = make(case, device)
    out = poisoned_out(case, device)
    backend.run(problem, operands, config, out)
    check(case, out, operands)
"""

from dataclasses import dataclass
from functools import partial

import torch

from expertile.ops.grouped_mm.problem import Layout, described
from expertile.ops.scaled_grouped_mm.problem import Operands, Recipe, ScaledProblem

M, K = Layout.RAGGED_M, Layout.RAGGED_K
BLOCK, VECTOR, ROW = Recipe.BLOCK, Recipe.VECTOR, Recipe.ROW
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# Tensor cores add up FP8 products with about 14 bits (DeepSeek-V3, arXiv:2412.19437, section 3.3.2); 1e-3 is what is
# promised for a whole result in float32, half an ulp and a bit more what its rounding to 16 bits may add.
PROMISED = 1e-3
ROUNDING = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-24}


@dataclass(frozen=True)
class Case:
    """One call of scaled_grouped_mm. `sizes`: lengths of the groups along the ragged dimension; `past` rows (RAGGED_M)
    or summands (RAGGED_K) behind the last group, NaN in values and scales, which must not take part. `std` of
    the values. `span`: scales are of magnitude 2^e with e drawn from -span … span. `scales`: "rows", blocks of k
    contiguous; "columns", rows contiguous; "spread", no dimension contiguous. `storage`: of b, "nk" (k contiguous) or
    "kn"."""

    name: str
    layout: Layout
    recipe: Recipe
    sizes: tuple[int, ...]
    n: int
    k: int = 0
    m: int = 0
    past: int = 0
    std: float = 60.0
    span: int = 10
    scales: str = "rows"
    storage: str = "nk"
    bias: bool = False
    out_dtype: torch.dtype = BF16

    def __str__(self) -> str:
        return self.name

    @property
    def total(self) -> int:
        return sum(self.sizes) + self.past

    @property
    def spans(self) -> list[slice]:
        """Where each group lies in the ragged dimension."""
        ends = [sum(self.sizes[: g + 1]) for g in range(len(self.sizes))]
        return [slice(e - s, e) for e, s in zip(ends, self.sizes, strict=True)]

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (self.total, self.n) if self.layout is M else (len(self.sizes), self.m, self.n)


def make(case: Case, device: str | torch.device = "cpu", seed: int = 0) -> Operands:
    """Operands as scaled_grouped_mm takes them."""
    gen = torch.Generator(device=device).manual_seed(seed)
    g, n = len(case.sizes), case.n
    rows, k = (case.total, case.k) if case.layout is M else (case.m, case.total)
    kb, nb = -(-k // 128), -(-n // 128)

    def values(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=gen, device=device) * case.std).to(torch.float8_e4m3fn)

    def scales(*shape: int) -> torch.Tensor:
        exponent = torch.randint(-case.span, case.span + 1, shape, generator=gen, device=device)
        sign = torch.randint(0, 2, shape, generator=gen, device=device) * 2 - 1
        mantissa = 1 + torch.rand(shape, generator=gen, device=device)
        return _stored(torch.ldexp(mantissa * sign, exponent), case.scales)

    a = values(rows, k)
    b = values(g, n, k).transpose(1, 2) if case.layout is M else values(n, k).t()
    if case.storage == "kn":
        b = b.contiguous()
    if case.layout is M:
        shapes = {BLOCK: ((rows, kb), (g, nb, kb)), VECTOR: ((rows, kb), (g, n, kb)), ROW: ((rows,), (g, n))}
    else:
        shapes = {VECTOR: ((rows, kb), (n, kb)), ROW: ((g * rows,), (g * n,))}
    scale_a, scale_b = (scales(*s) for s in shapes[case.recipe])
    used = sum(case.sizes)
    nan = float("nan")
    if case.layout is M:
        a[used:], scale_a[used:] = nan, nan
    else:
        a[:, used:], b[used:] = nan, nan
        if case.recipe is VECTOR:
            scale_a[:, used // 128 :], scale_b[:, used // 128 :] = nan, nan
    offs = torch.tensor(case.sizes, dtype=torch.int64).cumsum(0).to(torch.int32).to(device)
    bias = None
    if case.bias:
        bias = torch.randn(g, n, generator=gen, device=device).to(case.out_dtype) * 60.0
    return Operands(a, b, scale_a, scale_b, offs, bias)


def _stored(scale: torch.Tensor, storage: str) -> torch.Tensor:
    if storage == "columns" and scale.dim() > 1:
        return scale.transpose(-1, -2).contiguous().transpose(-1, -2)
    if storage == "spread":
        return torch.stack([scale, torch.full_like(scale, float("nan"))], -1)[..., 0]
    return scale


def problem_of(case: Case, operands: Operands) -> ScaledProblem:
    o = operands
    return ScaledProblem.of(o.a, o.b, o.scale_a, o.scale_b, o.offs, o.bias, case.out_dtype)


def block_problem(groups: int, rows: int, n: int, k: int) -> ScaledProblem:
    """Ragged rows, `rows` in all, and scales of blocks, as `quantize_activations` lays them out; no tensors."""
    e4m3, f32, meta = torch.float8_e4m3fn, torch.float32, partial(torch.empty, device="meta")
    a, b = meta(rows, k, dtype=e4m3), meta(groups, n, k, dtype=e4m3).transpose(1, 2)
    scales = meta(-(-k // 128), rows, dtype=f32).t(), meta(groups, -(-n // 128), -(-k // 128), dtype=f32)
    told = [described(x) for x in (a, b, *scales, meta(groups, dtype=torch.int32))]
    return ScaledProblem.of_descriptions(*told, None, torch.bfloat16)


def poisoned_out(case: Case, device: str | torch.device = "cpu") -> torch.Tensor:
    return torch.full(case.out_shape, float("nan"), dtype=case.out_dtype, device=device)


def expected(case: Case, operands: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    """(the result in float64, Σ |a| |b| behind each of its elements); NaN where the output must be left alone.

    Written apart from the package: every element gets its scale by its index.
    """
    a, b = operands.a.double(), operands.b.double()
    sa, sb = operands.scale_a.double(), operands.scale_b.double()
    out = torch.full(case.out_shape, float("nan"), dtype=torch.float64, device=a.device)
    size = out.clone()
    k = torch.arange(a.shape[1], device=a.device) // 128
    n = torch.arange(case.n, device=a.device)
    for g, span in enumerate(case.spans):
        if case.layout is M:
            left = a[span] * (sa[span][:, None] if case.recipe is ROW else sa[span][:, k])
            if case.recipe is ROW:
                right = b[g] * sb[g][None, :]
            else:
                right = b[g] * sb[g][n // 128 if case.recipe is BLOCK else n][:, k].T
        else:
            left, right = a[:, span], b[span]
            if case.recipe is ROW:
                left = left * sa.view(-1, case.m)[g][:, None]
                right = right * sb.view(-1, case.n)[g][None, :]
            else:
                left, right = left * sa[:, k[span]], right * sb[:, k[span]].T
        bias = 0.0 if operands.bias is None else operands.bias[g].double()
        where = span if case.layout is M else g
        out[where] = left @ right + bias
        size[where] = left.abs() @ right.abs() + abs(bias)
    return out, size


def check(case: Case, out: torch.Tensor, operands: Operands, limit: float = PROMISED) -> None:
    """Fail unless `out` is NaN exactly where it must be left alone and close to the float64 result elsewhere: by
    relative Frobenius error over rows brought to one size, and by every element, against the sum behind it."""
    assert out.dtype == case.out_dtype, f"dtype: expected {case.out_dtype}, got {out.dtype}"
    want, size = expected(case, operands)
    assert out.shape == want.shape, f"shape: expected {tuple(want.shape)}, got {tuple(out.shape)}"
    live, written = ~want.isnan(), ~out.isnan()
    assert int((written & ~live).sum()) == 0, f"{case}: elements past the end were written"
    assert int((~written & live).sum()) == 0, f"{case}: elements are NaN or were not written"
    got, ref, size = out[live].double(), want[live], size[live]
    if not got.numel():
        return
    rounding = ROUNDING[case.out_dtype]
    # Divided by the sum behind each element, so that rows with small scales count as much as those with large ones.
    unit = torch.where(size > 0, size, 1.0)
    error = ((got - ref) / unit).norm() / (ref / unit).norm().clamp(min=1e-30)
    assert error <= limit + rounding, f"{case}: relative Frobenius error {error:.3g} > {limit + rounding:.3g}"
    largest = ((got - ref).abs() / (limit * size + rounding * ref.abs() + 1e-30)).max()
    assert largest <= 1, f"{case}: an element is off by {largest:.3g} times what is allowed"


CASES: tuple[Case, ...] = (
    Case("plain", M, BLOCK, (40, 24), n=128, k=256),
    Case("empty-groups", M, BLOCK, (0, 33, 0, 0, 70, 0), n=256, k=128),
    Case("all-empty", M, BLOCK, (0, 0, 0), n=128, k=128, past=5),
    Case("rows-past-the-end", M, BLOCK, (17, 1, 90), n=136, k=256, past=9),
    Case("one-row-each", M, BLOCK, (1,) * 37, n=64, k=128),
    Case("k-tail", M, BLOCK, (30, 50), n=144, k=304),
    Case("k-tail-odd", M, BLOCK, (30, 50), n=72, k=131),
    Case("n-odd", M, BLOCK, (30, 50), n=37, k=128),
    Case("short-k", M, BLOCK, (30, 50), n=128, k=48),
    Case("bias", M, BLOCK, (70, 3), n=200, k=256, bias=True, span=2),
    Case("fp32-out", M, BLOCK, (70, 3), n=264, k=384, out_dtype=FP32),
    Case("fp16-out", M, BLOCK, (70, 3), n=264, k=384, out_dtype=FP16, span=0, std=2.0),
    Case("scales-columns", M, BLOCK, (70, 3), n=264, k=384, scales="columns"),
    Case("scales-spread", M, BLOCK, (70, 3), n=264, k=384, scales="spread"),
    Case("weights-kn", M, BLOCK, (40, 24), n=128, k=256, storage="kn"),
    Case("vector", M, VECTOR, (100, 0, 29), n=264, k=384, past=3),
    Case("vector-k-tail-columns", M, VECTOR, (70, 3), n=136, k=208, scales="columns"),
    Case("row", M, ROW, (100, 0, 29), n=264, k=384, past=3),
    Case("row-bias-fp32", M, ROW, (70, 3), n=136, k=208, bias=True, span=2, out_dtype=FP32),
    Case("wgrad", K, VECTOR, (128, 0, 384), m=72, n=136),
    Case("wgrad-past-the-end", K, VECTOR, (256, 128), m=130, n=64, past=128, out_dtype=FP32),
    Case("wgrad-columns", K, VECTOR, (0, 256), m=64, n=128, scales="columns"),
    Case("wgrad-all-empty", K, VECTOR, (0, 0), m=64, n=64, past=128),
    Case("wgrad-last-empty", K, VECTOR, (128, 256, 0, 0), m=64, n=64, scales="columns"),
    Case("wgrad-row", K, ROW, (40, 0, 77), m=72, n=64, past=11),
)

LARGE: tuple[Case, ...] = (
    Case("large-plain", M, BLOCK, (700, 0, 1300, 64, 1, 2031), n=1536, k=2048, past=100),
    Case("large-many-groups", M, BLOCK, tuple(g % 5 for g in range(512)), n=512, k=1024),
    Case("large-k-tail", M, BLOCK, (513, 255, 256, 257), n=1032, k=1040, out_dtype=FP32),
    Case("large-k", M, BLOCK, (200, 56), n=512, k=16384, out_dtype=FP32),
    Case("large-vector", M, VECTOR, (700, 0, 1300), n=1160, k=1536, out_dtype=FP32),
    Case("large-row", M, ROW, (700, 0, 1300), n=1160, k=1536),
    Case("large-wgrad", K, VECTOR, (1024, 0, 2048, 128), m=1096, n=1160, past=256, out_dtype=FP32),
)

"""The shared case table: what every grouped_mm backend must get right.

`CASES` are small enough for the Triton interpreter; `LARGE` need a GPU (int64 offsets, many groups, many tiles).
A backend is tested on every case its `supports` accepts:

    operands = make(case, device)
    out = poisoned_out(case, device)
    backend.run(problem, Operands(*operands), config, out)
    check(case, out, expected(case, *operands))
"""

from dataclasses import dataclass

import torch

from expertile.ops.grouped_mm.problem import Layout

# How an operand lies in memory:
#   row        last dimension contiguous, no padding
#   column     the dimension before the last contiguous (weights [G, N, K] passed transposed; x.T)
#   padded     row, leading stride longer than the row by a multiple of 16 bytes
#   odd        row, leading stride that is no multiple of 16 bytes
#   shifted    row, base pointer that is no multiple of 16 bytes
#   step       every other element of a row: no dimension contiguous
#   expanded   one row (or column) seen many times: stride 0 in the dimension before the last
#   scalar     one element seen everywhere: all strides 0 (the gradient of out.sum())
STORAGES = ("row", "column", "padded", "odd", "shifted", "step", "expanded", "scalar")


_PIECE = 2**27  # elements compared at a time


@dataclass(frozen=True)
class Case:
    """One call of grouped_mm. `sizes` are the group sizes along the ragged dimension (BATCHED: one entry per group,
    ignored); `m`, `n`, `k` are the per-group sizes of the other dimensions; `past` counts rows (RAGGED_M), columns
    (RAGGED_N) or summands (RAGGED_K) behind the last group, which must not take part."""

    name: str
    layout: Layout
    sizes: tuple[int, ...]
    m: int = 0
    n: int = 0
    k: int = 0
    past: int = 0
    a_storage: str = "row"
    b_storage: str = "column"
    dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype | None = None
    bias: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def total(self) -> int:
        """Extent of the ragged dimension, the part behind the last group included."""
        return sum(self.sizes) + self.past

    @property
    def out_torch_dtype(self) -> torch.dtype:
        return self.out_dtype or self.dtype

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Shapes of a, b and the result."""
        g, t, m, n, k = len(self.sizes), self.total, self.m, self.n, self.k
        return {
            Layout.RAGGED_M: ((t, k), (g, k, n), (t, n)),
            Layout.RAGGED_K: ((m, t), (t, n), (g, m, n)),
            Layout.RAGGED_N: ((g, m, k), (k, t), (m, t)),
            Layout.BATCHED: ((g, m, k), (g, k, n), (g, m, n)),
        }[self.layout]


def _stored(
    shape: tuple[int, ...], storage: str, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> torch.Tensor:
    """Normal random values of standard deviation 1 laid out as `storage` says."""

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=torch.float32).to(dtype)

    *lead, rows, cols = shape
    per_16_bytes = 16 // dtype.itemsize
    if storage == "row":
        return normal(*shape)
    if storage == "column":
        return normal(*lead, cols, rows).transpose(-1, -2)
    if storage == "padded":
        pitch = -(-(cols + 1) // per_16_bytes) * per_16_bytes
        return normal(*lead, rows, pitch)[..., :cols]
    if storage == "odd":
        pitch = cols + 1 + (cols + 1) % 2 + 1  # odd, so never a multiple of 16 bytes
        return normal(*lead, rows, pitch)[..., :cols]
    if storage == "shifted":
        flat = normal(int(torch.Size(shape).numel()) + 1)
        return flat[1:].view(shape)
    if storage == "step":
        return normal(*lead, rows, 2 * cols)[..., ::2]
    if storage == "expanded":
        return normal(*lead, 1, cols).expand(shape)
    if storage == "scalar":
        return normal(*([1] * len(shape))).expand(shape)
    raise ValueError(f"storage: expected one of {STORAGES}, got {storage!r}")


def make(
    case: Case, device: str | torch.device = "cpu", seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(a, b, offs, bias) of a case on `device`, as grouped_mm takes them. Rows behind the last group are NaN."""
    device = torch.device(device)
    generator = torch.Generator(device=device).manual_seed(seed)
    a_shape, b_shape, _ = case.shapes
    a = _stored(a_shape, case.a_storage, case.dtype, device, generator)
    b = _stored(b_shape, case.b_storage, case.dtype, device, generator)
    if case.past:
        used, nan = sum(case.sizes), float("nan")
        if case.layout is Layout.RAGGED_M and 0 not in a.stride():
            a[used:] = nan
        if case.layout is Layout.RAGGED_N and 0 not in b.stride():
            b[:, used:] = nan
        if case.layout is Layout.RAGGED_K:
            if 0 not in a.stride():
                a[:, used:] = nan
            if 0 not in b.stride():
                b[used:] = nan
    offs = None
    if case.layout is not Layout.BATCHED:
        offs = torch.tensor(case.sizes, dtype=torch.int64).cumsum(0).to(torch.int32).to(device)
    bias = None
    if case.bias:
        bias = torch.randn(len(case.sizes), case.n, generator=generator, device=device).to(case.dtype)
    return a, b, offs, bias


def poisoned_out(case: Case, device: str | torch.device = "cpu") -> torch.Tensor:
    """An output of the right shape and dtype in which every element is NaN."""
    return torch.full(case.shapes[2], float("nan"), dtype=case.out_torch_dtype, device=device)


def expected(
    case: Case, a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """The float64 result; NaN where the output must be left alone. Independent of the package's reference."""
    out = torch.full(case.shapes[2], float("nan"), dtype=torch.float64, device=a.device)
    ends = [sum(case.sizes[: g + 1]) for g in range(len(case.sizes))]
    for g, (size, end) in enumerate(zip(case.sizes, ends, strict=True)):
        rows = slice(end - size, end)
        if case.layout is Layout.RAGGED_M:
            out[rows] = a[rows].double() @ b[g].double() + (bias[g].double() if bias is not None else 0.0)
        elif case.layout is Layout.RAGGED_K:
            out[g] = a[:, rows].double() @ b[rows].double()
        elif case.layout is Layout.RAGGED_N:
            out[:, rows] = a[g].double() @ b[:, rows].double()
        else:
            out[g] = a[g].double() @ b[g].double() + (bias[g].double() if bias is not None else 0.0)
    return out


def tolerance(case: Case, allow_tf32: bool = False) -> float:
    """Largest allowed relative Frobenius error: about 2.5 roundings of the output, or of a tf32 product.

    Tensor cores truncate as they accumulate, so a float32 result of 16-bit operands drifts with K: on an H200
    cuBLAS, quack and our kernels all reach 1.9e-5 at K = 16384.
    """
    out = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 2e-6}[case.out_torch_dtype]
    if case.dtype is not torch.float32:
        return max(out, 2e-9 * max(case.k, case.total if case.layout is Layout.RAGGED_K else 0))
    return max(out, 1e-3) if allow_tf32 else out


def check(case: Case, out: torch.Tensor, want: torch.Tensor, allow_tf32: bool = False) -> None:
    """Fail unless `out` is NaN exactly where `want` is and close to it everywhere else.

    Frobenius error finds a systematic fault, the element-wise bound a single wrong tile or element."""
    assert out.dtype == case.out_torch_dtype, f"dtype: expected {case.out_torch_dtype}, got {out.dtype}"
    assert out.shape == want.shape, f"shape: expected {tuple(want.shape)}, got {tuple(out.shape)}"
    # in pieces: float64 copies of a result of 2^31 elements would not fit
    pieces = list(zip(out.reshape(-1).split(_PIECE), want.reshape(-1).split(_PIECE), strict=True))
    touched = missed = count = 0
    error_2 = norm_2 = 0.0
    for got, ref in pieces:
        live, written = ~ref.isnan(), ~got.isnan()
        touched += int((written & ~live).sum())
        missed += int((~written & live).sum())
        count += int(live.sum())
        norm_2 += ref[live].square().sum().item()
        error_2 += (got[live].double() - ref[live]).square().sum().item()
    assert touched == 0, f"{case}: {touched} elements past the end were written"
    assert missed == 0, f"{case}: {missed} elements are NaN or were not written"
    limit = tolerance(case, allow_tf32)
    error = (error_2 / norm_2) ** 0.5 if norm_2 else error_2
    assert error <= limit, f"{case}: relative Frobenius error {error:.3g} > {limit:.3g}"
    # randn products: an element's size is about the root mean square of all elements
    typical = (norm_2 / max(count, 1)) ** 0.5 or 1.0
    for got, ref in pieces:
        deviation = ((got.double() - ref).abs() / (ref.abs() + typical)).nan_to_num(0.0)
        largest = deviation.max().item() if deviation.numel() else 0.0
        assert largest <= 6 * limit, f"{case}: largest element error {largest:.3g} > {6 * limit:.3g}"


_M, _K, _N, _B = Layout.RAGGED_M, Layout.RAGGED_K, Layout.RAGGED_N, Layout.BATCHED
_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32

CASES: tuple[Case, ...] = (
    # ragged M: 2D x 3D
    Case("m-plain", _M, (16, 48, 64), n=64, k=64),
    Case("m-weights-kn", _M, (16, 48, 64), n=64, k=64, b_storage="row"),
    Case("m-empty-groups", _M, (0, 33, 0, 0, 70, 0), n=64, k=64),
    Case("m-all-rows-in-one-group", _M, (0, 0, 150, 0), n=40, k=64),
    Case("m-all-groups-empty", _M, (0, 0, 0), n=32, k=32, past=9),
    Case("m-no-rows", _M, (0, 0), n=32, k=32),
    Case("m-rows-past-the-end", _M, (5, 0, 40), n=64, k=64, past=37),
    Case("m-rows-past-the-end-kn", _M, (5, 0, 40), n=64, k=64, past=37, b_storage="row"),
    Case("m-one-group", _M, (77,), n=72, k=64),
    Case("m-many-groups", _M, tuple((7 * g) % 4 for g in range(70)), n=16, k=32),
    Case("m-odd-sizes", _M, (1, 7, 65), n=37, k=51),
    Case("m-odd-sizes-kn", _M, (1, 7, 65), n=37, k=51, b_storage="row"),
    Case("m-odd-n-aligned-k", _M, (3, 30), n=37, k=64),
    Case("m-ragged-tiles-of-k", _M, (20, 50), n=72, k=88),
    Case("m-k-smaller-than-a-block", _M, (20, 5), n=24, k=8),
    Case("m-k-is-one", _M, (4, 5), n=24, k=1),
    Case("m-n-is-one", _M, (4, 5), n=1, k=24),
    Case("m-k-is-zero", _M, (4, 5), n=24, k=0),
    Case("m-padded", _M, (30, 20), n=48, k=64, a_storage="padded", b_storage="padded"),
    Case("m-odd-strides", _M, (30, 20), n=48, k=64, a_storage="odd", b_storage="odd"),
    Case("m-misaligned-base", _M, (30, 20), n=48, k=64, a_storage="shifted", b_storage="shifted"),
    Case("m-steps", _M, (30, 20), n=48, k=64, a_storage="step", b_storage="step"),
    Case("m-a-column-major", _M, (30, 20), n=48, k=64, a_storage="column"),
    # Strides that suit TMA, and groups that begin within 16 bytes.
    Case("m-a-column-unaligned", _M, (30, 0, 21, 5), n=48, k=64, past=8, a_storage="column"),
    Case("m-expanded-a", _M, (30, 20), n=48, k=64, a_storage="expanded"),
    Case("m-scalar-a", _M, (30, 20), n=48, k=64, a_storage="scalar"),
    Case("m-expanded-b", _M, (30, 20), n=48, k=64, b_storage="expanded"),
    Case("m-bias", _M, (30, 0, 41), n=48, k=64, bias=True, past=3),
    Case("m-bias-odd-kn", _M, (30, 0, 41), n=45, k=33, bias=True, b_storage="row"),
    Case("m-fp16", _M, (30, 0, 41), n=48, k=64, dtype=_FP16),
    Case("m-fp32", _M, (30, 0, 41), n=48, k=64, dtype=_FP32),
    Case("m-fp32-kn", _M, (30, 0, 41), n=48, k=64, dtype=_FP32, b_storage="row"),
    Case("m-bf16-to-fp32", _M, (30, 0, 41), n=48, k=64, out_dtype=_FP32, bias=True),
    Case("m-fp16-to-fp32", _M, (30, 0, 41), n=48, k=64, dtype=_FP16, out_dtype=_FP32),
    Case("m-bf16-to-fp16", _M, (30, 0, 41), n=48, k=64, out_dtype=_FP16),
    Case("m-fp32-to-bf16", _M, (30, 0, 41), n=48, k=64, dtype=_FP32, out_dtype=_BF16),
    # ragged K: 2D x 2D, x.T @ y by groups of rows (weight gradient)
    Case("k-wgrad", _K, (48, 64, 16), m=64, n=48, a_storage="column", b_storage="row"),
    Case("k-empty-groups", _K, (0, 40, 0, 24, 0), m=32, n=32, a_storage="column", b_storage="row"),
    Case("k-all-groups-empty", _K, (0, 0), m=32, n=32, past=8, a_storage="column", b_storage="row"),
    Case("k-no-rows", _K, (0, 0), m=32, n=32, a_storage="column", b_storage="row"),
    Case("k-rows-past-the-end", _K, (9, 70), m=32, n=40, past=25, a_storage="column", b_storage="row"),
    Case("k-odd-sizes", _K, (1, 7, 65), m=37, n=51, a_storage="column", b_storage="row"),
    Case("k-one-group", _K, (77,), m=72, n=64, a_storage="column", b_storage="row"),
    Case("k-many-groups", _K, tuple((5 * g) % 4 for g in range(40)), m=16, n=16, a_storage="column", b_storage="row"),
    Case("k-row-by-column", _K, (17, 40), m=32, n=40, past=7, a_storage="row", b_storage="column"),
    Case("k-padded", _K, (16, 40), m=32, n=40, a_storage="padded", b_storage="padded"),
    Case("k-scalar-b", _K, (16, 40), m=32, n=40, a_storage="column", b_storage="scalar"),
    Case("k-fp16", _K, (33, 0, 31), m=32, n=40, a_storage="column", b_storage="row", dtype=_FP16),
    Case("k-fp32", _K, (33, 0, 31), m=32, n=40, a_storage="column", b_storage="row", dtype=_FP32),
    Case("k-bf16-to-fp32", _K, (33, 0, 31), m=32, n=40, a_storage="column", b_storage="row", out_dtype=_FP32),
    # ragged N: 3D x 2D
    Case("n-plain", _N, (16, 48, 64), m=64, k=64),
    Case("n-b-row-major", _N, (16, 48, 64), m=64, k=64, b_storage="row"),
    Case("n-b-row-unaligned", _N, (11, 0, 16, 1, 28), m=40, k=64, past=8, b_storage="row"),
    Case("n-empty-groups", _N, (0, 33, 0, 40, 0), m=32, k=64, past=11),
    Case("n-odd-sizes", _N, (1, 7, 65), m=37, k=51, a_storage="column", b_storage="row"),
    Case("n-one-group", _N, (77,), m=40, k=32),
    Case("n-expanded-b", _N, (30, 20), m=48, k=64, b_storage="expanded"),
    Case("n-fp16-to-fp32", _N, (30, 0, 20), m=48, k=64, dtype=_FP16, out_dtype=_FP32),
    Case("n-fp32", _N, (30, 0, 20), m=48, k=64, dtype=_FP32),
    # batched: 3D x 3D
    Case("b-plain", _B, (0, 0, 0), m=48, n=64, k=64),
    Case("b-weights-kn", _B, (0, 0, 0), m=48, n=64, k=64, b_storage="row"),
    Case("b-odd-sizes", _B, (0, 0), m=33, n=37, k=51),
    Case("b-one-group", _B, (0,), m=70, n=24, k=40),
    Case("b-transposed-a", _B, (0, 0), m=40, n=24, k=64, a_storage="column", b_storage="row"),
    Case("b-scalar-a", _B, (0, 0), m=40, n=24, k=64, a_storage="scalar"),
    Case("b-k-is-zero", _B, (0, 0), m=8, n=24, k=0),
    Case("b-bias", _B, (0, 0), m=40, n=24, k=64, bias=True),
    Case("b-fp16", _B, (0, 0), m=40, n=24, k=64, dtype=_FP16),
    Case("b-fp32", _B, (0, 0), m=40, n=24, k=64, dtype=_FP32),
    Case("b-bf16-to-fp32", _B, (0, 0), m=40, n=24, k=64, out_dtype=_FP32),
)

# These take up to about 25 GB and a GPU's speed.
LARGE: tuple[Case, ...] = (
    Case("m-uneven-ffn", _M, (1901, 2222, 0, 2100, 1845, 7, 2301, 2048), n=3072, k=1024),
    Case("m-uneven-ffn-kn", _M, (1901, 2222, 0, 2100, 1845, 7, 2301, 2048), n=3072, k=1024, b_storage="row"),
    Case("m-decode", _M, tuple(g % 3 for g in range(128)), n=1536, k=2048),
    Case("m-512-groups", _M, tuple((g * 5) % 4 for g in range(512)), n=768, k=512),
    Case("m-1024-groups", _M, tuple((g * 37) % 90 for g in range(1024)), n=256, k=256, past=100),
    Case("m-one-takes-most", _M, tuple(4000 if g == 5 else 4 for g in range(64)), n=1024, k=1024),
    Case("m-rows-fit-no-tile", _M, (1, 7, 65, 129, 200, 63, 64, 127), n=1000, k=712, bias=True),
    Case("m-long-k", _M, (100, 28), n=256, k=16384, out_dtype=_FP32),
    Case("k-wgrad-large", _K, (1901, 2222, 0, 2100), m=1024, n=1536, a_storage="column", b_storage="row", past=77),
    Case("k-512-groups", _K, tuple((g * 5) % 4 for g in range(512)), m=256, n=128, a_storage="column", b_storage="row"),
    Case("n-large", _N, (901, 222, 0, 1100), m=768, k=1024, past=30),
    Case("b-squares", _B, (0,) * 16, m=512, n=512, k=512),
    Case("m-b-over-2^31-elements", _M, tuple(g % 4 for g in range(66)), n=8192, k=4096),
    Case("m-a-over-2^31-elements", _M, (1 << 21, 3, 1 << 21), n=64, k=520),
    Case("m-out-over-2^31-elements", _M, (60000, 0, 10000), n=32768, k=64),
    Case(
        "k-out-over-2^31-elements",
        _K,
        tuple(g % 40 for g in range(33)),
        m=8192,
        n=8192,
        a_storage="column",
        b_storage="row",
    ),
)

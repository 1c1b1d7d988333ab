"""The FP8 quantisers against `Fp8Blocks.quantize`, bit for bit; fused forms against float64; what torch sees; the
kernels through the interpreter."""

import pytest
import torch

from expertile.formats.fp8 import Fp8Blocks
from expertile.ops.quantize.api import (
    quantize_activations,
    quantize_per_row,
    quantize_rms_norm,
    quantize_swiglu,
    quantize_tokens,
    quantize_weights,
)
from expertile.ops.scaled_grouped_mm.api import scaled_grouped_mm
from expertile.ragged import offs_from_sizes
from tests.support import interpreter

NAN, INF = float("nan"), float("inf")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def data(*shape, dtype=torch.bfloat16, seed=0, spread=4.0):
    """Normal numbers, their rows and columns of magnitudes that differ by powers of two, zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    x *= torch.exp2((torch.randn(*shape[:-1], 1, generator=generator) * spread).round())
    x.view(-1)[::7] = 0.0
    x.view(-1)[3::7] = -0.0
    return x.to(dtype)


def odd_blocks():
    """Blocks of zeros, of subnormals, of the largest numbers, with ties, with NaN and with infinities."""
    x = torch.zeros(8, 256)
    x[1] = 1e-44
    x[2] = torch.linspace(-2e-38, 2e-38, 256)
    x[3] = 3.3e38
    x[3, ::2] *= -0.37
    x[4, :128] = torch.arange(128) - 63.5  # amax 63.5: e4m3 ties abound
    x[4, 128:] = 448.0 / 512 * (torch.arange(128) + 1)
    x[5, 7], x[5, 200] = NAN, INF
    x[6, 9], x[6, 10] = -INF, -1.0
    x[7] = 1e-30 * torch.randn(256, generator=torch.Generator().manual_seed(1))
    return x


def strides_of_scales(made, turned=False):
    """What a product is promised: of weights contiguous, else the scales of a block side by side."""
    shape = made.scales.shape
    if made.block == (128, 128):
        return torch.empty(shape, device="meta").stride()
    if turned:
        return 1, shape[0]
    leading = shape[:-1]
    pitch = -(-leading.numel() // 4) * 4
    return *torch.empty(leading, device="meta").stride(), pitch


def assert_same(made, truth, where="", turned=False):
    """Bit for bit, but NaN is NaN. `turned`: the transposed copy."""
    assert made.values.is_contiguous(), where
    if made.values.numel():
        assert made.scales.stride() == strides_of_scales(made, turned), (where, made.scales.stride())
    for name in ("values", "scales"):
        got, want = getattr(made, name), getattr(truth, name)
        assert got.shape == want.shape and got.dtype is want.dtype, (where, name)
        got, want = (x.view(torch.uint8) if name == "values" else x for x in (got, want))
        nan = want & 0x7F == 0x7F if name == "values" else want.isnan()
        got_nan = got & 0x7F == 0x7F if name == "values" else got.isnan()
        assert torch.equal(nan, got_nan), (where, name)
        differ = int(((got != want) & ~nan).sum())
        assert differ == 0, f"{where} {name}: {differ} of {got.numel()} differ"
    assert made.block == truth.block


def check_per_row(x):
    made, truth = quantize_per_row(x), Fp8Blocks.quantize(x, (1, x.shape[-1]))
    assert made.block == truth.block and made.scales.is_contiguous() and made.values.is_contiguous()
    for got, want in ((made.scales, truth.scales), (made.values.float(), truth.values.float())):
        assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.nan_to_num(0), want.nan_to_num(0))


def check_rows(x, power_of_two=False):
    assert_same(quantize_activations(x, power_of_two=power_of_two), Fp8Blocks.quantize(x, power_of_two=power_of_two))


def check_tokens(x, sizes, power_of_two=False):
    offs = offs_from_sizes(sizes).to(x.device)
    truth, ends = Fp8Blocks.quantize_tokens(x, offs, power_of_two)
    rows, turned, found = quantize_activations(x, offs=offs, power_of_two=power_of_two)
    assert_same(turned, truth, "turned", True)
    assert_same(rows, Fp8Blocks.quantize(x, power_of_two=power_of_two), "rows")
    assert found.dtype is torch.int32 and found.tolist() == ends.tolist()
    alone, found = quantize_tokens(x, offs, power_of_two=power_of_two)
    assert_same(alone, truth, "alone", True)
    assert found.tolist() == ends.tolist()


def check_weights(w, power_of_two=False):
    truth = Fp8Blocks.quantize(w, (128, 128), power_of_two)
    assert_same(quantize_weights(w, power_of_two=power_of_two), truth)


def swiglu(x, interleaved):
    gate, up = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    return torch.nn.functional.silu(gate.double()) * up.double()


def rms(x, weight, eps):
    wide = x.double()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide if weight is None else wide * weight.double()


def assert_near(made, truth, power_of_two=False):
    """What float32 leaves open: scales to 1e-5, and which way a value goes that lies as near to a tie."""
    want = Fp8Blocks.quantize(truth.float(), power_of_two=power_of_two)
    torch.testing.assert_close(made.scales, want.scales, rtol=1e-5, atol=0)
    quotients = truth / want.scales.double().repeat_interleave(128, -1)[..., : truth.shape[-1]]
    low, high = ((quotients * (1 + change)).float().to(torch.float8_e4m3fn).float() for change in (-2e-5, 2e-5))
    got = made.values.float()
    wrong = (got != low) & (got != high)
    assert not wrong.any(), (int(wrong.sum()), got[wrong][:5], quotients[wrong][:5])
    assert (low != high).float().mean() < 0.02


def transposed(truth, sizes, room):
    """[K, room]: groups of `sizes` rows of truth, each begun on a multiple of 128, zeros between them."""
    padded = torch.zeros(room, truth.shape[1], dtype=truth.dtype, device=truth.device)
    start = to = 0
    for size in sizes:
        padded[to : to + size] = truth[start : start + size]
        start, to = start + size, to + -(-size // 128) * 128
    return padded.t()


def check_fused(rows, k, dtype, sizes=None):
    offs = None if sizes is None else offs_from_sizes(sizes)
    x = data(rows, 2 * k, dtype=dtype, spread=1.0)
    cases = [(quantize_swiglu(x, interleaved=i, offs=offs), swiglu(x, i)) for i in (False, True)]
    weight = data(1, k, dtype=torch.float32, seed=3)[0]
    if offs is None:
        made = quantize_rms_norm(x[:, :k], weight, eps=1e-3, power_of_two=True)
        assert_near(made, rms(x[:, :k], weight, 1e-3), power_of_two=True)
    cases += [(quantize_rms_norm(x[:, :k], w, eps=1e-3, offs=offs), rms(x[:, :k], w, 1e-3)) for w in (None, weight)]
    for made, truth in cases:
        if offs is None:
            assert_near(made, truth)
            continue
        row_blocks, turned, _ = made
        assert_near(row_blocks, truth)
        assert_near(turned, transposed(truth, sizes, turned.values.shape[1]))


if interpreter.active():
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    interpreter.repair()

    def fused_multiply_add(self, x, y, z):
        """One rounding: the product of two float32 is exact in float64. As shipped the interpreter rounds twice."""
        wide = x.data.astype("float64") * y.data + z.data
        return TensorHandle(wide.astype(z.data.dtype), z.dtype.scalar)

    InterpreterBuilder.create_fma = fused_multiply_add

else:

    def test_under_the_interpreter():
        interpreter.run_file_interpreted(__file__)

    @pytest.mark.parametrize("shape", [(0, 256), (5, 0), (2, 3, 200)])
    def test_shapes(shape):
        check_rows(torch.randn(shape))
        check_weights(torch.randn(shape))

    def test_a_row_of_no_element_has_a_scale():
        made = quantize_per_row(torch.zeros(3, 0))
        assert made.values.shape == (3, 0) and made.scales.tolist() == [[1.0]] * 3

    def test_round_trip_of_normal_data():
        x = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))
        for made in (quantize_activations(x), quantize_weights(x), quantize_activations(x, power_of_two=True)):
            error = ((made.dequantize() - x).norm() / x.norm()).item()
            assert 0.024 < error < 0.028, error

    @pytest.mark.parametrize(
        "call, message",
        [
            (lambda: quantize_activations([1.0]), "x: expected a torch.Tensor, got list"),
            (lambda: quantize_activations(torch.ones(2, 128, dtype=torch.int32)), "x: expected float32, bfloat16"),
            (lambda: quantize_activations(torch.ones(128)), "x: expected at least 2 dimensions"),
            (lambda: quantize_weights(torch.ones(128)), "w: expected at least 2 dimensions"),
            (lambda: quantize_swiglu(torch.ones(2, 129)), "x: expected an even number of columns"),
            (lambda: quantize_rms_norm(torch.ones(2, 128), torch.ones(64)), r"weight: expected shape \[128\]"),
            (lambda: quantize_tokens(torch.ones(1, 2, 128), torch.ones(1)), "x: expected 2 dimensions"),
            (lambda: quantize_tokens(torch.ones(2, 128), torch.ones(1)), "offs: expected dtype torch.int32"),
            (lambda: quantize_tokens(torch.ones(2, 128), torch.ones(0).int()), "offs: expected at least one group"),
            (
                lambda: quantize_rms_norm(torch.ones(2, 128), eps=None),
                "eps: expected a finite number of at least 0, got No",
            ),
            (lambda: quantize_rms_norm(torch.ones(2, 128), eps=-1.0), "eps: expected a finite number of at least 0"),
            (lambda: quantize_activations(torch.ones(2, 128), offs=[2]), "offs: expected a torch.Tensor, got list"),
        ],
    )
    def test_mistakes_are_named(call, message):
        with pytest.raises(ValueError, match=message):
            call()

    def test_results_have_no_gradient_on_any_device():
        x, weight, offs = (
            torch.randn(6, 256, requires_grad=True),
            torch.ones(256, requires_grad=True),
            offs_from_sizes((2, 4)),
        )
        made = [quantize_activations(x), quantize_per_row(x), quantize_weights(x), quantize_rms_norm(x, weight)]
        made += [quantize_swiglu(x), quantize_tokens(x, offs)[0], *quantize_rms_norm(x, weight, offs=offs)[:2]]
        assert not any(m.values.requires_grad or m.scales.requires_grad for m in made)

    def test_opcheck():
        from torch.library import opcheck

        x, offs = torch.randn(5, 256), offs_from_sizes((2, 3))
        ops = torch.ops.expertile
        tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
        opcheck(ops.quantize_rows.default, (torch.randn(2, 3, 200), "plain", None, 0.0, False), test_utils=tests)
        opcheck(ops.quantize_rows.default, (x, "swiglu", None, 0.0, False), test_utils=tests)
        opcheck(ops.quantize_both.default, (x, offs, "rms_norm", torch.ones(256), 1e-6, True), test_utils=tests)
        opcheck(ops.quantize_tokens.default, (x, offs, False), test_utils=tests[:2])
        for given in (torch.randn(2, 3, 200), torch.randn(200, 3).t()):
            opcheck(ops.quantize_per_row.default, (given,), test_utils=tests)
        opcheck(ops.quantize_weights.default, (torch.randn(2, 130, 256), False), test_utils=tests[:2])

    @pytest.mark.parametrize("tokens", [0, 1, 6, 8])
    def test_products_take_the_scales_as_they_lie(tokens):
        x, w = data(tokens + 2, 200), quantize_weights(data(2, 130, 200))
        offs = offs_from_sizes((2, tokens))
        fused = quantize_swiglu(torch.cat([x, x], -1))
        for made in (quantize_activations(x), quantize_activations(x, offs=offs)[0], fused):
            assert made.scales.shape == (tokens + 2, 2) and made.scales.stride() == strides_of_scales(made)
            b, rows = w.values.transpose(1, 2), made.scales.contiguous()
            got, want = (scaled_grouped_mm(made.values, b, s, w.scales, offs=offs) for s in (made.scales, rows))
            assert torch.equal(got, want)

    @pytest.mark.parametrize("shape", [(8, 256), (2, 8, 256)])
    def test_exports_for_any_number_of_rows(shape):
        class Quantizer(torch.nn.Module):
            def forward(self, x):
                made = quantize_activations(x)
                return made.values.float(), made.scales

        rows = torch.export.Dim("rows", max=1024)
        exported = torch.export.export(Quantizer(), (torch.randn(shape),), dynamic_shapes=({len(shape) - 2: rows},))
        other = torch.randn(*shape[:-2], 13, 256)
        torch.testing.assert_close(exported.module()(other), Quantizer()(other), rtol=0, atol=0)

    def test_compiles_without_a_break():
        def both(x, w, offs):
            rows, turned, ends = quantize_activations(x, offs=offs)
            weights = quantize_weights(w)
            alone = quantize_activations(x)
            return rows.values, rows.scales, turned.values, ends, weights.scales, alone.values, alone.scales

        compiled = torch.compile(both, fullgraph=True, dynamic=True, backend="aot_eager")
        for tokens in (5, 9):
            x, w, offs = torch.randn(tokens, 256), torch.randn(2, 130, 256), offs_from_sizes((2, 3))
            for got, want in zip(compiled(x, w, offs), both(x, w, offs), strict=True):
                assert torch.equal(got.float(), want.float()) and got.stride() == want.stride()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("power_of_two", [False, True])
def test_rows(dtype, power_of_two):
    # Blocks side by side; rows of 6 blocks; a block cut off; rows that are slices.
    for x in (data(33, 128, dtype=dtype), data(3, 768, dtype=dtype), data(5, 200, dtype=dtype)):
        check_rows(x, power_of_two)
    check_rows(data(7, 512, dtype=dtype)[:, 64:-64], power_of_two)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_per_row(dtype):
    for shape in ((33, 128), (3, 768), (2, 5, 200), (1, 4096)):
        check_per_row(data(*shape, dtype=dtype))
    check_per_row(data(7, 512, dtype=dtype)[:, 64:-64])
    assert quantize_per_row(data(0, 200, dtype=dtype)).scales.shape == (0, 1)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert quantize_per_row(data(0, 200, dtype=dtype)).scales.dtype is torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_odd_blocks():
    for dtype in (torch.float32, torch.bfloat16):
        for power_of_two in (False, True):
            check_rows(odd_blocks().to(dtype), power_of_two)
        check_per_row(odd_blocks().to(dtype))
    check_weights(odd_blocks()[:5])
    check_weights(odd_blocks())
    check_tokens(odd_blocks(), (5, 2))


@pytest.mark.parametrize(
    "sizes, past, k, dtype",
    [((5, 0, 128), 0, 128, torch.bfloat16), ((0, 0), 3, 40, torch.float32), ((129,), 7, 136, torch.float16)],
)
def test_tokens(sizes, past, k, dtype):
    check_tokens(data(sum(sizes) + past, k, dtype=dtype), sizes, power_of_two=dtype is torch.float32)


def test_rows_of_no_group_may_hold_anything():
    x = data(9, 128)
    x[6:] = NAN
    check_tokens(x, (4, 2))


@pytest.mark.parametrize("shape", [(2, 129, 136), (256, 128), (1, 3, 129)])
def test_weights(shape):
    for dtype in DTYPES if shape[-1] % 128 else DTYPES[:1]:
        check_weights(data(*shape, dtype=dtype))
    check_weights(data(*shape).transpose(-2, -1), power_of_two=True)


def test_fused():
    check_fused(5, 128, torch.bfloat16)
    check_fused(2, 200, torch.float32)
    check_fused(7, 40, torch.bfloat16, (7,))


@pytest.mark.parametrize("ends", [[9, 3, 9, 20], [3, 9, 9, 25], [-1, 3, 9, 20]])
def test_ends_on_a_cpu_are_looked_at(ends):
    with pytest.raises(ValueError, match="offs: expected"):
        quantize_activations(torch.randn(20, 256), offs=torch.tensor(ends, dtype=torch.int32))

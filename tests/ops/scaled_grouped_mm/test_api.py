"""The public call on the CPU: contract, errors, compile, and a training step in FP8. The shared cases on every backend
stand in backends/ and, on a GPU, in tests/gpu."""

from types import SimpleNamespace

import pytest
import torch

from expertile.device import Device
from expertile.formats.fp8 import Fp8Blocks
from expertile.ops.launch import nvrtc
from expertile.ops.scaled_grouped_mm import api
from expertile.ops.scaled_grouped_mm.api import choose, scaled_grouped_mm
from expertile.ops.scaled_grouped_mm.backends import BACKENDS
from expertile.ragged import offs_from_sizes
from tests.ops.scaled_grouped_mm.cases import CASES, block_problem, check, make, problem_of
from tests.ops.scaled_grouped_mm.reference import reference

SIZES = [5, 0, 9, 3]
OFFS = offs_from_sizes(SIZES)
G, T, K, N = len(SIZES), sum(SIZES), 200, 264


def operands(seed=0):
    gen = torch.Generator().manual_seed(seed)
    x, w = torch.randn(T, K, generator=gen), torch.randn(G, N, K, generator=gen)
    return x, w, Fp8Blocks.quantize(x), Fp8Blocks.quantize(w, (128, 128))


def args_of(a, b):
    return a.values, b.values.transpose(1, 2), a.scales, b.scales


@pytest.mark.parametrize("case", CASES, ids=str)
def test_auto(case):
    o = make(case)
    out = scaled_grouped_mm(o.a, o.b, o.scale_a, o.scale_b, offs=o.offs, bias=o.bias, out_dtype=case.out_dtype)
    if case.layout == "ragged_m":  # what lies behind the last group is left as it comes
        out[sum(case.sizes) :] = float("nan")
    check(case, out, o, limit=2e-6)


def test_close_to_the_product_that_was_quantised():
    x, w, a, b = operands()
    out = scaled_grouped_mm(*args_of(a, b), offs=OFFS, out_dtype=torch.float32, check=True)
    want = torch.cat([part @ w[g].T for g, part in enumerate(x.split(SIZES))])
    error = (out - want).norm() / want.norm()
    assert 0.02 < error < 0.05, error


def test_training_step():
    """Forward, dgrad with the transposed weights, wgrad along tokens: all close to the gradients without FP8."""
    x, w, _, b = operands()
    x.requires_grad_(), w.requires_grad_()
    want = torch.cat([part @ w[g].T for g, part in enumerate(x.split(SIZES))])
    grad = torch.randn(T, N, generator=torch.Generator().manual_seed(1))
    dx, dw = torch.autograd.grad(want, (x, w), grad)

    g8, back = Fp8Blocks.quantize(grad), b.transposed()
    got = scaled_grouped_mm(g8.values, back.values.transpose(1, 2), g8.scales, back.scales, offs=OFFS)
    assert (got.float() - dx).norm() / dx.norm() < 0.05
    tokens_g, offs = Fp8Blocks.quantize_tokens(grad, OFFS)
    tokens_x, same = Fp8Blocks.quantize_tokens(x.detach(), OFFS)
    assert torch.equal(offs, same)
    got = scaled_grouped_mm(
        tokens_g.values, tokens_x.values.t(), tokens_g.scales, tokens_x.scales, offs=offs, out_dtype=torch.float32
    )
    assert got.shape == dw.shape == (G, N, K)
    assert (got - dw).norm() / dw.norm() < 0.05
    assert (got[1] == 0).all()


def test_operator_passes_opcheck(monkeypatch):
    allclose = torch.allclose

    def allclose_of_bytes(x, y, **options):
        """torch.allclose knows no float8."""
        return torch.equal(x.view(torch.uint8), y.view(torch.uint8)) if x.itemsize == 1 else allclose(x, y, **options)

    monkeypatch.setattr(torch, "allclose", allclose_of_bytes)
    _, _, a, b = operands()
    torch.library.opcheck(torch.ops.expertile.scaled_grouped_mm, (*args_of(a, b), OFFS, None, torch.bfloat16, "auto"))
    x, offs = Fp8Blocks.quantize_tokens(torch.randn(T, 16), OFFS)
    torch.library.opcheck(
        torch.ops.expertile.scaled_grouped_mm,
        (x.values, x.values.t(), x.scales, x.scales, offs, None, torch.float32, "loop"),
    )


def test_compiles_without_a_graph_break_for_any_number_of_rows():
    compiled = torch.compile(
        lambda *xs: scaled_grouped_mm(*xs[:4], offs=xs[4]) * 2, fullgraph=True, dynamic=True, backend="aot_eager"
    )
    _, _, _, b = operands()
    for sizes in (SIZES, [1, 2, 3, 4], [0, 0, 0, 31]):
        a = Fp8Blocks.quantize(torch.randn(sum(sizes), K))
        offs = offs_from_sizes(sizes)
        want = reference(*args_of(a, b), offs) * 2
        torch.testing.assert_close(compiled(*args_of(a, b), offs).float(), want, rtol=0.01, atol=0.01)


def test_offs_of_any_stride():
    _, _, a, b = operands()
    offs = torch.stack([OFFS, torch.full_like(OFFS, 99)], 1)[:, 0]
    assert torch.equal(scaled_grouped_mm(*args_of(a, b), offs=offs), scaled_grouped_mm(*args_of(a, b), offs=OFFS))


def bad(**changes):
    """(arguments, keywords) of a good call with some replaced."""
    _, _, a, b = operands()
    named = dict(zip(("a", "b", "scale_a", "scale_b"), args_of(a, b), strict=True), offs=OFFS)
    return {**named, **{k: v(named[k]) if callable(v) else v for k, v in changes.items()}}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"a": None}, "a: expected a torch.Tensor, got NoneType"),
        ({"scale_b": 1.0}, "scale_b: expected a torch.Tensor, got float"),
        ({"bias": [1]}, "bias: expected a torch.Tensor, got list"),
        ({"offs": None}, "offs: expected an int32 tensor with the end of each group"),
        ({"offs": [1]}, "offs: expected a torch.Tensor, got list"),
        ({"offs": OFFS.long()}, "offs: expected dtype torch.int32, got torch.int64"),
        ({"offs": OFFS[:2]}, r"offs: expected length 4 \(the groups of b\), got 2"),
        ({"offs": OFFS + 5}, "offs: expected a last end of at most 17"),
        ({"a": lambda a: a.float()}, "a: expected dtype torch.float8_e4m3fn, got torch.float32"),
        ({"b": lambda b: b.to(torch.float8_e5m2)}, "b: expected dtype torch.float8_e4m3fn, got torch.float8_e5m2"),
        ({"a": lambda a: a[None]}, r"a, b: expected a \[M, K\] with b \[G, K, N\]"),
        ({"a": lambda a: a[:, :-1]}, "b: expected 199 rows"),
        ({"scale_a": lambda s: s.half()}, "scale_a: expected dtype torch.float32, got torch.float16"),
        ({"scale_a": lambda s: s[:, :1]}, r"scale_a: expected .*\[17, 2\] and \[4, 3, 2\] \(block\).*, got \[17, 1\]"),
        ({"scale_a": lambda s: s[:, 0]}, r"scale_b: expected .*\[17\] and \[4, 264\] \(row\), got \[17\] and"),
        ({"scale_b": lambda s: s[:, :2]}, r"scale_b: expected .*, got \[17, 2\] and \[4, 2, 2\]"),
        ({"bias": torch.zeros(4, 7)}, r"bias: expected shape \[4, 264\]"),
        ({"out_dtype": torch.float8_e4m3fn}, "out_dtype: expected torch.bfloat16 or .*, got torch.float8_e4m3fn"),
        ({"backend": "abacus"}, "backend: expected one of .*loop.*, got 'abacus'"),
        ({"backend": "torch_scaled"}, "backend: torch_scaled cannot take this problem: "),
        ({"config": object()}, "config: expected None with backend='auto'"),
        ({"backend": "loop", "config": 3}, "config: expected a NoConfig of backend loop, got 3"),
        (
            {"scale_a": lambda s: s.index_fill(0, torch.tensor([3]), float("nan")), "check": True},
            "scale_a: expected finite scales, got 2 that are NaN or infinite",
        ),
        ({"scale_b": lambda s: s / 0, "check": True}, "scale_b: expected finite scales, got 24 that"),
    ],
)
def test_errors_name_the_argument(changes, message):
    with pytest.raises(ValueError, match=message):
        scaled_grouped_mm(**bad(**changes))


@pytest.mark.parametrize("name", ["bias", "scale_a", "scale_b"])
def test_a_gradient_is_refused_on_a_cpu_too(name):
    call = bad(bias=torch.zeros(4, 264))
    with torch.no_grad():
        expected = scaled_grouped_mm(**call)
    call[name].requires_grad_()
    out = scaled_grouped_mm(**call)
    assert torch.equal(out[:17], expected[:17])
    with pytest.raises(RuntimeError, match="expertile: scaled_grouped_mm has no gradient"):
        out.sum().backward()


def test_scales_behind_the_last_group_may_be_anything():
    call = bad(scale_a=lambda s: torch.cat([s[:16], torch.full_like(s[16:], float("inf"))]), check=True)
    call["offs"] = torch.tensor([5, 5, 14, 16], dtype=torch.int32)
    assert scaled_grouped_mm(**call)[:16].isfinite().all()


def test_ragged_k_groups_begin_on_blocks():
    x, _ = Fp8Blocks.quantize_tokens(torch.randn(T, 16), OFFS)
    with pytest.raises(ValueError, match="offs: expected multiples of 128 where K is ragged .* the end 5 at group 0"):
        scaled_grouped_mm(x.values, x.values.t(), x.scales, x.scales, offs=OFFS)


def test_k_of_zero_is_the_bias():
    fp8 = torch.float8_e4m3fn
    a, b = torch.empty(T, 0, dtype=fp8), torch.empty(G, N, 0, dtype=fp8).transpose(1, 2)
    bias = torch.randn(G, N)
    out = scaled_grouped_mm(
        a, b, torch.empty(T, 0), torch.empty(G, 3, 0), offs=OFFS, bias=bias, out_dtype=torch.float32
    )
    assert torch.equal(out, bias.repeat_interleave(torch.tensor(SIZES), 0))


def test_choice_says_why():
    case = CASES[0]
    problem = problem_of(case, make(case))
    choice = choose(problem, Device.current("cpu"))
    assert choice.backend.name == "loop" and choice.why.startswith("loop: ")
    assert {e.backend for e in choice.estimates} == {b.name for b in BACKENDS} - {"loop"}


@pytest.mark.parametrize(
    "gpu, name", [("h200", "cuda_fp8"), ("rtx 4090", "triton_fp8"), ("b200", "triton_fp8"), ("a100", "loop")]
)
def test_choice_on_a_gpu(gpu, name, monkeypatch):
    from dataclasses import replace

    monkeypatch.setattr(nvrtc, "missing", lambda: None)
    case = CASES[0]
    problem = replace(problem_of(case, make(case)), device_type="cuda", group_sizes=None)
    assert choose(problem, Device.by_name(gpu)).backend.name == name


def test_new_numbers_of_rows_share_a_choice(monkeypatch):
    """A server's prompts have another number at every step, and modelling all tiles takes most of a millisecond."""
    monkeypatch.setattr(nvrtc, "missing", lambda: None)
    h200 = Device.by_name("h200")
    before = api._choose.cache_info().misses
    chosen = {choose(block_problem(8, rows, 4096, 7168), h200).backend.name for rows in range(8192, 8448)}
    assert chosen == {"cuda_fp8"} and api._choose.cache_info().misses - before <= 3
    # Few rows are what they are: one more than a tile holds is another tile.
    assert all(api._rounded_up(p) is p for p in (block_problem(1, rows, 4096, 7168) for rows in (1, 65, 127)))


def test_a_choice_for_rounded_rows_must_take_the_problem_itself(monkeypatch):
    asked = []

    def stand_in(problem, device, backends):
        asked.append(problem.m)
        if problem.m == 8320:
            raise ValueError("backend: none supports this problem")
        return SimpleNamespace(backend=SimpleNamespace(supports=lambda p, device: "no" if p.m == 9000 else None))

    monkeypatch.setattr(api, "_choose", stand_in)
    for rows, wanted in ((8192, [8192]), (8200, [8320, 8200]), (8400, [8448]), (9000, [9088, 9000])):
        asked.clear()
        choose(block_problem(8, rows, 256, 256), Device.by_name("h200"))
        assert asked == wanted
